"""The bytes of one presented chunk: a range of a stored box, or put together from several."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptfmt.engine.load.gather import shares_of
from ckptfmt.engine.read_plan import StoredBox
from ckptfmt.format.boxes import Extent, strides_of
from ckptfmt.format.dtypes import dtype
from ckptfmt.views.box_bytes import BoxBytes
from ckptfmt.views.grid import Grid, Presented
from ckptfmt.views.zarr_nodes import ArrayNode


class Chunk:
    """Chunk ``index`` of ``node``: as ``presented``, or of the grid for chunks that are put together."""

    __slots__ = ("index", "node", "presented")

    def __init__(self, node: ArrayNode, index: Extent, presented: Presented | None) -> None:
        self.node = node
        self.index = index
        self.presented = presented

    @property
    def grid(self) -> Grid:
        return self.node.free_grid if self.presented is None else self.presented.grid

    @property
    def nbytes(self) -> int:
        return self.grid.volume * self.node.itemsize

    def _range(self, start: int, stop: int) -> tuple[StoredBox, int, int] | None:
        """The box that holds bytes ``start`` up to ``stop`` of the chunk, and where in it; None for several boxes."""
        if self.presented is None:
            return None
        place = self.presented.place(self.index)
        box = self.node.stored.boxes[place.box]
        return box, place.first + start, min(place.first + stop, box.nbytes)

    def at_hand(self, source: BoxBytes) -> bool:
        """Whether reading it takes no time."""
        where = self._range(0, self.nbytes)
        return where is not None and source.at_hand(*where)

    def read(self, source: BoxBytes, start: int, stop: int) -> memoryview:
        """Bytes ``start`` up to ``stop`` of the chunk; zeros where it reaches past the tensor."""
        where = self._range(start, stop)
        if where is None:
            return self._assembled(source)[start:stop]
        box, first, last = where
        found = source.read(box, first, last) if first < last else memoryview(b"")
        if len(found) == stop - start:
            return found
        padded = memoryview(bytearray(stop - start))
        padded[: len(found)] = found
        return padded

    def _assembled(self, source: BoxBytes) -> memoryview:
        """All of a chunk, from the boxes that hold some of it."""
        node = self.node
        ndim = len(node.stored.shape)
        start, size = self.grid.box(self.index)
        width = dtype(node.stored.dtype).itemsize
        element = np.dtype(f"V{width}")
        whole = np.zeros(self.grid.chunk[:ndim], element)
        for share in shares_of(node.stored, (start[:ndim], size[:ndim])):
            data = source.read(share.box, share.first, share.stop)
            part: np.ndarray[Any, Any] = np.ndarray(
                share.size, element, buffer=data, strides=strides_of(share.box.size, width)
            )
            whole[tuple(slice(at, at + count) for at, count in zip(share.at, share.size, strict=True))] = part
        return whole.reshape(-1).view(np.uint8).data
