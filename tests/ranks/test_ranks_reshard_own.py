"""What each rank keeps for itself, at another world size: somebody says whose a rank gets, or nobody gets any."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from reshard_rig import front, load, restore, save

from ckptfmt import PerRank, Rng, register_type
from ckptfmt.errors import InvalidInput, Mismatch, NotFound
from ckptfmt.rank_here import rank_here


def state(rank: int) -> dict[str, Any]:
    return {
        "w": np.arange(4.0),
        "loader": PerRank({"position": 100 + rank, "order": np.full(3, rank)}),
        "epoch": 3,
        "seen": PerRank(rank * 10),
    }


def blank() -> dict[str, Any]:
    return {
        "w": np.zeros(4),
        "loader": PerRank({"position": -1, "order": np.full(3, -1)}),
        "epoch": 0,
        "seen": PerRank(-1),
    }


def held(live: dict[str, Any]) -> tuple[Any, ...]:
    loader = live["loader"].value
    return loader["position"], loader["order"].tolist(), live["seen"].value, live["epoch"]


def of(rank: int) -> tuple[Any, ...]:
    return 100 + rank, [rank] * 3, rank * 10, 3


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_gets_its_own_at_the_same_world_size(world_size: int) -> None:
    opened = save([state(rank) for rank in range(world_size)])
    for rank in range(world_size):
        live = blank()
        restore(opened, live, rank=rank, world_size=world_size)
        assert held(live) == of(rank)


@pytest.mark.parametrize(("saved", "rank", "world_size"), [(2, 0, 1), (2, 1, 4), (1, 0, 2), (3, 2, 4)])
@pytest.mark.parametrize("strict", [True, False])
def test_nobody_s_by_default_at_another_world_size(saved: int, rank: int, world_size: int, strict: bool) -> None:
    """Every path is named, with both world sizes and the way out; nothing is changed, strict or not."""
    opened = save([state(rank) for rank in range(saved)])
    live = blank()
    with pytest.raises(Mismatch) as caught:
        restore(opened, live, rank=rank, world_size=world_size, strict=strict)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["loader", "seen"]
    for problem in caught.value.problems:
        assert f"each of {saved} rank" in problem
        assert f"rank {rank} of {world_size}" in problem
        assert "map=" in problem
    assert held(live) == (-1, [-1] * 3, -1, 0)
    assert not live["w"].any()


@pytest.mark.parametrize("map_", [{0: 1, 1: 1, 2: 0, 3: 0}, lambda rank: 1 - rank // 2], ids=["mapping", "function"])
def test_map_says_whose(map_: Any) -> None:
    opened = save([state(0), state(1)])
    for rank in range(4):
        live = blank()
        restore(opened, live, rank=rank, world_size=4, map=map_)
        assert held(live) == of(1 - rank // 2)


def test_a_rank_that_is_given_nobody_s_goes_on_with_its_own() -> None:
    """Ranks that join a job draw numbers of their own, and need not share those of another one."""
    opened = save([state(0), state(1)])
    for rank in range(4):
        live: dict[str, Any] = blank() | {"new": {}}
        report = restore(
            opened, live, rank=rank, world_size=4, map=lambda rank: rank if rank < 2 else None, strict=False
        )
        if rank < 2:
            assert held(live) == of(rank)
        else:
            assert held(live) == (-1, [-1] * 3, -1, 3)
            assert {"loader", "seen"} <= set(report.skipped)
        assert live["w"].tolist() == [0, 1, 2, 3]


def test_map_is_heard_at_the_same_world_size_too() -> None:
    live = blank()
    restore(save([state(0), state(1)]), live, rank=0, world_size=2, map={0: 1})
    assert held(live) == of(1)


@pytest.mark.parametrize(
    ("map_", "told"),
    [
        ({1: 0}, "map= says nothing of rank 0"),
        ({0: 2}, r"map\[0\]=2: generation 1 of run 'r' was saved by 2 ranks"),
        ({0: -1}, r"map\[0\]=-1"),
        ({0: True}, r"map\[0\]=True"),
        ({0: 1.5}, r"map\[0\]=1.5"),
        (lambda rank: 7, r"map\(0\)=7"),
        (lambda rank: "0", r"map\(0\)='0'"),
    ],
)
def test_a_map_that_names_nobody(map_: Any, told: str) -> None:
    live = blank()
    with pytest.raises(InvalidInput, match=told):
        restore(save([state(0), state(1)]), live, world_size=4, map=map_)
    assert held(live) == (-1, [-1] * 3, -1, 0)


def test_what_is_left_out_needs_no_map() -> None:
    opened = save([state(0), state(1)])
    live = blank()
    report = restore(opened, live, world_size=4, keys=["w", "epoch"])
    assert set(report.loaded) == {"w", "epoch"}
    assert {"loader", "seen"} <= set(report.skipped)
    assert live["loader"].value["position"] == -1
    fewer = {"w": np.zeros(4), "epoch": 0}
    report = restore(opened, fewer, world_size=4, strict=False)
    assert set(report.unexpected) == {"loader", "seen"}
    assert fewer["epoch"] == 3


def test_an_empty_mapping_takes_no_one_s() -> None:
    """It takes whatever was saved, but nothing of which it is not known whose."""
    opened = save([{"a": {"n": 1, "own": PerRank(rank)}} for rank in range(2)])
    with pytest.raises(Mismatch, match=r"a\.own: kept by each of 2 ranks"):
        restore(opened, {"a": {}}, world_size=3)
    live: dict[str, Any] = {"a": {}}
    restore(opened, live, world_size=3, map={0: 1})
    assert bare(live) == {"a": {"n": 1, "own": ("own", 1)}}


def test_a_rank_that_did_not_save_kept_none() -> None:
    opened = save({1: {"w": 1, "own": PerRank(5)}}, world_size=3)
    live = {"w": 0, "own": PerRank(0)}
    for rank in (0, 2):
        with pytest.raises(Mismatch, match=rf"own: saved rank {rank} kept none, only rank 1 did"):
            restore(opened, live, rank=rank, world_size=3)
    restore(opened, live, rank=0, world_size=3, map=lambda rank: 1)
    assert live["own"].value == 5
    live["own"] = PerRank(0)
    restore(opened, live, rank=1, world_size=3)
    assert live["own"].value == 5


def test_what_a_rank_keeps_every_rank_that_saves_has_to_keep() -> None:
    """A resume would find out too late."""
    states = [state(rank) for rank in range(4)]
    del states[3]["loader"]
    with pytest.raises(Mismatch, match=r"'loader' is kept by each rank for itself.*, but not by rank 3"):
        save(states)


def test_renamed_values_are_each_rank_s_own_all_the_same() -> None:
    opened = save([state(0), state(1)])
    live = {"net": np.zeros(4), "data": blank()["loader"], "epoch": 0, "seen": PerRank(-1)}
    rename = {"w": "net", "loader": "data"}
    with pytest.raises(Mismatch, match="loader: kept by each of 2 ranks"):
        restore(opened, live, world_size=1, rename=rename)
    restore(opened, live, rank=1, world_size=2, rename=rename)
    assert live["data"].value["position"] == 101


def test_random_numbers_are_each_rank_s_own() -> None:
    drawn, states = [], []
    for rank in range(2):
        random.seed(rank)
        states.append({"rng": Rng(), "w": np.ones(1)})
        saved = random.getstate()
        drawn.append(random.random())
        random.setstate(saved)
        states[-1]["kept"] = PerRank(saved)
    opened = save_in_turn(states)
    live = {"rng": Rng(), "w": np.zeros(1)}
    with pytest.raises(Mismatch, match=r"rng: kept by each of 2 ranks for itself; here is rank 0 of 1"):
        restore(opened, live, strict=False)
    for rank in (1, 0):
        restore(opened, live, map={0: rank}, strict=False)
        assert random.random() == drawn[rank]


def save_in_turn(states: list[dict[str, Any]]) -> Any:
    """Each rank's generators are as they were when its state was made."""
    from reshard_rig import MemoryBackend, merged, opened_of, uuid, write_rank

    backend = MemoryBackend(f"reshard-{uuid.uuid4().hex}")
    parts = []
    for rank, one in enumerate(states):
        random.setstate(one.pop("kept").value)
        parts.append(write_rank(backend, one, rank, len(states)))
    return opened_of(backend, merged(parts))


