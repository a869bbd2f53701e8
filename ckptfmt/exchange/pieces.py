"""Tensors that lie somewhere as boxes, read as the consecutive bytes that they are in C order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final, Protocol

from ckptfmt.format.boxes import Box, Extent, intersect, volume
from ckptfmt.format.dtypes import dtype

if TYPE_CHECKING:
    import numpy as np

PIECE_BYTES: Final = 8 << 20
"""What is read at a time: as much as one chunk of ours has, so that a verified chunk is read once."""


class ByteSource(Protocol):
    """The bytes of one box, little-endian and in C order."""

    def read_into(self, first: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes from ``first`` on. Raises a ``CkptError`` that names the file, and ``Corrupt``
        for bytes that are not there."""


@dataclass(frozen=True, eq=False)
class SourceBox:
    """One box of a tensor, and where its bytes come from."""

    start: Extent
    size: Extent
    source: ByteSource


@dataclass(frozen=True, eq=False)
class SourceTensor:
    """A tensor outside of any repository, or on its way out of one. ``boxes`` tile it; ``dtype`` is a format dtype
    name; ``file`` is where it, or its first box, lies, by the name within what was opened."""

    name: str
    dtype: str
    shape: Extent
    boxes: Sequence[SourceBox]
    file: str

    @property
    def itemsize(self) -> int:
        return dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def pieces(self, limit: int = PIECE_BYTES) -> Iterator[memoryview]:
        """All of its bytes in C order, ``limit`` at a time; a row of a tensor in several boxes comes whole. A piece is
        valid until the next one is asked for."""
        if not self.nbytes:
            return
        if len(self.boxes) == 1:
            yield from self._consecutive(self.boxes[0], limit)
        else:
            yield from self._assembled(limit)

    def _consecutive(self, box: SourceBox, limit: int) -> Iterator[memoryview]:
        memory = memoryview(bytearray(min(limit, self.nbytes)))
        for first in range(0, self.nbytes, limit):
            piece = memory[: min(limit, self.nbytes - first)]
            box.source.read_into(first, piece)
            yield piece

    def _assembled(self, limit: int) -> Iterator[memoryview]:
        import numpy as np  # only here: whoever asks what a file is need not wait for it

        rest = self.shape[1:]
        rows_at_once = max(1, limit // (volume(rest) * self.itemsize))
        element = np.dtype(f"V{self.itemsize}")
        for row in range(0, self.shape[0], rows_at_once):
            rows = min(rows_at_once, self.shape[0] - row)
            block: np.ndarray[Any, Any] = np.empty((rows, *rest), element)
            wanted = ((row, *(0 for _ in rest)), (rows, *rest))
            for box in self.boxes:
                self._copy_share(box, wanted, block)
            yield block.reshape(-1).view(np.uint8).data

    def _copy_share(self, box: SourceBox, wanted: Box, block: np.ndarray[Any, Any]) -> None:
        """Whole rows of ``box`` that lie in ``wanted``: they are consecutive there."""
        common = intersect((box.start, box.size), wanted)
        if common is None:
            return
        start, size = common
        row_bytes = volume(box.size[1:]) * self.itemsize
        whole_rows = (size[0], *box.size[1:])
        part = bytearray(volume(whole_rows) * self.itemsize)
        box.source.read_into((start[0] - box.start[0]) * row_bytes, memoryview(part))
        at = tuple(low - corner for low, corner in zip(start, wanted[0], strict=True))
        block[tuple(slice(low, low + count) for low, count in zip(at, size, strict=True))] = _array(
            part, block.dtype, whole_rows
        )


def _array(data: bytearray, element: np.dtype[Any], shape: Extent) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.frombuffer(data, element).reshape(shape)


class SourceArray(SourceTensor):
    """The same of a library whose arrays come back as numpy's."""
