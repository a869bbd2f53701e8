"""Boxes: axis-aligned hyperrectangles (start, size) of a global tensor, in elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import add, mul
from typing import Final, NamedTuple

from ckptfmt.errors import InvalidInput

Extent = tuple[int, ...]
Box = tuple[Extent, Extent]
"""(start, size): both have one number for each dimension."""

IRREGULAR_MAX: Final = 2048
"""Most boxes of one tensor that no plane may divide (bounds the pairwise check)."""
WORK_PER_BOX_MAX: Final = 64
"""How often each box may be looked at, on average, while cutting."""


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
    reason = _clash(solid) if len(solid) > 1 else None
    if reason is None and covered != total:
        reason = f"the boxes hold {covered} of {total} elements of the shape {list(shape)}"
    return Tiling(reason, tuple(replicas))


def misfit(shape: Extent, start: Extent, size: Extent) -> str | None:
    if len(start) != len(shape) or len(size) != len(shape):
        return f"box {list(start)}+{list(size)} does not have the {len(shape)} dimensions of the shape {list(shape)}"
    if any(x < 0 or n < 0 or x + n > limit for x, n, limit in zip(start, size, shape, strict=True)):
        return f"box {list(start)}+{list(size)} lies outside the shape {list(shape)}"
    return None


def _clash(boxes: list[Box]) -> str | None:
    """Return a reason if two of the (distinct, non-empty) boxes overlap.

    Sharding cuts along one axis, and what results along another: such cuts are found again, one by
    one, and only what no cut divides is compared in pairs.
    """
    todo, looked_at = [boxes], 0
    while todo:
        group = todo.pop()
        looked_at += len(group)
        if looked_at > WORK_PER_BOX_MAX * max(len(boxes), IRREGULAR_MAX):
            return f"{len(boxes)} boxes lie too irregularly to be checked"
        for axis in range(len(group[0][0])):
            pieces = _cut(group, axis)
            if len(pieces) > 1:
                todo += [piece for piece in pieces if len(piece) > 1]
                break
        else:
            reason = _pairwise(group)
            if reason is not None:
                return reason
    return None


def _cut(boxes: list[Box], axis: int) -> list[list[Box]]:
    """Divide boxes by all planes across ``axis`` that pass between them."""
    pieces: list[list[Box]] = []
    reach = -1
    for box in sorted(boxes, key=lambda item: item[0][axis]):
        if box[0][axis] >= reach:
            pieces.append([])
        pieces[-1].append(box)
        reach = max(reach, box[0][axis] + box[1][axis])
    return pieces


def _pairwise(boxes: list[Box]) -> str | None:
    if len(boxes) > IRREGULAR_MAX:
        return f"{len(boxes)} boxes overlap, or can't be divided by planes; of such boxes there may be {IRREGULAR_MAX}"
    for i, box in enumerate(boxes):
        for other in boxes[:i]:
            if intersect(other, box) is not None:
                return f"boxes overlap: {_text(other)} and {_text(box)}"
    return None


def _text(box: Box) -> str:
    return f"{list(box[0])}+{list(box[1])}"


class Slab(NamedTuple):
    """A part of a sub-box: its place in the box it is taken from, and the bytes of that box from its ``first`` up to
    ``stop``, after its last."""

    start: Extent
    size: Extent
    first: int
    stop: int


def slabs(
    box_size: Sequence[int], sub_start: Sequence[int], sub_size: Sequence[int], itemsize: int, gap_bytes: int
) -> list[Slab]:
    """Cut a sub-box of a box stored in C order wherever ``gap_bytes`` or more lie between bytes that belong to it.

    So every run of ``gap_bytes`` between the ends of one slab has bytes of it, and there are at most twice as many
    slabs as such runs. ``sub_start`` counts from the box's own corner; an empty sub-box has no slabs.
    ``InvalidInput`` if the sub-box does not lie within the box.
    """
    shape, start, size = tuple(box_size), tuple(sub_start), tuple(sub_size)
    reason = misfit(shape, start, size)
    if reason is not None:
        raise InvalidInput(f"slice of a stored box: {reason}")
    if not all(size):
        return []
    strides = strides_of(shape, itemsize)
    spans = [itemsize] * (len(shape) + 1)  # of all that is taken along a dimension and those within it
    for d in range(len(shape) - 1, -1, -1):
        spans[d] = spans[d + 1] + (size[d] - 1) * strides[d]
    level = len(shape)  # from this dimension on no gap is too long
    while level and (size[level - 1] == 1 or strides[level - 1] - spans[level] < gap_bytes):
        level -= 1
    base = sum(map(mul, start, strides))
    found = []
    for index in product(*map(range, size[:level])):
        first = base + sum(map(mul, index, strides))
        corner = (*map(add, start, index), *start[level:])
        found.append(Slab(corner, (1,) * level + size[level:], first, first + spans[level]))
    return found


def strides_of(shape: Sequence[int], itemsize: int) -> list[int]:
    """Return the distance in bytes between neighbours along each dimension of an array in C order."""
    strides = [itemsize] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return strides
