"""DTensors: which boxes of the global tensor lie here, and which ranks hold the same ones.

How a placement cuts is told by torch/distributed/tensor/placement_types.py (read: torch 2.13): ``Shard`` cuts as
``torch.chunk`` does; ``_StridedShard`` cuts into ``split_factor`` pieces first and takes its share of each. Placements
are applied in the order of the mesh's dimensions, each to what the ones before have left. So the indices held along one
dimension are ascending runs, and a local tensor is the product of its dimensions' runs: one box, or several.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any, Final

import torch

from ckptfmt.errors import UnsupportedValue
from ckptfmt.ports.arrays import LeafKind, LeafSpec
from ckptfmt.torch.elements import EXACT_TYPES, flags_of

Extent = tuple[int, ...]
Run = tuple[int, int]
"""(first, count): indices along one dimension of the global tensor."""

BOXES_MAX: Final = 256
"""Most boxes of one tensor on one rank: each lies in a pack of its own."""

_NOWHERE: Final[Mapping[str, int]] = MappingProxyType({})

_Box = tuple[Extent, Extent, Extent]
"""Where it starts in the global tensor, how large it is, and where it starts in the local tensor."""


@dataclass(frozen=True)
class _Layout:
    """What one rank holds of a tensor. Made once for all tensors of one shape that are placed alike."""

    kind: LeafKind
    size: Extent
    """Of the local tensor."""
    boxes: tuple[_Box, ...]
    holders: tuple[int, ...]
    outside: bool = False
    """Whether this rank is not in the mesh."""


class _Refused(Exception):
    """Why a placement cannot be saved."""


def is_distributed(value: Any) -> bool:
    """Whether ``value`` is a DTensor. Does not import the library that makes them."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_tensor(value: Any) -> torch.Tensor:
    """Return what this rank holds of a DTensor: its own memory, without autograd's view of it."""
    local: Any = value._local_tensor
    if type(local) not in EXACT_TYPES and hasattr(local, "wait"):
        local = local.wait()  # the result of a collective that is still under way
    return local  # type: ignore[no-any-return]


def boxes_of(
    value: Any, path: str, describe: Callable[[torch.Tensor, str], LeafSpec]
) -> list[tuple[torch.Tensor, LeafSpec]]:
    """Return the boxes of a DTensor. See ``ArrayFamily.boxes``; ``describe`` tells what a local tensor is."""
    mesh, shape = value.device_mesh, tuple(value.shape)
    coordinate = mesh.get_coordinate()
    try:
        layout = _layout(shape, mesh, None if coordinate is None else tuple(coordinate), tuple(value.placements))
    except _Refused as reason:
        raise UnsupportedValue(f"{path}: {reason}") from None
    local = local_tensor(value)
    whole = describe(local, path)
    if layout.outside or 0 in shape:
        local = local.detach().new_empty(layout.size)
    elif local.shape != layout.size:
        raise UnsupportedValue(
            f"{path}: a DTensor of shape {list(shape)} whose local tensor has the shape {list(local.shape)}, where its "
            f"placements {list(value.placements)} on a mesh of {list(mesh.shape)} give {list(layout.size)}; "
            "redistribute it, or save its to_local() in ckptfmt.Sharded"
        )
    flags = flags_of(value, bool(getattr(value, "_is_param", False)))
    found = []
    for number, box in enumerate(layout.boxes):
        part = local if len(layout.boxes) == 1 else _part(local, box)
        its = whole if part is local else describe(part, path)
        nbytes, alias, address = 0, None, None
        if part.numel():
            nbytes, address = its.nbytes, its.address
            # All boxes of two tensors are the same memory, or none is.
            alias = None if whole.alias is None else (whole.alias, shape, layout.boxes, number)
        start, size, _ = box
        spec = LeafSpec(its.dtype, shape, start, size, nbytes, layout.kind, alias, flags, address, layout.holders)
        found.append((part, spec))
    return found


def coordinates_of(value: Any) -> Mapping[str, int]:
    """Return where this rank stands in the mesh of a DTensor."""
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    return _NOWHERE if coordinate is None else _coordinates(mesh.mesh_dim_names, tuple(coordinate))


@lru_cache(maxsize=256)
def _coordinates(names: tuple[str, ...] | None, coordinate: Extent) -> Mapping[str, int]:
    """One object for all tensors of a mesh. The mesh itself is no key: meshes of two process groups may be equal."""
    return MappingProxyType(dict(zip(names or map(str, range(len(coordinate))), coordinate, strict=True)))


