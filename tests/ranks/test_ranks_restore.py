"""All ranks restore one generation, or none of them changes anything."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from meeting_rig import WORLD, Job, Rank, rows_of, state_of, wait_until, whole_of

import ckptfmt
from ckptfmt import joint_restore
from ckptfmt.errors import CatalogError, CkptError, Corrupt, Unavailable
from ckptfmt.testing.faults import Call, Fault

Start = Callable[..., Job]
pytestmark = pytest.mark.usefixtures("nobody_stays")


@pytest.fixture(params=["catalog", pytest.param("c10d", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest) -> str:
    """Where the ranks meet: in the store, too, in the slow suite."""
    return str(request.param)


@pytest.fixture
def root(tmp_path: Path, three_generations: Path, quick: None) -> Path:
    shutil.copytree(three_generations, tmp_path / "r")
    ckptfmt.open(tmp_path / "r").close()
    return tmp_path / "r"


@pytest.fixture
def saved(root: Path) -> list[int]:
    """Ids of the generations of steps 1, 2 and 3."""
    return [row["id"] for row in rows_of(root)]


def in_pack(call: Call) -> bool:
    return call.key.endswith(".safetensors")


def live_of(rank: Rank) -> dict[str, Any]:
    return rank.state(77)


def facts_of(live: dict[str, Any]) -> dict[str, Any]:
    digests = {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in arrays_of(live).items()}
    return {**digests, "own": live["own"].value, "step": live["step"]}


def arrays_of(live: dict[str, Any]) -> dict[str, Any]:
    return {"w": live["w"].local, "b": live["b"]}


def expected(seed: int, rank: int) -> dict[str, Any]:
    return facts_of(state_of(seed, rank, WORLD))


def told(error: BaseException) -> dict[str, Any]:
    return {"error": type(error).__name__, "text": str(error), "notes": " ".join(getattr(error, "__notes__", []))}


def test_all_ranks_restore_the_id_that_was_chosen_once(start: Start, root: Path, saved: list[int]) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            if rank.rank:
                time.sleep(0.1 * rank.rank)
            live = live_of(rank)
            report = checkpointer.restore(live)
            assert report is not None
            assert checkpointer.last_committed is not None
            counts = rank.catalog.counts
            return (
                report.generation_id,
                checkpointer.last_committed.id,
                facts_of(live),
                counts["set_restored_from"],
                {name: counts[name] for name in ("open_reader", "latest", "generations", "view") if counts[name]},
            )

    for rank, (id, last, facts, noted, asked) in enumerate(start().run(body)):
        assert id == last == saved[-1]
        assert facts == expected(3, rank)
        assert noted == (1 if rank == 0 else 0)
        assert rank == 0 or asked == {}
    with ckptfmt.open(root) as repository:
        launch, *_ = repository._connection.site.sql().launches("run")
        assert launch.restored_from == rows_of(root)[-1]["key"]


@pytest.mark.parametrize("at", [2, "step:2"])
def test_a_named_generation(start: Start, saved: list[int], at: int | str) -> None:
    wanted = saved[1] if at == 2 else at

    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            live = live_of(rank)
            report = checkpointer.restore(live, at=wanted)
            assert report is not None
            return report.generation_id, facts_of(live)

    assert start().run(body) == [[saved[1], expected(2, rank)] for rank in range(WORLD)]


@pytest.mark.parametrize("victim", [0, 2])
def test_what_one_rank_cannot_read_no_rank_restores(start: Start, saved: list[int], victim: int) -> None:
    def body(rank: Rank) -> Any:
        broken = Fault("read_into", error=lambda: Corrupt("flipped bits", object="a pack"), times=None, when=in_pack)
        with rank.checkpointer(*([broken] if rank.rank == victim else [])) as checkpointer:
            live = live_of(rank)
            with pytest.raises(Corrupt) as caught:
                checkpointer.restore(live)
            assert facts_of(live) == expected(77, rank.rank)
            assert checkpointer.last_committed is None
            return told(caught.value)

    for rank, said in enumerate(start().run(body)):
        assert "flipped bits" in said["text"]
        assert f"rank {victim}" in said["text"] + said["notes"]
        assert "nothing was changed on any rank" in said["text"] + said["notes"], rank


def test_falling_back_is_a_joint_decision(start: Start, root: Path, saved: list[int]) -> None:
    """Rank 1 cannot read the newest, rank 3 not the one before: all go back to the third, together."""

    def body(rank: Rank) -> Any:
        keys = [row["key"] for row in rows_of(root)]
        lost = {1: keys[2], 3: keys[1]}.get(rank.rank)
        broken = Fault(
            "read_into",
            error=lambda: Corrupt("flipped bits", object="a pack"),
            times=None,
            when=lambda call: lost is not None and lost in call.key and in_pack(call),
        )
        with rank.checkpointer(broken) as checkpointer:
            live = live_of(rank)
            report = checkpointer.restore(live, fallback=True)
            assert report is not None
            return report.generation_id, list(report.fell_back_from), facts_of(live)

    results = start().run(body)
    assert results == [[saved[0], [saved[2], saved[1]], expected(1, rank)] for rank in range(WORLD)]
    with ckptfmt.open(root) as repository:
        events = repository._connection.site.sql().events(run="run")
    assert [event.detail["unreadable"] for event in events if event.kind == "restore_fell_back"] == [
        [saved[2], saved[1]]
    ]


def test_no_fallback_where_storage_is_only_away(start: Start, saved: list[int]) -> None:
    def body(rank: Rank) -> Any:
        away = Fault("read_into", error=lambda: Unavailable("no answer"), times=None, when=in_pack)
        with rank.checkpointer(*([away] if rank.rank == 1 else [])) as checkpointer:
            live = live_of(rank)
            with pytest.raises(Unavailable, match="no answer"):
                checkpointer.restore(live, fallback=True)
            return facts_of(live)

    assert start().run(body) == [expected(77, rank) for rank in range(WORLD)]


def test_when_no_generation_can_be_read_all_say_so(start: Start, saved: list[int]) -> None:
    def body(rank: Rank) -> Any:
        broken = Fault("read_into", error=lambda: Corrupt("flipped", object="a pack"), times=None, when=in_pack)
        with rank.checkpointer(*([broken] if rank.rank == 1 else [])) as checkpointer:
            live = live_of(rank)
            with pytest.raises(Corrupt):
                checkpointer.restore(live, fallback=True)
            return facts_of(live)

    assert start().run(body) == [expected(77, rank) for rank in range(WORLD)]


def test_a_state_that_does_not_fit_on_one_rank_is_told_to_all(start: Start, saved: list[int]) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            live = live_of(rank)
            if rank.rank == 2:
                live["other"] = 5
            with pytest.raises(ckptfmt.Mismatch) as caught:
                checkpointer.restore(live)
            assert facts_of(live) == expected(77, rank.rank)
            return told(caught.value)

    for rank, said in enumerate(start().run(body)):
        assert "other" in said["text"]
        assert rank == 2 or "rank 2" in said["text"]


def test_ranks_that_ask_for_different_generations(start: Start, saved: list[int]) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            live = live_of(rank)
            with pytest.raises(ckptfmt.InvalidInput, match="give all ranks the same"):
                checkpointer.restore(live, at="step:1" if rank.rank == 1 else "step:2")
            return facts_of(live)

    assert start().run(body) == [expected(77, rank) for rank in range(WORLD)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_dies_while_it_reads(
    start: Start, saved: list[int], monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    monkeypatch.setattr(joint_restore, "WAIT_SECONDS", 2.0)

    def body(rank: Rank) -> Any:
        dies = Fault("read_into", error=rank.die, when=in_pack)
        with rank.checkpointer(*([dies] if rank.rank == victim else [])) as checkpointer:
            live = live_of(rank)
            began = time.monotonic()
            with pytest.raises(CkptError, match=f"rank {victim}"):
                checkpointer.restore(live)
            assert facts_of(live) == expected(77, rank.rank)
            return time.monotonic() - began

    results = start().run_some(body)
    assert results[victim] is None
    assert all(seconds < 12 for rank, seconds in enumerate(results) if rank != victim)


@pytest.mark.slow
def test_a_rank_that_never_restores_is_named(start: Start, saved: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_restore, "WAIT_SECONDS", 1.5)

    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            if rank.rank == 2:
                time.sleep(4)
                return None
            live = live_of(rank)
            with pytest.raises(CkptError, match="rank 2") as caught:
                checkpointer.restore(live)
            assert facts_of(live) == expected(77, rank.rank)
            return str(caught.value)

    results = start().run(body)
    assert all("has not read its share" in text for rank, text in enumerate(results) if rank != 2)


def test_the_bytes_are_right_on_every_rank(start: Start, saved: list[int]) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            live = live_of(rank)
            checkpointer.restore(live)
            share = live["w"].local.shape[0]
            mine = whole_of(3)["w"][rank.rank * share : (rank.rank + 1) * share]
            assert live["w"].local.tobytes() == mine.tobytes()
            assert live["b"].tobytes() == whole_of(3)["b"].tobytes()
            return os.getpid()

    assert len(set(start().run(body))) == WORLD


def test_a_board_that_is_lost_while_all_read_leaves_the_error_that_counts(root: Path) -> None:
    """The store dies with rank 0: the others say so, and have changed nothing."""
    job = Job(root, "c10d")

    def body(rank: Rank) -> Any:
        dies = Fault("read_into", error=rank.die, when=in_pack)
        with rank.checkpointer(*([dies] if rank.rank == 0 else [])) as checkpointer:
            (root / f"begun-{rank.rank}").touch()
            wait_until(lambda: len(list(root.glob("begun-*"))) == WORLD)
            live = live_of(rank)
            with pytest.raises(CatalogError, match="store is gone"):
                checkpointer.restore(live)
            return facts_of(live)

    assert job.run_some(body)[1:] == [expected(77, rank) for rank in range(1, WORLD)]
