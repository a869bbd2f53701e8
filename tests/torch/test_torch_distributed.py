"""DTensors as boxes: compared with how torch's own placements cut, over whole meshes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_group import fake_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckptfmt.errors import UnsupportedValue
from ckptfmt.format.boxes import check_tiling
from ckptfmt.torch import distributed

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


class Mesh:
    """What a layout asks of a DeviceMesh; ranks are numbered backwards, so that nobody takes them for granted."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.shape = sizes
        self.mesh = torch.arange(torch.Size(sizes).numel()).flip(0).reshape(sizes)

    def ranks(self) -> dict[tuple[int, ...], int]:
        return {at: int(self.mesh[at]) for at in itertools.product(*map(range, self.shape))}


def strided(dim: int, split_factor: int) -> Any:
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    from torch.distributed.tensor import Replicate, Shard

    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements: list[Any] = []
    for _ in sizes:
        dim = draw(st.integers(0, len(shape) - 1))
        kinds = [Replicate(), Shard(dim), strided(dim, draw(st.integers(2, 4)))]
        placements.append(draw(st.sampled_from(kinds)))
    return shape, sizes, tuple(placements)


def local_of(whole: torch.Tensor, sizes: tuple[int, ...], placements: tuple[Any, ...], at: tuple[int, ...]) -> Any:
    """What torch leaves of ``whole`` on the rank at these coordinates."""
    for size, index, placement in zip(sizes, at, placements, strict=True):
        if not placement.is_replicate():
            pieces, _ = placement._split_tensor(whole, size, with_padding=False, contiguous=False)
            whole = pieces[index]
    return whole


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(cases())
def test_boxes_are_what_torch_leaves_on_each_rank(case: Any) -> None:
    shape, sizes, placements = case
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    mesh = Mesh(sizes)
    boxes_at: dict[int, Any] = {}
    holders_at: dict[int, tuple[int, ...]] = {}
    for at, rank in mesh.ranks().items():
        layout = distributed._layout(shape, mesh, at, placements)
        local = local_of(whole, sizes, placements, at)
        if 0 in shape:
            assert layout.boxes == (((0,) * len(shape), shape, (0,) * len(shape)),)
        else:
            assert layout.size == tuple(local.shape)
            assert sum(torch.Size(size).numel() for _, size, _ in layout.boxes) == local.numel()
            for start, size, place in layout.boxes:
                there = whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
                here = local[tuple(slice(a, a + n) for a, n in zip(place, size, strict=True))]
                assert torch.equal(there, here)
        boxes_at[rank] = tuple(box[:2] for box in layout.boxes)
        holders_at[rank] = layout.holders
    everything = [box for boxes in boxes_at.values() for box in boxes if 0 in shape or all(box[1])]
    assert check_tiling(shape, everything).reason is None
    for rank, holders in holders_at.items():
        assert rank in holders
        assert holders == tuple(sorted(holders))
        assert {boxes_at[other] for other in holders} == {boxes_at[rank]}
        if all(all(size) for _, size in boxes_at[rank]):
            assert {other for other, boxes in boxes_at.items() if boxes == boxes_at[rank]} == set(holders)
    kinds = {distributed._layout(shape, mesh, at, placements).kind for at in mesh.ranks()}
    cut = any(size > 1 and not placement.is_replicate() for size, placement in zip(sizes, placements, strict=True))
    assert kinds == {"sharded" if cut else "replicated"}


@pytest.fixture
def ranks() -> Iterator[Any]:
    """``ranks(rank, world_size)`` makes this process one of a group that never answers."""
    with fake_groups() as become:
        yield become


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def dtensor(local: torch.Tensor, mesh: Any, placements: list[Any], shape: tuple[int, ...]) -> Any:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def test_a_box_is_the_memory_of_the_local_tensor(ranks: Any, family: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard

    ranks(6, 8)
    mesh = mesh_of((2, 4), ("dp", "tp"))
    local = torch.randn(2, 3)
    value = dtensor(local, mesh, [Replicate(), Shard(0)], (7, 3))
    ((part, spec),) = family.boxes(value, "w")
    assert part.data_ptr() == local.data_ptr() == spec.address
    assert (spec.dtype, spec.global_shape, spec.start, spec.size) == ("float32", (7, 3), (4, 0), (2, 3))
    assert (spec.kind, spec.holders, spec.nbytes, spec.flags) == ("sharded", (2, 6), 24, ())
    assert family.coordinates(value) == {"dp": 1, "tp": 2}
    assert family.boxes(torch.zeros(2), "w") is None
    assert family.boxes(nn.Parameter(torch.zeros(2)), "w") is None


def test_several_boxes_are_views(ranks: Any, family: Any) -> None:
    from torch.distributed.tensor import Replicate

    ranks(1, 4)
    mesh = mesh_of((2, 2))
    value = dtensor(torch.arange(12.0).reshape(4, 3), mesh, [strided(0, 2), Replicate()], (8, 3))
    boxes = family.boxes(value, "w")
    assert [(spec.start, spec.size, spec.holders) for _, spec in boxes] == [
        ((0, 0), (2, 3), (0, 1)),
        ((4, 0), (2, 3), (0, 1)),
    ]
    assert [part.flatten().tolist() for part, _ in boxes] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    boxes[1][0].zero_()
    assert value.to_local()[2:].eq(0).all()
    assert family.coordinates(value) == {"0": 0, "1": 1}


def test_a_collective_under_way_is_waited_for() -> None:
    class Late:
        def wait(self) -> torch.Tensor:
            return torch.ones(2)

    assert torch.equal(distributed.local_tensor(SimpleNamespace(_local_tensor=Late())), torch.ones(2))


def test_flags_are_those_of_the_whole(ranks: Any, family: Any) -> None:
    from torch.distributed.tensor import Shard

    ranks(0, 2)
    value = dtensor(
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), mesh_of((2,)), [Shard(0)], (4, 3, 4, 4)
    )
    assert family.boxes(value, "w")[0][1].flags == ()
    parameter = nn.Parameter(value)
    assert family.boxes(parameter, "w")[0][1].flags == ("parameter", "requires_grad")
    assert family.boxes(nn.Parameter(value, requires_grad=False), "w")[0][1].flags == ("parameter",)