def _part(local: torch.Tensor, box: _Box) -> torch.Tensor:
    part = local.detach()
    _, size, place = box
    for dimension, (first, count) in enumerate(zip(place, size, strict=True)):
        if count != part.shape[dimension]:
            part = part.narrow(dimension, first, count)
    return part


@lru_cache(maxsize=4096)
def _layout(shape: Extent, mesh: Any, coordinate: Extent | None, placements: tuple[Any, ...]) -> _Layout:
    cuts = [_cut_of(placement) for placement in placements]
    sizes = tuple(mesh.shape)
    cutting = [cut is not None and size > 1 for cut, size in zip(cuts, sizes, strict=True)]
    kind: LeafKind = "sharded" if any(cutting) else "replicated"
    everyone = tuple(sorted(mesh.mesh.flatten().tolist()))
    origin = (0,) * len(shape)
    if 0 in shape:  # everybody holds all of it, also who is not in the mesh
        return _Layout(kind, shape, ((origin, shape, origin),), everyone, outside=coordinate is None)
    if coordinate is None:
        if not shape:
            raise _Refused("a DTensor on a mesh without this rank; leave it out of this rank's state")
        return _Layout(kind, origin, ((origin, origin, origin),), everyone, outside=True)
    runs: list[list[Run]] = [[(0, extent)] for extent in shape]
    for cut, size, at in zip(cuts, sizes, coordinate, strict=True):
        if cut is not None:
            dimension, split_factor = cut
            runs[dimension] = share_of(runs[dimension], size, at, split_factor)
    counts = tuple([sum(count for _, count in row) for row in runs])
    index = tuple([at if cut else slice(None) for at, cut in zip(coordinate, cutting, strict=True)])
    holders = tuple(sorted(mesh.mesh[index].flatten().tolist()))
    if 0 in counts:
        return _Layout(kind, counts, ((origin, counts, origin),), holders)
    number = prod(map(len, runs))
    if number > BOXES_MAX:
        raise _Refused(
            f"a DTensor of which this rank holds {number} boxes ({list(placements)} on a mesh of {list(sizes)}); at "
            f"most {BOXES_MAX} are stored: redistribute it to Shard placements first"
        )
    return _Layout(kind, counts, tuple(map(_box, product(*map(_with_place, runs)))), holders)


def _box(corner: Sequence[tuple[int, int, int]]) -> _Box:
    firsts, counts, places = zip(*corner, strict=True) if corner else ((), (), ())
    return firsts, counts, places


def _cut_of(placement: Any) -> tuple[int, int] | None:
    """Return (dimension, split factor) of a placement that cuts, None for one that does not."""
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    if isinstance(placement, _StridedShard):  # a Shard, too, in older versions
        return placement.dim, int(placement.split_factor)
    if isinstance(placement, Shard):
        return placement.dim, 1
    if isinstance(placement, Replicate):
        return None
    if placement.is_partial():
        raise _Refused(
            f"a DTensor with the placement {placement!r} holds addends, not values; call redistribute() to Shard or "
            "Replicate first"
        )
    raise _Refused(f"a DTensor with the placement {placement!r}, which is unknown here; redistribute() it first")


def share_of(runs: Sequence[Run], parts: int, index: int, split_factor: int = 1) -> list[Run]:
    """Return what share ``index`` of ``parts`` is left with of the indices in ``runs``, adjoining runs made one."""
    found: list[Run] = []
    length = sum(count for _, count in runs)
    for piece in range(split_factor):
        begin, end = _chunk(length, split_factor, piece)
        first, last = _chunk(end - begin, parts, index)
        for run in _slice(runs, begin + first, begin + last):
            if found and found[-1][0] + found[-1][1] == run[0]:
                found[-1] = (found[-1][0], found[-1][1] + run[1])
            else:
                found.append(run)
    return found


def _chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Chunk ``index`` as ``torch.chunk`` cuts: all are ceil(length / parts) long, but the last ones."""
    each = -(-length // parts)
    return min(index * each, length), min((index + 1) * each, length)


def _slice(runs: Sequence[Run], begin: int, end: int) -> list[Run]:
    """The indices number ``begin`` up to ``end`` of those in ``runs``."""
    found = []
    at = 0
    for first, count in runs:
        low, high = max(begin, at), min(end, at + count)
        if low < high:
            found.append((first + low - at, high - low))
        at += count
    return found


def _with_place(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Runs as (first, count, place in the local tensor)."""
    found = []
    at = 0
    for first, count in runs:
        found.append((first, count, at))
        at += count
    return found
