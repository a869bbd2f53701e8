"""The units in which a pack is hashed and written, and the places that they take in the arena."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckptfmt.engine.transfer import IO_BYTES
from ckptfmt.format import checksum, pack
from ckptfmt.format.pack import ALIGNMENT


def align_up(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def align_down(value: int) -> int:
    return value // ALIGNMENT * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Chunk:
    """One span to be hashed: ``leaf`` counts in the plan's leaves, ``number`` in the leaf's chunks, ``offset`` in the
    pack file."""

    leaf: int
    number: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A range of a pack file written at once, with the chunks that begin in it.

    In the arena lie the bytes ``start`` to ``end``: the last chunk may reach past ``stop``. Where units pass through
    the window, so that no other shares their memory, by less than a page.
    """

    pack: int
    start: int
    stop: int
    end: int
    chunks: tuple[Chunk, ...]
    leaves: frozenset[int]
    """All leaves that have bytes in the range or in the chunks."""
    place: int
    """Offset of its first byte in the arena."""
    turn: int | None
    """Its number among the units that pass through the window; None if its pack is held whole."""
    after: int
    """So many units must have left the window before: some of them lie in its place."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the arena."""
        return self.end - self.start


def cut(
    number: int, members: Sequence[int], layout: pack.PackLayout, sizes: Sequence[int], room: Held | Window
) -> Iterator[Unit]:
    """Cut a pack file into units of about ``IO_BYTES``; the first ones hold the header."""
    chunks = _chunks(members, layout, sizes)
    if isinstance(room, Held):
        ranges = _evenly(chunks, layout.nbytes)
    else:
        ranges = _at_chunk_ends(chunks, len(layout.header), layout.nbytes)
    for start, stop, end, begun, leaves in ranges:
        place, turn, after = room.place(start, end)
        yield Unit(number, start, stop, end, tuple(begun), frozenset(leaves), place, turn, after)


_Range = tuple[int, int, int, list[Chunk], set[int]]
"""``start``, ``stop``, ``end``, ``chunks`` and ``leaves`` of a unit."""


def _chunks(members: Sequence[int], layout: pack.PackLayout, sizes: Sequence[int]) -> Iterator[Chunk]:
    for leaf, offset in zip(members, layout.offsets, strict=True):
        for at, (inner, length) in enumerate(checksum.chunk_spans(sizes[leaf], checksum.CHUNK_BYTES)):
            yield Chunk(leaf, at, offset + inner, length)


def _evenly(chunks: Iterator[Chunk], nbytes: int) -> Iterator[_Range]:
    """Of ``IO_BYTES`` each, as the parts of an upload are: of other units parts would have to be put together."""
    ahead = next(chunks, None)
    last: Chunk | None = None
    for start in range(0, nbytes, IO_BYTES):
        stop = min(start + IO_BYTES, nbytes)
        # The chunk that the unit before has begun may reach into this one.
        leaves = {last.leaf} if last is not None and last.offset + last.nbytes > start else set()
        begun: list[Chunk] = []
        while ahead is not None and ahead.offset < stop:
            begun.append(ahead)
            leaves.add(ahead.leaf)
            last, ahead = ahead, next(chunks, None)
        yield start, stop, max(stop, last.offset + last.nbytes) if begun and last else stop, begun, leaves


def _at_chunk_ends(chunks: Iterator[Chunk], header_bytes: int, nbytes: int) -> Iterator[_Range]:
    """At the page below the end of a chunk. No unit is longer than ``IO_BYTES`` + one chunk + a page."""
    start = 0
    while header_bytes - start >= IO_BYTES:
        yield start, start + IO_BYTES, start + IO_BYTES, [], set()
        start += IO_BYTES
    begun: list[Chunk] = []
    touched: set[int] = set()
    for chunk in chunks:
        begun.append(chunk)
        touched.add(chunk.leaf)
        end = chunk.offset + chunk.nbytes
        stop = align_down(end)
        if stop - start >= IO_BYTES:
            yield start, stop, end, begun, touched
            start, begun, touched = stop, [], {chunk.leaf}
    if start < nbytes:
        yield start, nbytes, nbytes, begun, touched


def joined(units: Sequence[Unit], nbytes: int) -> list[Unit]:
    """The units of a pack that is held whole, each with those behind it as long as they are no more than ``nbytes``."""
    groups: list[list[Unit]] = []
    for unit in units:
        if groups and unit.stop - groups[-1][0].start <= nbytes:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return [_one(group) for group in groups]


def _one(group: Sequence[Unit]) -> Unit:
    if len(group) == 1:
        return group[0]
    return replace(
        group[0],
        stop=group[-1].stop,
        end=max(unit.end for unit in group),
        chunks=tuple(chunk for unit in group for chunk in unit.chunks),
        leaves=frozenset[int]().union(*(unit.leaves for unit in group)),
    )


class Held:
    """Room for a whole pack, from ``offset`` in the arena on."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def place(self, start: int, end: int) -> tuple[int, None, int]:
        return self._offset + start, None, 0


class Window:
    """Room of ``nbytes`` from ``offset`` on, which units use one after the other, lap by lap."""

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self._nbytes = nbytes
        self._at = 0
        self._turn = 0
        self._after = 0
        self._lap: deque[tuple[int, int]] = deque()
        """(first byte, turn) of this lap's units."""
        self._before: deque[tuple[int, int]] = deque()
        """Those of the lap before whose place has not been taken yet."""
        self.used = 0

    def place(self, start: int, end: int) -> tuple[int, int, int]:
        length = align_up(end - start)
        if self._at + length > self._nbytes:
            self._before, self._lap, self._at = self._lap, deque(), 0
        place, self._at = self._at, self._at + length
        while self._before and self._before[0][0] < self._at:
            self._after = self._before.popleft()[1] + 1
        self._lap.append((place, self._turn))
        self._turn += 1
        self.used = max(self.used, self._at)
        return self.offset + place, self._turn - 1, self._after
