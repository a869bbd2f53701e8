"""From stored boxes to wanted ones: which chunks are read for them, and where the bytes of those go.

A chunk that is needed in part is read whole: only a whole chunk can be compared with its digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from operator import mul
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from ckptfmt.engine.arena import map_memory
from ckptfmt.engine.load.memory import Memory
from ckptfmt.engine.read_plan import StoredBox, run_of
from ckptfmt.engine.stored import Stored
from ckptfmt.engine.touch import address_of
from ckptfmt.engine.transfer import copy_memory, run_all, thread_count
from ckptfmt.format.boxes import Box, Extent, intersect, slabs, strides_of, volume, whole
from ckptfmt.format.dtypes import dtype

_ROW_BYTES: Final = 64 << 10
"""Rows from this length on are copied one by one, shorter ones as an array of rows."""
_PIECE_BYTES: Final = 16 << 20
"""So much of an array of rows is copied by one thread at a time."""


class Share(msgspec.Struct, frozen=True, gc=False):
    """What a wanted box takes from one stored box, or a part of that: every chunk between its ends is needed.

    ``first`` and ``stop`` are the ends, in bytes from the start of the stored box; ``at`` is its corner in the wanted
    box, ``size`` its size.
    """

    box: StoredBox
    first: int
    stop: int
    at: Extent
    size: Extent


def shares_of(row: Stored, wanted: Box) -> list[Share]:
    """What makes up the box ``wanted`` of a stored tensor; nothing for an empty one."""
    width = dtype(row.dtype).itemsize
    found = []
    for box in row.meeting(wanted):
        common = intersect(wanted, (box.start, box.size))
        if common is None:
            continue
        corner, size = common
        inner = tuple(a - b for a, b in zip(corner, box.start, strict=True))
        shift = tuple(a - b for a, b in zip(box.start, wanted[0], strict=True))  # from the stored box to the wanted one
        for slab in slabs(box.size, inner, size, width, box.chunk_bytes):
            at = tuple(a + b for a, b in zip(slab.start, shift, strict=True))
            found.append(Share(box, slab.first, slab.stop, at, slab.size))
    return found


def boxes_to_read(rows: Iterable[Stored], shares: Iterable[Share] = ()) -> list[StoredBox]:
    """All of ``rows``, and the chunks that ``shares`` need: each chunk once."""
    found = {(box.pack, box.offset): box for row in rows for box in row.boxes if box.nbytes}
    parts: dict[tuple[str, int], tuple[StoredBox, list[tuple[int, int]]]] = {}
    for share in shares:
        box = share.box
        place = (box.pack, box.offset)
        if place not in found:
            run = (share.first // box.chunk_bytes, (share.stop - 1) // box.chunk_bytes + 1)
            parts.setdefault(place, (box, []))[1].append(run)
    return [*found.values(), *(run_of(box, *run) for box, runs in parts.values() for run in _united(runs))]


def _united(runs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Runs of numbers without overlaps, neighbours as one."""
    ordered = sorted(runs)
    first, stop = ordered[0]
    for begin, end in ordered[1:]:
        if begin > stop:
            yield first, stop
            first = begin
        stop = max(stop, end)
    yield first, stop


def bytes_of(row: Stored, memory: Memory) -> memoryview:
    """All bytes of a tensor that was read; one that is stored in several boxes is put together first."""
    if not row.nbytes:
        return memoryview(bytearray())
    if len(row.boxes) == 1:  # nearly always, so without a detour
        box = row.boxes[0]
        return memory.view(box.pack, box.offset, box.nbytes)
    return gathered(shares_of(row, whole(row.shape)), row.shape, dtype(row.dtype).itemsize, memory)


def gathered(shares: Sequence[Share], size: Extent, width: int, memory: Memory) -> memoryview:
    """The bytes of a wanted box of that size, in C order; no copy where a stored box holds them so."""
    nbytes = volume(size) * width
    if len(shares) == 1 and shares[0].stop - shares[0].first == nbytes:
        box = shares[0].box
        return memory.view(box.pack, box.offset + shares[0].first, nbytes)
    host = map_memory(nbytes)[:nbytes]
    copies = Copies(memory)
    copies.add(shares, size, width, address_of(host))
    copies.make()
    return host


class _Rows(NamedTuple):
    """Rows of ``nbytes`` that lie ``strides`` apart: here from ``source`` on, there from ``target`` on."""

    nbytes: int
    counts: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]


class Copies:
    """Copies out of memory that was read into boxes that lie dense in host memory: collected, then made together."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._moves: list[tuple[int, int, int]] = []
        self._rows: list[_Rows] = []

    def move(self, address: int, box: StoredBox) -> None:
        """Copy a whole stored box to ``address``."""
        self._moves.append((address, self._memory.address(box.pack, box.offset), box.nbytes))

    def add(self, shares: Sequence[Share], size: Extent, width: int, address: int) -> None:
        """Copy what makes up a wanted box of ``size`` to ``address``. ``width``: bytes of an element."""
        strides = strides_of(size, width)
        for share in shares:
            box = share.box
            source = self._memory.address(box.pack, box.offset + share.first)
            target = address + sum(map(mul, share.at, strides))
            self._add(share.size, width, (source, strides_of(box.size, width)), (target, strides))

    def _add(
        self, size: Extent, width: int, source: tuple[int, Sequence[int]], target: tuple[int, Sequence[int]]
    ) -> None:
        """Split a box into the longest rows of bytes that lie dense on both sides."""
        nbytes, outer = width, [axis for axis, count in enumerate(size) if count > 1]
        while outer and source[1][outer[-1]] == target[1][outer[-1]] == nbytes:
            nbytes *= size[outer.pop()]
        rows = _Rows(
            nbytes,
            tuple(size[axis] for axis in outer),
            source[0],
            tuple(source[1][axis] for axis in outer),
            target[0],
            tuple(target[1][axis] for axis in outer),
        )
        if outer and nbytes < _ROW_BYTES:
            self._rows.append(rows)
        else:
            self._moves += _row_by_row(rows)

    def make(self) -> None:
        """Make them, on several threads."""
        copy_memory(self._moves)
        tasks = [
            lambda target=target, source=source: np.copyto(target, source)
            for rows in self._rows
            for target, source in _pieces(rows)
        ]
        run_all(tasks, threads=thread_count(), name="ckptfmt-copy")


def _row_by_row(rows: _Rows) -> Iterator[tuple[int, int, int]]:
    for index in product(*map(range, rows.counts)):
        source = rows.source + sum(map(mul, index, rows.source_strides))
        target = rows.target + sum(map(mul, index, rows.target_strides))
        yield target, source, rows.nbytes


class _At:
    """Memory at an address as numpy takes it."""

    def __init__(self, address: int, nbytes: int, count: tuple[int, ...], strides: tuple[int, ...]) -> None:
        # A number is copied faster than as many bytes.
        element = f"<u{nbytes}" if nbytes in (1, 2, 4, 8) else f"|V{nbytes}"
        self.__array_interface__ = {
            "version": 3,
            "typestr": element,
            "shape": count,
            "strides": strides,
            "data": (address, False),
        }


def _pieces(rows: _Rows) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """(target, source) as arrays of rows, in pieces along the first dimension."""
    target = np.asarray(_At(rows.target, rows.nbytes, rows.counts, rows.target_strides))
    source = np.asarray(_At(rows.source, rows.nbytes, rows.counts, rows.source_strides))
    step = max(1, _PIECE_BYTES * rows.counts[0] // (rows.nbytes * volume(rows.counts)))
    for at in range(0, rows.counts[0], step):
        yield target[at : at + step], source[at : at + step]