# -- marks ------------------------------------------------------------------------------------------------------
class Pair(NamedTuple):
    own: Any
    common: Any


class Cursor:
    """Marks what is a rank's own in its state, as it expects it there."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": PerRank(self.at), "length": 100}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"].value


register_type(Pair, name="tests.own.Pair", encode=list, decode=lambda items: Pair(*items))


def bare(value: Any) -> Any:
    """As values that are compared by value: a mark is a pair."""
    if isinstance(value, PerRank):
        return "own", bare(value.value)
    if isinstance(value, dict):
        return {key: bare(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(*map(bare, value)) if isinstance(value, Pair) else type(value)(map(bare, value))
    return value.tolist() if isinstance(value, np.ndarray) else value.at if isinstance(value, Cursor) else value


MARKED: dict[str, Callable[[int], Any]] = {
    "list": lambda n: [PerRank(n), 2],
    "tuple": lambda n: (PerRank(n), 2),
    "only a mark": lambda n: [PerRank(n)],
    "nested": lambda n: [[(PerRank(n), 1)], {"k": [PerRank((n, 1))]}],
    "tensors": lambda n: [PerRank({"t": np.full(3, n)}), (PerRank(np.full(2, n)), np.ones(1))],
    "dict": lambda n: {"k": PerRank([n, n])},
    "registered type": lambda n: Pair(PerRank(n), 2),
    "list of registered type": lambda n: [Pair(PerRank([n]), 2), 1],
    "object": lambda n: Cursor(n),
    "objects": lambda n: [Cursor(n), (Cursor(n + 1), PerRank(n))],
}


@pytest.mark.parametrize("case", MARKED)
def test_a_restored_state_is_marked_as_it_was(case: str) -> None:
    """Who resumes saves it again: a mark that got lost would make that save fail, or one rank's value everybody's."""
    make = MARKED[case]
    opened = save([{"x": make(rank)} for rank in range(2)])
    restored = []
    for rank in range(2):
        live = {"x": make(70)}
        restore(opened, live, rank=rank, world_size=2)
        assert bare(live["x"]) == bare(make(rank))
        restored.append(live)
    assert save(restored).keepers() == [0, 1]


@pytest.mark.parametrize("empty", [{}, [], (), None], ids=repr)
def test_what_is_replaced_as_a_whole_is_marked_as_it_was(empty: Any) -> None:
    def make(rank: int) -> dict[str, Any]:
        return {"a": {"n": 1, "own": PerRank({"k": rank})}} if isinstance(empty, dict) else {"a": [1, [PerRank(rank)]]}

    opened = save([make(0), make(1)])
    live = {"a": empty}
    restore(opened, live, rank=1, world_size=2)
    assert bare(live) == bare(make(1))


def test_load_gives_values_without_marks_but_what_a_type_encoded_to_its_decode() -> None:
    opened = save([{"x": [PerRank(rank)], "pair": Pair(PerRank(rank), 2)} for rank in range(2)])
    assert bare(load(opened, rank=1)) == {"x": [1], "pair": Pair(("own", 1), 2)}
    assert bare(load(opened, rank=1, subtree="pair")) == Pair(("own", 1), 2)


# -- inside what is restored as a whole ---------------------------------------------------------------------------
def whole(n: int) -> dict[str, Any]:
    return {"w": np.full(2, n), "cursor": Cursor(n), "pair": Pair(PerRank(n), [PerRank(n)]), "epoch": n}


def saved_whole() -> Any:
    return save([whole(rank) | {"w": np.full(2, 5), "epoch": 5} for rank in range(2)])


def test_every_slot_inside_wholes_is_named() -> None:
    live = whole(70)
    with pytest.raises(Mismatch) as caught:
        restore(saved_whole(), live, world_size=3)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["cursor.at", "pair.0", "pair.1.0"]
    assert all("rank 0 of 3" in problem and "map=" in problem for problem in caught.value.problems)
    assert bare(live) == bare(whole(70))


def test_what_holds_nobody_s_values_stays_as_it_is() -> None:
    live = whole(70)
    report = restore(saved_whole(), live, world_size=3, map=lambda rank: None)
    assert {"cursor", "pair"} == set(report.skipped)
    assert {"w", "epoch"} == set(report.loaded)
    assert bare(live) == bare(whole(70)) | {"w": [5, 5], "epoch": 5}


# -- load ---------------------------------------------------------------------------------------------------
def test_load_builds_for_the_rank_that_is_named() -> None:
    opened = save([state(0), state(1)])
    for rank in range(2):
        built = load(opened, rank=rank)
        assert (built["loader"]["position"], built["seen"], built["epoch"]) == (100 + rank, rank * 10, 3)
        assert built["loader"]["order"].tolist() == [rank] * 3
        assert load(opened, rank=rank, subtree="loader.position") == 100 + rank
        assert load(opened, rank=rank, keys="loader*")["loader"]["order"].tolist() == [rank] * 3
    for rank in (2, -1, True):
        with pytest.raises(InvalidInput, match=rf"rank={rank}: generation 1 of run 'r' was saved by 2 ranks"):
            load(opened, rank=rank)


def test_load_asks_whose() -> None:
    opened = save([state(0), state(1)])
    with pytest.raises(Mismatch) as caught:
        load(opened)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["loader", "seen"]
    assert all("rank=" in problem for problem in caught.value.problems)
    with pytest.raises(Mismatch, match="loader: kept by each of 2 ranks"):
        load(opened, subtree="loader")
    assert load(opened, subtree="epoch") == 3
    assert load(opened, subtree="w").tolist() == [0, 1, 2, 3]
    assert set(load(opened, keys="w")) == {"w", "epoch"}
    assert set(load(opened, exclude=["loader", "seen"])) == {"w", "epoch"}
    with pytest.raises(Mismatch, match="seen: kept"):
        load(opened, exclude="loader")


def test_the_only_rank_needs_no_name() -> None:
    assert load(save([state(0)]))["loader"]["position"] == 100


def test_the_only_rank_that_kept_something_needs_no_name() -> None:
    """``ranks=[1]`` of three: the others are ranks of the job, but kept nothing."""
    opened = save({1: state(1)}, world_size=3)
    assert load(opened)["loader"]["position"] == 101
    assert load(opened, subtree="seen") == 10


def test_who_kept_something_is_told_not_how_many_ranks_there_were() -> None:
    opened = save({rank: state(rank) for rank in (0, 2)}, world_size=4)
    with pytest.raises(Mismatch, match=r"seen: kept by each of the ranks 0, 2 for itself; name one with rank="):
        load(opened)
    only = save({2: state(2)}, world_size=4)
    with pytest.raises(Mismatch, match=r"seen: kept by rank 2 for itself; here is rank 0 of 3"):
        restore(only, blank(), world_size=3)


@pytest.mark.parametrize(
    "selection",
    [
        {"subtree": "loader.position"},
        {"subtree": "loader.order"},
        {"keys": "loader.order"},
        {"keys": ["w", "*.order"]},
        {"keys": "loader.*", "exclude": "w"},
    ],
    ids=str,
)
def test_load_asks_whose_for_what_stands_below_a_slot(selection: dict[str, Any]) -> None:
    opened = save([state(0), state(1)])
    with pytest.raises(Mismatch, match=r"loader: kept by each of 2 ranks for itself; name one with rank=") as caught:
        load(opened, **selection)
    assert caught.value.kind == "rank_not_chosen"
    load(opened, rank=1, **selection)


def test_a_name_that_no_rank_kept_is_not_found() -> None:
    opened = save([state(0), state(1)])
    with pytest.raises(NotFound, match="loader"):
        load(opened, rank=1, subtree="loader.positio")
    with pytest.raises(NotFound, match="loade"):
        load(opened, subtree="loade.position")
    with pytest.raises(Mismatch, match="no tensor matches"):
        load(opened, keys="loader.positio*")


def test_a_state_that_is_each_rank_s_own_in_all() -> None:
    opened = save([PerRank({"n": rank}) for rank in range(2)])
    with pytest.raises(Mismatch, match=r"kept by each of 2 ranks"):
        load(opened, subtree="n")
    assert load(opened, subtree="n", rank=1) == 1


def test_exclude_leaves_out_what_stands_below_a_slot() -> None:
    opened = save([{"w": np.ones(1), "own": PerRank({"t": np.full(1, rank)})} for rank in range(2)])
    assert set(load(opened, exclude="own*")) == {"w"}
    with pytest.raises(Mismatch, match="own: kept"):
        load(opened, exclude="w")


# -- which rank this is -----------------------------------------------------------------------------------------
def test_the_environment_tells_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert rank_here() == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_here() == (2, 4)
    for rank, world_size in (("4", "4"), ("-1", "4"), ("two", "4"), ("0", "all")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world_size)
        with pytest.raises(InvalidInput, match=r"\$(RANK|WORLD_SIZE)="):
            rank_here()


def test_a_generation_restores_for_the_rank_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = front(save([state(rank) for rank in range(3)]))
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (2, 0):
        monkeypatch.setenv("RANK", str(rank))
        live = blank()
        generation.restore(live)
        assert held(live) == of(rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Mismatch, match="here is rank 0 of 2"):
        generation.restore(live)
    generation.restore(live, map=lambda rank: rank + 1)
    assert held(live) == of(1)


def test_a_tensor_that_each_rank_kept_has_no_one_value() -> None:
    generation = front(save([state(0), state(1)]))
    assert generation["w"].read().tolist() == [0, 1, 2, 3]
    own = generation["loader.order"]
    readings: list[Callable[[], Any]] = [own.read, lambda: own[0], lambda: np.asarray(own), lambda: list(own)]
    for read in readings:
        with pytest.raises(Mismatch, match=r"'loader.order' of generation 1 .* no one value: ranks 0, 1 kept it"):
            read()
    for rank in range(2):
        assert own.of_rank(rank).read().tolist() == own.of_rank(rank)[:].tolist() == [rank] * 3
        assert own.of_rank(rank).ranks == (rank,)
        assert generation["w"].of_rank(rank).read().tolist() == [0, 1, 2, 3]
    for absent in (2, -1, True):
        with pytest.raises(InvalidInput, match=r"'loader.order' was kept by ranks 0, 1, not by"):
            own.of_rank(absent)
    assert generation.load(rank=1, keys="loader*")["loader"]["order"].tolist() == [1] * 3


def test_a_mapping_of_all_tensors_those_of_each_rank_too() -> None:
    """Who goes through a generation sees all of it, and what is one value only where there is one."""
    states = [{"w": np.arange(4.0), "own": PerRank({"t": np.full(3, r), "u": np.ones(2 + r)})} for r in range(2)]
    generation = front(save(states))
    assert list(generation) == [name for name, _ in generation.items()] == [t.name for t in generation.values()]
    assert {name: tensor.ranks for name, tensor in generation.items()} == {"w": (), "own.t": (0, 1), "own.u": (0, 1)}
    assert sum(tensor.nbytes for tensor in generation.values()) == generation.nbytes
    assert (generation["own.t"].shape, generation["own.t"].dtype) == ((3,), "int64")
    assert generation["own.u"].dtype == "float64"
    with pytest.raises(Mismatch, match="no one shape"):
        generation["own.u"].shape  # noqa: B018
    assert repr(generation["own.u"]) == "<StoredTensor 'own.u' float64 [2] or float64 [3], kept by ranks 0, 1>"
    assert generation.get("own") is None
    copied = {
        name: [tensor.of_rank(rank).read() for rank in tensor.ranks] or tensor.read()
        for name, tensor in generation.items()
    }
    assert [found.tolist() for found in copied["own.u"]] == [[1, 1], [1, 1, 1]]
    assert copied["w"].tolist() == [0, 1, 2, 3]
