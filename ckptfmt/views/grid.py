"""A tensor as other formats see it: a regular grid of chunks, each one range of bytes of one stored box.

Boxes are what ranks held, chunks what readers of an array format expect: of one shape, in C order, the last along a
dimension whole although it reaches past the tensor. Nothing is copied to present one as the other: a chunk is named by
the box that holds its first byte, and by where in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import gcd, log2, prod
from operator import mul
from typing import Final, NamedTuple

from ckptfmt.format.boxes import Box, Extent, strides_of
from ckptfmt.format.checksum import CHUNK_BYTES

TARGET_BYTES: Final = CHUNK_BYTES
"""As much as one digest covers: who verifies a piece has to read that. Readers spend some 120 us on a chunk, so that
much smaller ones cost more than their bytes."""
_HANDY: Final = (TARGET_BYTES // 32, TARGET_BYTES * 8)
"""Chunks of other sizes are legal, and slow or large."""


@dataclass(frozen=True)
class Grid:
    """Chunk (i, j, ...) of ``shape`` begins at element (i * chunk[0], j * chunk[1], ...).

    ``chunk`` is at least 1 in every dimension. What of a chunk lies outside of ``shape`` has no meaning.
    """

    shape: Extent
    chunk: Extent

    @property
    def counts(self) -> Extent:
        """Number of chunks along each dimension."""
        return tuple(-(-extent // edge) for extent, edge in zip(self.shape, self.chunk, strict=True))

    @property
    def volume(self) -> int:
        """Elements of every chunk."""
        return prod(self.chunk)

    def indices(self) -> Iterator[Extent]:
        """All chunks, in C order."""
        return product(*map(range, self.counts))

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, tuple) or len(index) != len(self.shape):
            return False
        return all(0 <= i < count for i, count in zip(index, self.counts, strict=True))

    def box(self, index: Extent) -> Box:
        """What of a chunk lies in the tensor."""
        start = tuple(map(mul, index, self.chunk))
        ends = zip(start, self.chunk, self.shape, strict=True)
        return start, tuple(min(edge, extent - at) for at, edge, extent in ends)


class Place(NamedTuple):
    """Where a chunk begins: the number of a box, and the bytes that go before it there."""

    box: int
    first: int


@dataclass(frozen=True)
class Presented:
    """A grid every chunk of which is one range of bytes of one box.

    The range of a chunk that reaches past the shape may pass the end of its box: what follows has no meaning.
    """

    grid: Grid
    boxes: Sequence[Box]
    itemsize: int
    cuts: tuple[tuple[int, ...], ...]
    """Where boxes begin along each dimension, ascending."""

    @property
    def chunk_bytes(self) -> int:
        return self.grid.volume * self.itemsize

    @property
    def handy(self) -> bool:
        """Whether chunks are of a size that readers like, or cannot be larger for being whole boxes."""
        small, large = _HANDY
        if self.chunk_bytes < small:
            return prod(self.grid.counts) <= len(self.boxes)
        return self.chunk_bytes <= large

    @cached_property
    def _at(self) -> dict[Extent, int]:
        found: dict[Extent, int] = {}
        for number, (start, size) in enumerate(self.boxes):
            if all(size):
                found.setdefault(start, number)
        return found

    def place(self, index: Extent) -> Place:
        """Where chunk ``index`` of the grid begins."""
        start = tuple(map(mul, index, self.grid.chunk))
        corner = tuple(cuts[bisect_right(cuts, at) - 1] for cuts, at in zip(self.cuts, start, strict=True))
        number = self._at[corner]
        strides = strides_of(self.boxes[number][1], self.itemsize)
        inner = (at - low for at, low in zip(start, corner, strict=True))
        return Place(number, sum(map(mul, inner, strides)))


def free_grid(shape: Extent, itemsize: int) -> Grid:
    """A grid of chunks near ``TARGET_BYTES``, wherever the boxes are: chunks have to be put together."""
    presented = present(shape, [((0,) * len(shape), shape)], itemsize)
    assert presented is not None  # one box is always a grid
    return presented.grid


def present(shape: Extent, boxes: Sequence[Box], itemsize: int) -> Presented | None:
    """Present a tensor by its boxes, which tile it. None where they form no grid with equal edges where it matters.

    Along one dimension a chunk takes some rows of a box, before it one, after it all: so a chunk is a range of bytes.
    Of such ways that with chunks nearest ``TARGET_BYTES`` is taken.
    """
    if 0 in shape:
        return Presented(Grid(shape, tuple(max(1, extent) for extent in shape)), boxes, itemsize, ((),) * len(shape))
    edges = _edges(len(shape), boxes)
    if edges is None:
        return None
    cuts = tuple(tuple(along) for along in edges)
    candidates = [_along(axis, edges, itemsize) for axis in range(len(shape))] if shape else [()]
    legal = [chunk for chunk in candidates if chunk is not None]
    if not legal:
        return None
    best = min(legal, key=lambda chunk: abs(log2(prod(chunk) * itemsize / TARGET_BYTES)))
    return Presented(Grid(shape, best), boxes, itemsize, cuts)


def _edges(ndim: int, boxes: Sequence[Box]) -> list[dict[int, int]] | None:
    """Where boxes begin along each dimension, ascending, and how long they are. None if they are no full grid."""
    solid = {box for box in boxes if all(box[1])}
    along: list[dict[int, int]] = [{} for _ in range(ndim)]
    for start, size in solid:
        for axis in range(ndim):
            if along[axis].setdefault(start[axis], size[axis]) != size[axis]:
                return None
    if prod(map(len, along)) != len(solid):
        return None
    return [dict(sorted(sizes.items())) for sizes in along]


def _along(axis: int, edges: Sequence[dict[int, int]], itemsize: int) -> Extent | None:
    """Chunks of some rows along ``axis``; None unless boxes have equal edges in all dimensions after it."""
    after = []
    for sizes in edges[axis + 1 :]:
        if len(set(sizes.values())) > 1:
            return None
        after.append(next(iter(sizes.values())))
    rows = _rows(list(edges[axis].values()), prod(after) * itemsize)
    return (1,) * axis + (rows, *after)


def _rows(sizes: Sequence[int], row_bytes: int) -> int:
    """How many rows of boxes of such ``sizes`` along one dimension make up a chunk: never some of two boxes."""
    wanted = max(1, TARGET_BYTES // row_bytes)
    if len(sizes) == 1:
        parts = -(-sizes[0] // wanted)
        return -(-sizes[0] // parts)
    first, last = sizes[0], sizes[-1]
    even = all(size == first for size in sizes[:-1]) and last <= first
    # A divisor of the last one, too, would be 1 for a vocabulary of 50,257; after it the tensor ends.
    return _nearest_divisor(first if even else gcd(*sizes), wanted)


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of ``number`` whose ratio to ``wanted`` is nearest 1."""
    best = number
    for small in range(1, int(number**0.5) + 1):
        if number % small == 0:
            best = min(best, small, number // small, key=lambda divisor: abs(log2(divisor / wanted)))
    return best
