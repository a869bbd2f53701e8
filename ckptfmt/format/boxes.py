"""Boxes: axis-aligned hyperrectangles (start, size) of a global tensor, in elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Final

from ckptfmt.errors import InvalidInput

Extent = tuple[int, ...]
Box = tuple[Extent, Extent]
"""(start, size): both have one number for each dimension."""

IRREGULAR_MAX: Final = 2048
"""Most boxes of one tensor that may tile it without lying in slabs (bounds the pairwise check)."""


def volume(size: Sequence[int]) -> int:
    """Return the number of elements; 1 for zero dimensions."""
    return prod(size)


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers all of ``shape``."""
    return (0,) * len(shape), tuple(shape)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common box of ``a`` and ``b``, or None where they share no element."""
    start = tuple(map(max, a[0], b[0]))
    stop = tuple(min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))
    size = tuple(high - low for low, high in zip(start, stop, strict=True))
    return None if any(n <= 0 for n in size) else (start, size)


@dataclass(frozen=True)
class Tiling:
    """What ``check_tiling`` found. ``reason`` None means that the boxes tile the shape exactly;
    ``replicas`` are index pairs (later, first) of identical boxes, which are no fault by themselves."""

    reason: str | None
    replicas: tuple[tuple[int, int], ...] = ()


def check_tiling(global_shape: Sequence[int], boxes: Sequence[Box]) -> Tiling:
    """Check that ``boxes`` cover every element of ``global_shape`` exactly once, replicas aside."""
    shape = tuple(global_shape)
    distinct: dict[Box, int] = {}
    replicas = []
    for i, (start, size) in enumerate(boxes):
        reason = misfit(shape, start, size)
        if reason is not None:
            return Tiling(reason)
        first = distinct.setdefault((start, size), i)
        if first != i:
            replicas.append((i, first))
    if not distinct:
        return Tiling(f"no box covers the shape {list(shape)}")
    solid = [box for box in distinct if all(box[1])]
    total, covered = prod(shape), sum(prod(size) for _, size in solid)
    # The clash is looked for first, because it is what explains a wrong volume best.
    reason = _clash(solid, 0) if len(solid) > 1 else None
    if reason is None and covered != total:
        reason = f"the boxes hold {covered} of {total} elements of the shape {list(shape)}"
    return Tiling(reason, tuple(replicas))


def misfit(shape: Extent, start: Extent, size: Extent) -> str | None:
    if len(start) != len(shape) or len(size) != len(shape):
        return f"box {list(start)}+{list(size)} does not have the {len(shape)} dimensions of the shape {list(shape)}"
    if any(x < 0 or n < 0 or x + n > limit for x, n, limit in zip(start, size, shape, strict=True)):
        return f"box {list(start)}+{list(size)} lies outside the shape {list(shape)}"
    return None


def _clash(boxes: list[Box], axis: int) -> str | None:
    """Return a reason if two of the (distinct, non-empty) boxes overlap.

    Sharding makes grids: along each axis boxes fall into slabs of equal extent. Slabs that do not
    overlap are looked at one by one along the next axis; only what is no such grid is compared in pairs.
    """
    if len(boxes) < 2:
        return None
    if axis == len(boxes[0][0]):
        return f"two boxes hold the same elements: {_text(boxes[0])} and {_text(boxes[1])}"
    slabs: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        slabs.setdefault((box[0][axis], box[0][axis] + box[1][axis]), []).append(box)
    edges = sorted(slabs)
    if any(stop > start for (_, stop), (start, _) in pairwise(edges)):
        return _pairwise(boxes, axis)
    for slab in slabs.values():
        reason = _clash(slab, axis + 1)
        if reason is not None:
            return reason
    return None


def _pairwise(boxes: list[Box], axis: int) -> str | None:
    if len(boxes) > IRREGULAR_MAX:
        return f"{len(boxes)} boxes lie in no grid; irregular tilings have at most {IRREGULAR_MAX} boxes"
    active: list[Box] = []
    for box in sorted(boxes, key=lambda item: item[0][axis]):
        active = [other for other in active if other[0][axis] + other[1][axis] > box[0][axis]]
        for other in active:
            if intersect(other, box) is not None:
                return f"boxes overlap: {_text(other)} and {_text(box)}"
        active.append(box)
    return None


def _text(box: Box) -> str:
    return f"{list(box[0])}+{list(box[1])}"


def byte_ranges(
    box_size: Sequence[int], sub_start: Sequence[int], sub_size: Sequence[int], itemsize: int
) -> list[tuple[int, int]]:
    """Return the coalesced (offset, length) byte ranges of a sub-box within a box stored in C order.

    ``sub_start`` counts from the box's own corner. One range means that the slice is contiguous;
    an empty slice has none. ``InvalidInput`` if the sub-box does not lie within the box.
    """
    shape, start, size = tuple(box_size), tuple(sub_start), tuple(sub_size)
    reason = misfit(shape, start, size)
    if reason is not None:
        raise InvalidInput(f"slice of a stored box: {reason}")
    if not all(size):
        return []
    strides = [itemsize] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    inner = len(shape)  # dimensions from here on are taken whole, hence lie back to back
    while inner > 0 and size[inner - 1] == shape[inner - 1]:
        inner -= 1
    if inner == 0:
        return [(0, prod(shape) * itemsize)]
    run = inner - 1  # the innermost dimension that is taken in part: its rows are single ranges
    length = size[run] * strides[run]
    base = sum(x * stride for x, stride in zip(start, strides, strict=True))
    offsets = [base]
    for d in range(run):
        offsets = [offset + i * strides[d] for offset in offsets for i in range(size[d])]
    return [(offset, length) for offset in offsets]