def test_ties_are_told_by_memory_and_place(ranks: Any, family: Any) -> None:
    from torch.distributed.tensor import Shard

    ranks(1, 2)
    mesh = mesh_of((2,))
    local = torch.randn(2, 2)
    one, same, other = (
        dtensor(local, mesh, [Shard(0)], (4, 2)),
        dtensor(local, mesh, [Shard(0)], (4, 2)),
        dtensor(local, mesh, [Shard(1)], (2, 4)),
    )
    aliases = [family.boxes(value, "w")[0][1].alias for value in (one, same, other)]
    assert aliases[0] == aliases[1] != aliases[2]


def test_who_holds_nothing_has_one_box_of_no_elements(ranks: Any, family: Any) -> None:
    from torch.distributed.tensor import DeviceMesh, Replicate, Shard

    ranks(3, 4)
    mesh = mesh_of((4,))
    ((part, spec),) = family.boxes(dtensor(torch.empty(0, 3), mesh, [Shard(0)], (3, 3)), "w")
    assert (spec.start, spec.size, spec.nbytes, spec.alias, spec.address) == ((0, 0), (0, 3), 0, None, None)
    assert part.shape == (0, 3)
    ((_, spec),) = family.boxes(dtensor(torch.empty(0, 4), mesh, [Shard(0)], (0, 4)), "w")
    assert (spec.start, spec.size, spec.holders) == ((0, 0), (0, 4), (0, 1, 2, 3))
    ranks(3, 4)
    elsewhere = DeviceMesh("cpu", [0, 1])
    value = dtensor(torch.empty(0), elsewhere, [Replicate()], (5,))
    ((part, spec),) = family.boxes(value, "w")
    assert (spec.size, spec.nbytes, spec.holders, part.numel()) == ((0,), 0, (0, 1), 0)
    assert family.coordinates(value) == {}
    for placement in (Replicate(), Shard(0), Shard(1)):  # of no elements at all: this rank holds all of it, too
        value = dtensor(torch.empty(0), elsewhere, [placement], (0, 4))
        ((part, spec),) = family.boxes(value, "w")
        assert (spec.start, spec.size, spec.holders, part.shape) == ((0, 0), (0, 4), (0, 1), (0, 4))


def test_the_coordinates_in_one_mesh_are_one_object(ranks: Any, family: Any) -> None:
    from torch.distributed.tensor import Shard

    ranks(2, 4)
    mesh = mesh_of((2, 2), ("dp", "tp"))
    values = [dtensor(torch.empty(2, 2), mesh, [Shard(0), Shard(1)], (4, 4)) for _ in range(2)]
    assert family.coordinates(values[0]) is family.coordinates(values[1])
    ranks(1, 4)  # the mesh of another rank is equal to that one
    moved = dtensor(torch.empty(2, 2), mesh_of((2, 2), ("dp", "tp")), [Shard(0), Shard(1)], (4, 4))
    assert [dict(family.coordinates(value)) for value in (values[0], moved)] == [{"dp": 1, "tp": 0}, {"dp": 0, "tp": 1}]


def test_what_cannot_be_saved_is_refused_by_name(ranks: Any, family: Any) -> None:
    from torch.distributed.tensor import Partial, Shard

    ranks(0, 2)
    mesh = mesh_of((2,))
    with pytest.raises(UnsupportedValue, match=r"model\.w: .*Partial.*redistribute"):
        family.boxes(dtensor(torch.zeros(2), mesh, [Partial()], (2,)), "model.w")
    with pytest.raises(UnsupportedValue, match=r"model\.w: .*local tensor has the shape \[1\].*give \[2\]"):
        family.boxes(dtensor(torch.zeros(1), mesh, [Shard(0)], (4,)), "model.w")
    many = distributed.BOXES_MAX + 1
    with pytest.raises(UnsupportedValue, match=rf"model\.w: .*{many} boxes"):
        family.boxes(dtensor(torch.zeros(many), mesh, [strided(0, many)], (2 * many,)), "model.w")
    with pytest.raises(UnsupportedValue, match=r"model\.w: .*meta"):
        family.boxes(dtensor(torch.empty(2, device="meta"), mesh, [Shard(0)], (4,)), "model.w")


@pytest.mark.parametrize("rank", [0, 13, 63])
def test_sixty_four_ranks(ranks: Any, rank: int) -> None:
    """As FSDP2 over tensor parallelism places it, at uneven sizes."""
    from torch.distributed.tensor import Shard, distribute_tensor

    ranks(rank, 64)
    mesh = mesh_of((8, 8), ("dp", "tp"))
    for shape in ((1000, 24), (64, 64), (7, 5), (128,)):
        for placements in ([Shard(0), Shard(len(shape) - 1)], [Shard(0), Shard(0)]):
            value = distribute_tensor(torch.empty(shape, device="meta"), mesh, placements, src_data_rank=None)
            layout = distributed._layout(shape, mesh, tuple(mesh.get_coordinate()), tuple(placements))
            assert layout.size == tuple(value.to_local().shape), (shape, placements)
            assert len(layout.boxes) == 1
            assert layout.holders == (rank,)
