"""From stored bytes to live tensors: what is read for them, and how it gets there once it was verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ckptfmt.engine.arena import Arena, map_memory
from ckptfmt.engine.load.decisions import Fill
from ckptfmt.engine.load.gather import Copies, Share, boxes_to_read, gathered, shares_of
from ckptfmt.engine.load.memory import Memory, read_boxes, show_boxes
from ckptfmt.engine.opened import Opened
from ckptfmt.format.boxes import volume
from ckptfmt.format.dtypes import dtype
from ckptfmt.ports.arrays import ArrayFamily


class Filling:
    """Live tensors to be filled together.

    ``nbytes`` is what they take in all, ``read_bytes`` what is read for that: whole chunks, each once.
    """

    def __init__(self, fills: Sequence[Fill]) -> None:
        self._fills = fills
        self._shares = [None if takes_all(fill) else shares_of(fill.row, (fill.start, fill.size)) for fill in fills]
        pairs = list(zip(fills, self._shares, strict=True))
        shares = [share for row in self._shares if row is not None for share in row]
        self._boxes = boxes_to_read([fill.row for fill, row in pairs if row is None], shares)
        self.nbytes = sum(fill.row.nbytes if row is None else _nbytes(fill) for fill, row in pairs)
        self.read_bytes = sum([box.nbytes for box in self._boxes])

    def read(self, opened: Opened, arena: Arena | None = None) -> Memory:
        """The bytes, verified: in the arena, or without any memory where they are cached.

        Fresh memory costs more than the bytes that are read into it; an arena that has been touched does not.
        """
        if self._boxes and (arena is None or arena.touched < self.read_bytes):
            on_host = all(fill.address is not None or not _nbytes(fill) for fill in self._fills)
            shown = show_boxes(opened, self._boxes) if on_host else None
            if shown is not None:
                return shown
        return read_boxes(opened, self._boxes, memory=map_memory if arena is None else _arena_memory(arena))

    def fill(self, memory: Memory) -> None:
        """Copy the bytes into the tensors: dense host memory with our own threads, the rest by its family."""
        copies = Copies(memory)
        moved: dict[int, tuple[ArrayFamily, list[Any]]] = {}
        others: dict[int, tuple[ArrayFamily, list[tuple[Any, memoryview]]]] = {}
        for fill, shares in zip(self._fills, self._shares, strict=True):
            if not (fill.row.nbytes if shares is None else shares):
                continue  # no elements
            address = None if fill.cast else fill.family.host_address(fill.value)
            if address is not None:
                if shares is None:
                    copies.move(address, fill.row.boxes[0])
                else:
                    copies.add(shares, fill.size, dtype(fill.row.dtype).itemsize, address)
                moved.setdefault(id(fill.family), (fill.family, []))[1].append(fill.value)
                continue
            host = _host_bytes(fill, shares, memory)
            if fill.cast:
                fill.family.fill_cast(fill.value, fill.row.dtype, host)
            else:
                others.setdefault(id(fill.family), (fill.family, []))[1].append((fill.value, host))
        captures = [family.fill(pairs) for family, pairs in others.values()]
        copies.make()
        for family, values in moved.values():
            family.wrote_to(values)
        for capture in captures:
            capture.wait()


def takes_all(fill: Fill) -> bool:
    """Whether a live tensor takes the whole of a stored one that lies in one box."""
    return fill.size == fill.row.shape and len(fill.row.boxes) == 1


def _nbytes(fill: Fill) -> int:
    return volume(fill.size) * dtype(fill.row.dtype).itemsize


def _host_bytes(fill: Fill, shares: Sequence[Share] | None, memory: Memory) -> memoryview:
    if shares is not None:
        return gathered(shares, fill.size, dtype(fill.row.dtype).itemsize, memory)
    box = fill.row.boxes[0]
    return memory.view(box.pack, box.offset, box.nbytes)


def _arena_memory(arena: Arena) -> Callable[[int], memoryview]:
    def reserve(nbytes: int) -> memoryview:
        arena.reserve(nbytes)
        return arena.view(0, nbytes)

    return reserve
