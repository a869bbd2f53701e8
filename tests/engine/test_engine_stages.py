"""Staged and partial snapshots: the same bytes as a whole one, through little memory, and nobody left waiting."""

from __future__ import annotations

import array
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stages_fixtures import FOLDER, UNIT, WINDOW, Writing, bytes_of, make_small, save, snapshot_of, stored
from test_engine_ports import ArrayFamilyOfTheStandardLibrary

import ckptfmt
from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.families import Families
from ckptfmt.engine.save.snapshot import Planner, take_snapshot
from ckptfmt.errors import BackendError, CkptError, InvalidInput, Unavailable
from ckptfmt.testing.faults import Fault, FaultyBackend

torch = pytest.importorskip("torch")

_numbers = itertools.count()


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        yield


def families() -> Families:
    from ckptfmt.torch.family import TorchFamily

    return Families([TorchFamily()])


def place(*faults: Fault) -> FaultyBackend:
    backend = FaultyBackend(MemoryBackend(f"stages{next(_numbers)}"), *faults)
    backend.make_folder(FOLDER)
    return backend


def value(kind: int, n: int, rng: np.random.Generator) -> Any:
    """One leaf of about ``n`` elements."""
    numbers = rng.standard_normal(n)
    makers = [
        lambda: numbers,
        lambda: torch.from_numpy(numbers).to(torch.bfloat16),
        lambda: torch.from_numpy(numbers[: n // 40 * 40].reshape(-1, 40)).t(),
        lambda: numbers[: n // 30 * 30].reshape(2, -1, 15).transpose(2, 0, 1),
        lambda: bytes(rng.integers(0, 256, size=n + 70_000, dtype=np.uint8)),
        lambda: numbers.astype(">f4"),
        lambda: torch.view_as_complex(torch.from_numpy(numbers[: n // 2 * 2]).reshape(-1, 2)).conj(),
        lambda: ckptfmt.PerRank(numbers[::3]),
        lambda: ckptfmt.Sharded(numbers[: n // 4 * 4].reshape(-1, 4), (n // 4 + 9, 4), (5, 0)),
    ]
    return makers[kind]()


def inner(leaf: Any) -> Any:
    return (
        leaf.value if isinstance(leaf, ckptfmt.PerRank) else leaf.local if isinstance(leaf, ckptfmt.Sharded) else leaf
    )


def spoil(leaf: Any) -> None:
    """What a training step does to a leaf."""
    leaf = inner(leaf)
    if isinstance(leaf, torch.Tensor):
        leaf.zero_()
    elif isinstance(leaf, np.ndarray):
        leaf[...] = 0


LEAVES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 8), st.sampled_from([0, 1, 50, 4096, 60_000, 130_000])),
    min_size=1,
    max_size=9,
)


@settings(max_examples=25, deadline=None)
@given(LEAVES, st.sampled_from([None, "a.*", "*"]), st.sampled_from([None, WINDOW, WINDOW + 3 * UNIT + 17]))
def test_every_way_stores_the_same_bytes(
    leaves: list[tuple[str, int, int]], sync: str | None, host_bytes_max: int | None
) -> None:
    rng = np.random.default_rng(len(leaves))
    state = {f"{group}.{i}": value(kind, n, rng) for i, (group, kind, n) in enumerate(leaves)}
    state["b.tied"] = state[next(iter(state))]
    wanted = {name: bytes_of(inner(leaf)) for name, leaf in state.items()}
    backend, arena = place(), Arena()
    snapshot = snapshot_of(state, families(), sync=sync, host_bytes_max=host_bytes_max, arena=arena)
    writing = Writing(backend, snapshot)
    snapshot.freeze()
    for leaf in state.values():
        spoil(leaf)
    writing.join()
    assert writing.written is not None, writing.error
    found = stored(backend, snapshot, writing.written)
    for name, data in wanted.items():
        # A rank that holds no element of a tensor has no box of it.
        absent = b"" if isinstance(state[name], ckptfmt.Sharded) else None
        assert found.get(snapshot.aliases.get(name, name), absent) == data, name
    if host_bytes_max is not None:
        assert snapshot.plan.arena_bytes <= host_bytes_max
    if sync == "*":
        assert snapshot.plan.arena_bytes <= WINDOW


def big(units: int = 40) -> dict[str, Any]:
    rng = np.random.default_rng(units)
    return {"a": rng.integers(0, 1 << 60, units * UNIT // 16), "b": rng.integers(0, 1 << 60, units * UNIT // 16 + 77)}


def test_the_synchronous_part_is_written_when_freeze_returns_and_nothing_else_need_be() -> None:
    hold = threading.Event()
    later = Fault("open_writer", when=lambda call: "p001" in call.key, hold=hold)
    backend = place(later)
    state = big()
    snapshot = snapshot_of(state, families(), sync=["a"])
    writing = Writing(backend, snapshot)
    snapshot.freeze()
    first = [call for call in backend.calls if call.op == "write_at"]
    assert sum(call.nbytes or 0 for call in first) == snapshot.plan.packs[0].nbytes
    hold.set()
    writing.join()
    assert writing.written is not None
    assert stored(backend, snapshot, writing.written) == {name: bytes_of(v) for name, v in state.items()}


def test_a_staged_save_returns_when_the_last_byte_is_copied_with_a_window_still_to_be_written() -> None:
    state = big()
    hold = threading.Event()
    total = 40 * UNIT
    late = Fault("write_at", when=lambda call: (call.offset or 0) >= total - 3 * UNIT, hold=hold, times=None)
    backend = place(late)
    snapshot = snapshot_of(state, families(), host_bytes_max=WINDOW)
    writing = Writing(backend, snapshot)
    snapshot.freeze()
    wanted = {name: bytes_of(v) for name, v in state.items()}
    state["a"][:] = 0
    state["b"][:] = 0
    assert writing.written is None
    hold.set()
    writing.join()
    assert writing.written is not None
    assert stored(backend, snapshot, writing.written) == wanted


def test_a_staged_save_waits_for_room() -> None:
    hold = threading.Event()
    backend = place(Fault("write_at", nth=1, hold=hold))
    snapshot = snapshot_of(big(), families(), host_bytes_max=WINDOW)
    writing = Writing(backend, snapshot)
    frozen = threading.Thread(target=snapshot.freeze)
    frozen.start()
    frozen.join(0.3)
    assert frozen.is_alive()
    hold.set()
    frozen.join(20)
    writing.join()
    assert writing.error is None


@pytest.mark.parametrize("mode", [{"host_bytes_max": WINDOW}, {"sync": "a"}, {"sync": "a", "host_bytes_max": WINDOW}])
def test_a_write_that_fails_at_any_point_ends_both_sides(mode: dict[str, Any]) -> None:
    state = big(30)
    counting = place()
    save(counting, snapshot_of(state, families(), **mode))
    arena = Arena()
    for nth in range(1, counting.counts["write_at"] + 1):
        backend = place(Fault("write_at", nth=nth, error=lambda: BackendError("the disk is broken")))
        with pytest.raises(BackendError, match="the disk is broken"):
            save(backend, snapshot_of(state, families(), arena=arena, **mode))
        assert not backend.list(FOLDER)[1:], "only a finished pack may stay"
    # The arena is as good as before.
    backend = place()
    snapshot = snapshot_of(state, families(), arena=arena, **mode)
    assert stored(backend, snapshot, save(backend, snapshot)) == {name: bytes_of(v) for name, v in state.items()}


def test_freeze_says_why_the_save_failed_under_it() -> None:
    backend = place(Fault("write_at", nth=5, error=lambda: BackendError("the disk is broken")))
    snapshot = snapshot_of(big(), families(), host_bytes_max=WINDOW)
    writing = Writing(backend, snapshot)
    with pytest.raises(CkptError, match=r"not all of the state was copied and written: .*the disk is broken") as caught:
        snapshot.freeze()
    writing.join()
    assert caught.value.__cause__ is writing.error
    with pytest.raises(CkptError, match=r"not frozen.*the disk is broken"):  # whoever is to acknowledge it
        snapshot.stall()


def test_a_pack_whose_bytes_are_gone_is_not_written_again() -> None:
    backend = place(Fault("finish", error=lambda: Unavailable("the network is down")))
    with pytest.raises(
        BackendError, match=r"network is down; the pack cannot be written again.*host_bytes_max"
    ) as info:
        save(backend, snapshot_of(big(), families(), host_bytes_max=WINDOW))
    assert isinstance(info.value.__cause__, Unavailable)
    assert backend.counts["open_writer"] == 1


@pytest.mark.parametrize("mode", [{"host_bytes_max": WINDOW}, {"sync": "b"}])
def test_a_pack_that_is_still_held_is_written_again(mode: dict[str, Any]) -> None:
    """Of the synchronous part before its first unit has left; of what is held whole at any time."""
    state = big()
    last = len(snapshot_of(state, families(), **mode).plan.packs) - 1
    faults = [Fault("open_writer", nth=1, error=lambda: Unavailable("the network is down"))]
    if last:
        faults.append(Fault("finish", when=lambda call: "p001" in call.key, error=lambda: Unavailable("down again")))
    backend = place(*faults)
    snapshot = snapshot_of(state, families(), **mode)
    written = save(backend, snapshot)
    assert written.retries == 1 + last
    assert stored(backend, snapshot, written) == {name: bytes_of(v) for name, v in state.items()}


def test_a_writer_that_gives_up_lets_the_other_side_go() -> None:
    began = time.monotonic()

    def give_up() -> None:
        if time.monotonic() > began + 0.2:
            raise CkptError("too late")

    backend = place(Fault("write_at", delay=0.05, times=None))
    snapshot = snapshot_of(big(200), families(), host_bytes_max=WINDOW)
    writing = Writing(backend, snapshot, give_up)
    with pytest.raises(CkptError, match="too late"):
        snapshot.freeze()
    writing.join()
    assert isinstance(writing.error, CkptError)


def test_a_save_that_is_dropped_lets_go_both_sides_while_a_write_hangs() -> None:
    hold = threading.Event()
    backend = place(Fault("write_at", nth=3, hold=hold))
    snapshot = snapshot_of(big(), families(), host_bytes_max=WINDOW)
    writing = Writing(backend, snapshot)
    threading.Timer(0.2, lambda: snapshot.drop(CkptError("past its deadline"))).start()
    with pytest.raises(CkptError, match="past its deadline"):
        snapshot.freeze()
    hold.set()
    writing.join()
    assert writing.error is not None


class Broken(ArrayFamilyOfTheStandardLibrary):
    """A library whose copies fail from the nth on."""

    def __init__(self, fails_at: int, error: BaseException) -> None:
        super().__init__()
        self._left, self._error = fails_at, error

    def capture(self, pairs: Any) -> Any:
        self._left -= 1
        if self._left <= 0:
            raise self._error
        return super().capture(pairs)


@pytest.mark.parametrize("error", [CkptError("the device is gone"), KeyboardInterrupt()])
def test_a_copy_that_fails_ends_both_sides(error: BaseException) -> None:
    device = array.array("q", range(40 * UNIT // 8))
    backend = place()
    snapshot = snapshot_of({"a": device}, Families([Broken(9, error)]), host_bytes_max=WINDOW)
    writing = Writing(backend, snapshot)
    with pytest.raises(type(error)):
        snapshot.freeze()
    writing.join()
    assert isinstance(writing.error, CkptError)
    assert writing.error.__cause__ is error
    assert str(error) in str(writing.error)
    assert not backend.list(FOLDER)


@pytest.mark.parametrize("mode", [{"host_bytes_max": WINDOW}, {"sync": "a*"}, {"sync": "b", "host_bytes_max": WINDOW}])
def test_what_a_device_copies_late_passes_through_the_window_too(mode: dict[str, Any]) -> None:
    library = ArrayFamilyOfTheStandardLibrary()
    state: dict[str, Any] = {
        "a": array.array("q", range(20 * UNIT // 8)),
        "b": np.arange(5 * UNIT // 8),
        "a2": [array.array("q", range(n)) for n in (1, 3, 500, 9000)],
    }
    backend = place()
    snapshot = snapshot_of(state, Families([library]), **mode)
    library.go.clear()
    threading.Timer(0.2, library.go.set).start()
    writing = Writing(backend, snapshot)
    snapshot.freeze()
    assert snapshot.stall() > 0.15
    wanted = {"a": state["a"].tobytes(), "b": state["b"].tobytes()}
    wanted |= {f"a2.{i}": part.tobytes() for i, part in enumerate(state["a2"])}
    state["a"][:] = array.array("q", [0] * len(state["a"]))
    writing.join()
    assert writing.written is not None, writing.error
    assert stored(backend, snapshot, writing.written) == wanted


def test_pieces_that_need_a_copy_of_their_own_are_made_one_at_a_time() -> None:
    """Strided and converted leaves: what they take beside the window stays about a unit."""

    class Counting(ArrayFamilyOfTheStandardLibrary):
        alive = most = 0

        def piece(self, value: Any, start: int, stop: int) -> Any:
            piece = Piece(value[start // 8 : stop // 8])
            Counting.alive += 1
            Counting.most = max(Counting.most, Counting.alive)
            return piece

        def capture(self, pairs: Any) -> Any:
            for value, host in pairs:
                host[:] = value.tobytes()
            return super().capture([])

    class Piece(array.array):  # type: ignore[type-arg]
        def __new__(cls, numbers: Any) -> Piece:
            return super().__new__(cls, "q", numbers)

        def __del__(self) -> None:
            Counting.alive -= 1

    state = {"a": array.array("q", range(40 * UNIT // 8))}
    backend = place()
    snapshot = snapshot_of(state, Families([Counting()]), host_bytes_max=WINDOW)
    assert stored(backend, snapshot, save(backend, snapshot)) == {"a": state["a"].tobytes()}
    assert Counting.most <= 2


def test_patterns_reach_tied_tensors_by_any_of_their_names(caplog: pytest.LogCaptureFixture) -> None:
    tied = torch.arange(10)
    state = {"x": {"head": tied}, "y": {"embed": tied, "other": torch.arange(5)}}
    by_alias = snapshot_of(state, families(), sync="y.embed")
    assert [by_alias.names_and_specs[leaf][0] for leaf in by_alias.plan.packs[0].leaves] == ["x.head"]
    assert not caplog.records
    nothing = snapshot_of(state, families(), sync=["z.*"])
    assert len(nothing.plan.packs) == 1
    assert "sync=('z.*',) matches no tensor of this state" in caplog.text


@pytest.mark.parametrize("wrong", [[], "", ["a", ""], [1]])
def test_patterns_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="sync="):
        snapshot_of({"a": np.arange(3)}, families(), sync=wrong)


def test_one_planner_keeps_a_plan_for_each_way_of_saving() -> None:
    planner, arena, state = Planner(), Arena(), big()

    def plan(state: Any = state, **mode: Any) -> Any:
        return take_snapshot(state, None, families=families(), planner=planner, arena=arena, **mode).plan

    whole, partial, staged = plan(), plan(sync="a"), plan(host_bytes_max=WINDOW)
    assert len({id(made) for made in (whole, partial, staged)}) == 3
    assert plan() is whole
    assert plan(sync="a*") is partial
    assert plan({"a": state["a"]}) is not whole
    assert plan() is not whole  # the structure changed in between
