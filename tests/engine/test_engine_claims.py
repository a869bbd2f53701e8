"""Snapshots of one rank among several: what others write is frozen and hashed, but stands in no pack."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
from stages_fixtures import FOLDER, UNIT, WINDOW, Writing, bytes_of, make_small

from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.families import Families
from ckptfmt.engine.plan import make_plan
from ckptfmt.engine.save.context import Ranks
from ckptfmt.engine.save.parts import make_part
from ckptfmt.engine.save.persist import Written
from ckptfmt.engine.save.snapshot import Planner, Snapshot, plan_state, take_snapshot
from ckptfmt.format import checksum
from ckptfmt.format.part import Part, decode_part, encode_part
from ckptfmt.leaves import Sharded
from ckptfmt.ports.arrays import LeafSpec


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        yield


def state() -> dict[str, Any]:
    """Four tensors of different sizes, of which two ranks write two each; and a share that is one's own."""
    sizes = {"a": 5 * UNIT + 3, "b": 4 * UNIT, "c": 3 * UNIT + 1, "d": 100}
    numbers = np.random.default_rng(1)
    plain: dict[str, Any] = {name: numbers.integers(0, 256, size, np.uint8) for name, size in sizes.items()}
    return plain | {"own": Sharded(np.arange(8, dtype=np.uint8), (16,), (8,)), "empty": np.zeros((0, 3))}


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
def test_each_rank_writes_its_own_and_hashes_the_rest(mode: str) -> None:
    values = state()
    written_by: dict[str, list[int]] = {}
    for rank in (0, 1):
        backend, snapshot, written = save(rank, **MODES[mode])
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
        assert snapshot.plan.tensor_bytes == sum(stored.values())
        assert sum(pack.nbytes - pack.header_bytes for pack in part.packs) == sum(stored.values())
        assert [f"r00000-p{i:03d}.safetensors" for i in range(len(part.packs))] == [p.name for p in part.packs]
    assert written_by.pop("own") == [0, 1]
    assert sorted(map(len, written_by.values())) == [1] * 5
    assert (part.tensors.kind[names.index("own")], part.tensors.kind[names.index("a")]) == ("sharded", "replicated")


def test_what_is_not_compared_is_not_even_copied() -> None:
    _, full, _ = save(1)
    _, off, written = save(1, "off")
    part = part_of(1, off, written, "off")
    assert part.claims.tensor
    assert set(part.claims.digests) == {""}
    assert part.replica_check == "off"
    claimed = sum(spec.nbytes for index, (_, spec) in enumerate(off.names_and_specs) if index in off.plan.roles.claims)
    assert full.plan.arena_bytes - off.plan.arena_bytes >= claimed
    assert off.plan.roles == full.plan.roles


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
