"""Snapshots of one rank among several: what others write is frozen and hashed, but stands in no pack."""

from __future__ import annotations

import array
import uuid
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
from stages_fixtures import FOLDER, UNIT, WINDOW, Writing, bytes_of, make_small
from test_engine_ports import ArrayFamilyOfTheStandardLibrary, LateCapture

from ckptfmt import connect
from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.families import Families
from ckptfmt.engine.plan import make_plan
from ckptfmt.engine.save import replicas
from ckptfmt.engine.save import snapshot as snapshots
from ckptfmt.engine.save.context import Ranks
from ckptfmt.engine.save.freeze import FrozenTree, Seen
from ckptfmt.engine.save.owners import roles_of
from ckptfmt.engine.save.parts import make_part
from ckptfmt.engine.save.persist import Written
from ckptfmt.engine.save.snapshot import Planner, Snapshot, plan_state, take_snapshot
from ckptfmt.errors import CkptError
from ckptfmt.format import checksum
from ckptfmt.format.part import Part, decode_part, encode_part
from ckptfmt.leaves import Sharded
from ckptfmt.ports.arrays import LeafSpec
from ckptfmt.rng import Rng


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        yield


def state() -> dict[str, Any]:
    """Tensors of different sizes, of which two ranks write some each; and a share that is one's own."""
    sizes = {"a": 5 * UNIT + 3, "b": 4 * UNIT, "c": 3 * UNIT + 1, "d": 100, "f": 2 * UNIT}
    numbers = np.random.default_rng(1)
    plain: dict[str, Any] = {name: numbers.integers(0, 256, size, np.uint8) for name, size in sizes.items()}
    columns = {"g": (30, UNIT // 4), "h": (UNIT // 2, 6), "i": (5, 3)}
    turned = {name: numbers.standard_normal(shape).astype(np.float32).T for name, shape in columns.items()}
    return plain | turned | {"own": Sharded(np.arange(8, dtype=np.uint8), (16,), (8,)), "empty": np.zeros((0, 3))}


def ranks(rank: int, check: Literal["full", "off"] = "full") -> Ranks:
    return Ranks(rank, 2, (0, 1), check)


def save(rank: int, check: Literal["full", "off"] = "full", **mode: Any) -> tuple[MemoryBackend, Snapshot, Written]:
    backend = MemoryBackend(f"claims-{uuid.uuid4().hex}")
    backend.make_folder(FOLDER)
    snapshot = take_snapshot(
        state(), None, families=Families(), planner=Planner(), arena=Arena(), ranks=ranks(rank, check), **mode
    )
    writing = Writing(backend, snapshot)
    snapshot.freeze()
    writing.join()
    assert writing.error is None, writing.error
    assert writing.written is not None
    return backend, snapshot, writing.written


def part_of(rank: int, snapshot: Snapshot, written: Written, check: Literal["full", "off"] = "full") -> Part:
    part = make_part(
        snapshot,
        written,
        key="a" * 32,
        step=1,
        launch_digest="b" * 32,
        save_number=0,
        ranks=ranks(rank, check),
        created_at="2026-01-01T00:00:00Z",
    )
    assert decode_part(encode_part(part)) == part
    return part


def hexes(raw: bytes) -> str:
    return "".join(checksum.hex_digest(raw[at : at + n]) for at, n in checksum.chunk_spans(len(raw), UNIT))


MODES: dict[str, dict[str, Any]] = {
    "held": {},
    "staged": {"host_bytes_max": WINDOW},
    "partial": {"sync": ["a", "c", "own"]},
    "partial and staged": {"sync": ["a"], "host_bytes_max": WINDOW},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("deferred", [False, True])
def test_each_rank_writes_its_own_and_hashes_the_rest(mode: str, deferred: bool) -> None:
    values = state()
    written_by: dict[str, list[int]] = {}
    for rank in (0, 1):
        backend, snapshot, written = save(rank, deferred=deferred, **MODES[mode])
        part = part_of(rank, snapshot, written)
        names = part.tensors.name
        assert names == list(values)
        for table in (part.boxes, part.claims):
            for row, size, digests in zip(table.tensor, table.size, table.digests, strict=True):
                value = values[names[row]]
                raw = bytes_of(value.local if isinstance(value, Sharded) else value)
                assert digests == hexes(raw), names[row]
                assert int(np.prod(size)) * np.dtype(part.tensors.dtype[row]).itemsize == len(raw)
        stored = {}
        for row, pack, offset in zip(part.boxes.tensor, part.boxes.pack, part.boxes.offset, strict=True):
            data = backend.read(f"{FOLDER}/{part.packs[pack].name}", limit=1 << 30)
            value = values[names[row]]
            raw = bytes_of(value.local if isinstance(value, Sharded) else value)
            assert data[offset : offset + len(raw)] == raw
            stored[names[row]] = len(raw)
            written_by.setdefault(names[row], []).append(rank)
        assert {names[row] for row in part.claims.tensor} == set(values) - set(stored)
        held = {leaf for pack in snapshot.plan.packs if pack.claims for leaf in pack.leaves}
        assert snapshot.plan.hashed | held == {i for i in snapshot.plan.roles.claims if names[i] != "empty"}
        assert bool(snapshot.plan.hashed) == (not deferred)
        assert snapshot.plan.tensor_bytes == sum(stored.values())
        assert sum(pack.nbytes - pack.header_bytes for pack in part.packs) == sum(stored.values())
        assert [f"r00000-p{i:03d}.safetensors" for i in range(len(part.packs))] == [p.name for p in part.packs]
    assert written_by.pop("own") == [0, 1]
    assert sorted(map(len, written_by.values())) == [1] * 9
    assert (part.tensors.kind[names.index("own")], part.tensors.kind[names.index("a")]) == ("sharded", "replicated")


def test_what_is_not_compared_is_not_even_copied() -> None:
    _, full, _ = save(1, deferred=True)
    _, off, written = save(1, "off", deferred=True)
    part = part_of(1, off, written, "off")
    assert part.claims.tensor
    assert set(part.claims.digests) == {""}
    assert part.replica_check == "off"
    claimed = sum(spec.nbytes for index, (_, spec) in enumerate(off.names_and_specs) if index in off.plan.roles.claims)
    assert full.plan.arena_bytes - off.plan.arena_bytes >= claimed
    assert off.plan.roles == full.plan.roles


def test_replicas_need_a_window_only_where_they_are_not_in_host_memory() -> None:
    def plan_of(values: dict[str, Any], check: Literal["full", "off"]) -> Any:
        return plan_state(values, families=Families(), planner=Planner(), ranks=ranks(1, check))

    dense = {name: np.ascontiguousarray(value) for name, value in state().items() if isinstance(value, np.ndarray)}
    assert plan_of(dense, "full").hashed
    small = sum(value.nbytes for value in dense.values() if value.nbytes < replicas.HASHED_BYTES_MIN)
    assert plan_of(dense, "full").arena_bytes - plan_of(dense, "off").arena_bytes <= small + 4096
    loose = dense | {"turned": np.zeros((40, UNIT)).T}
    plan = plan_of(loose, "full")
    assert plan.hash_window.stop - plan.hash_window.start == WINDOW
    assert plan.arena_bytes == plan.hash_window.stop


class Recorded:
    """A capture that may fail, and tells whether somebody has waited for its end."""

    def __init__(self, inner: LateCapture, fails: bool) -> None:
        self.waited = False
        self._inner, self._fails = inner, fails

    def wait(self) -> None:
        self._inner.wait()
        self.waited = True
        if self._fails:
            raise CkptError("the device is gone")

    def ready(self, index: int) -> bool:
        return self._inner.ready(index)

    def wait_for(self, index: int) -> None:
        self.wait()


@pytest.mark.parametrize("fault", ["capture", "wait"])
def test_no_copy_goes_on_after_an_error(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = ArrayFamilyOfTheStandardLibrary()
    plain = family.capture
    made: list[Recorded] = []

    def capture(pairs: Any) -> Recorded:
        if len(made) == 3 and fault == "capture":
            raise CkptError("the device is gone")
        made.append(Recorded(plain(pairs), len(made) == 3))
        return made[-1]

    monkeypatch.setattr(family, "capture", capture)
    values = {name: array.array("q", range(UNIT)) for name in "abcdef"}
    with pytest.raises(CkptError, match="the device is gone"):
        take_snapshot(values, None, families=Families([family]), planner=Planner(), arena=Arena(), ranks=ranks(1))
    assert len(made) >= 3
    assert all(each.waited for each in made)


def test_replicas_of_a_device_pass_through_both_halves() -> None:
    family = ArrayFamilyOfTheStandardLibrary()
    values = {name: array.array("q", range(number, number + UNIT)) for number, name in enumerate("abcdefgh")}
    snapshot = take_snapshot(
        values, None, families=Families([family]), planner=Planner(), arena=Arena(), ranks=ranks(1)
    )
    names = [name for name, _ in snapshot.names_and_specs]
    assert len(snapshot.digests) == 4
    for leaf, digests in snapshot.digests.items():
        assert b"".join(digests).hex() == hexes(values[names[leaf]].tobytes())


def test_a_plan_is_kept_for_the_same_ranks_only() -> None:
    planner, values = Planner(), state()

    def plan(who: Ranks) -> Any:
        return plan_state(values, families=Families(), planner=planner, ranks=who)

    first, other = ranks(0), ranks(1)
    one = plan(first)
    assert plan(first) is one
    assert plan(other).roles != one.roles
    assert plan(first) is one
    assert plan(ranks(0, "off")).arena_bytes < one.arena_bytes
    assert not plan(Ranks()).roles.claims


def test_boxes_of_one_tensor_lie_in_packs_of_their_own() -> None:
    leaves = [
        (f"t{number}", LeafSpec("uint8", (12,), (4 * box,), (3,), 3, "sharded"))
        for number in range(50)
        for box in range(3)
    ]
    plan = make_plan(leaves)
    assert [len(pack.leaves) for pack in plan.packs] == [50, 50, 50]
    for pack in plan.packs:
        assert len({leaves[leaf][0] for leaf in pack.leaves}) == 50


def test_generators_of_which_each_save_makes_new_arrays_keep_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(leaves: Any, who: Ranks) -> Any:
        asked.append(len(leaves))
        return roles_of(leaves, who)

    monkeypatch.setattr(snapshots, "roles_of", counted)
    planner, families, who = Planner(), connect.live_families(), ranks(1)
    values = state() | {"rng": Rng({"mine": np.random.default_rng(1), "other": np.random.RandomState(1)})}
    frozen = [planner.freeze(values, families)]
    plan = planner.plan(frozen[0], ranks=who)
    for _ in range(3):
        frozen.append(planner.freeze(values, families))
        assert frozen[-1].seen is not frozen[-2].seen
        assert planner.plan(frozen[-1], ranks=who) is plan
    assert asked == [len(frozen[0].leaves)]


def test_who_holds_a_box_is_part_of_the_plan() -> None:
    planner, who = Planner(), Ranks(2, 4, (0, 1, 2, 3))

    def plan(holders: tuple[int, ...]) -> Any:
        named = [("w", LeafSpec("uint8", (16,), (8,), (8,), 8, "sharded", holders=holders))]
        return planner.plan(FrozenTree(None, {}, [], Seen([], [0], named, {})), ranks=who)

    assert plan((0, 2)).roles.claims == {0}
    assert not plan((2, 3)).roles.claims
    assert plan((1, 2)).roles.claims == {0}


def test_whether_a_replica_lies_in_host_memory_is_part_of_the_plan() -> None:
    planner, who = Planner(), ranks(1)
    values = {"w": np.zeros((4, UNIT))}
    for value in (values["w"], np.asfortranarray(values["w"]), values["w"]):
        values["w"] = value
        plan = plan_state(values, families=Families(), planner=planner, ranks=who)
        assert plan.hashed == {0}
        assert bool(plan.hash_window.stop - plan.hash_window.start) != value.flags.c_contiguous
