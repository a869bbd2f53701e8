"""Sixty-four ranks in one process, in a group that never answers: what they list is whole, and shared out evenly."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from fake_group import fake_groups
from reshard_rig import FOLDER, load, merged, opened_of, write_rank

from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.format.part import Part

torch = pytest.importorskip("torch")
dist = torch.distributed

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

MESH = (2, 8, 4)
"""Two copies of eight shares, each cut in four."""
WORLD = 64


@pytest.fixture
def become() -> Iterator[Any]:
    """``become(rank)`` makes this process one of them."""
    with fake_groups() as become:
        yield lambda rank: become(rank, WORLD)


def placed() -> dict[str, tuple[tuple[int, ...], list[Any]]]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    copies = Replicate()
    return {
        "fsdp x tp": ((67, 5), [copies, _StridedShard(0, split_factor=4), Shard(0)]),
        "rows and columns": ((19, 10), [copies, Shard(0), Shard(1)]),
        "rows": ((50, 3), [copies, Shard(0), copies]),
        "few rows": ((3, 4), [copies, Shard(0), copies]),
        "strided": ((70,), [copies, _StridedShard(0, split_factor=3), copies]),
        "everywhere": ((6, 6), [copies, copies, copies]),
    }


def state_of(wholes: dict[str, Any]) -> dict[str, Any]:
    """As this rank has it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("copy", "share", "cut"))
    state: dict[str, Any] = {f"plain {number}": torch.full((number + 1,), float(number)) for number in range(80)}
    for name, (shape, placements) in placed().items():
        local = wholes[name]
        for size, at, placement in zip(MESH, mesh.get_coordinate(), placements, strict=True):
            if not placement.is_replicate():
                local = placement._split_tensor(local, size, with_padding=False)[0][at]
        stride = wholes[name].stride()
        state[name] = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return state


def test_a_state_of_sixty_four_ranks(become: Any) -> None:
    made = torch.Generator().manual_seed(1)
    wholes = {name: torch.randn(shape, generator=made) for name, (shape, _) in placed().items()}
    backend = MemoryBackend(f"many-{uuid.uuid4().hex}")
    parts: list[Part] = []
    for rank in range(WORLD):
        become(rank)
        parts.append(write_rank(backend, state_of(wholes), rank, WORLD))
    opened = opened_of(backend, merged(parts))
    state = load(opened)
    assert all(torch.equal(state[name], value) for name, value in wholes.items())
    assert all(state[f"plain {number}"].eq(number).all() for number in range(80))
    coordinates = itertools.product(*map(range, MESH))
    assert [row.mesh for row in opened.manifest.ranks] == [
        dict(zip(("copy", "share", "cut"), at, strict=True)) for at in coordinates
    ]

    written = Counter({pack.name: pack.nbytes - pack.header_bytes for part in parts for pack in part.packs})
    assert sum(written.values()) == opened.manifest.nbytes
    assert {key.key.removeprefix(f"{FOLDER}/") for key in backend.list(FOLDER)} >= set(written)
    for name in ("rows", "rows and columns", "strided"):  # of two or eight holders of a box one writes it
        writers = [rank for rank, part in enumerate(parts) if has_box(part, name)]
        row = opened.manifest.tensors.name.index(name)
        assert len(writers) <= opened.manifest.boxes.tensor.count(row)
    plain = [sum(has_box(part, f"plain {number}") for number in range(80)) for part in parts]
    assert sum(plain) == 80
    assert max(plain) <= 4


def has_box(part: Part, name: str) -> bool:
    return part.tensors.name.index(name) in part.boxes.tensor
