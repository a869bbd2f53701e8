"""Zarr v3 groups on this machine, through zarr-python: every array below the group, by its path with dots."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfmt.errors import FormatError, UnsupportedValue
from ckptfmt.exchange.foreign import Foreign
from ckptfmt.exchange.local_file import LocalFile
from ckptfmt.exchange.pieces import SourceArray, SourceBox, SourceTensor
from ckptfmt.format.boxes import Extent
from ckptfmt.format.dtypes import dtype, from_numpy

if TYPE_CHECKING:
    import zarr

ROWS_BYTES = 64 << 20
"""Of an array that is read at a time, or one row of its chunks."""


class _ArrayBytes:
    """The bytes of one array. Whole rows of chunks are read, and the last ones kept: readers ask in C order."""

    def __init__(self, array: zarr.Array[Any], name: str, path: Path, itemsize: int) -> None:
        self._array = array
        self._what = f"{path}: array {name!r}"
        self._shape: Extent = array.shape
        self._itemsize = itemsize
        self._rows = range(0)
        self._bytes = memoryview(b"")

    @cached_property
    def _row_bytes(self) -> int:
        count = self._itemsize
        for size in self._shape[1:]:
            count *= size
        return count

    def read_into(self, first: int, memory: memoryview) -> None:
        done = 0
        while done < memory.nbytes:
            row, inner = divmod(first + done, self._row_bytes)
            if row not in self._rows:
                self._read(row)
            at = (row - self._rows.start) * self._row_bytes + inner
            part = self._bytes[at : at + memory.nbytes - done]
            memory[done : done + part.nbytes] = part
            done += part.nbytes

    def _rows_around(self, row: int) -> range:
        if not self._shape:
            return range(1)
        step = self._array.chunks[0]
        count = step * max(1, ROWS_BYTES // (step * self._row_bytes))
        start = row // step * step
        return range(start, min(start + count, self._shape[0]))

    def _read(self, row: int) -> None:
        import numpy as np

        rows = self._rows_around(row)
        try:
            found = self._array[rows.start : rows.stop] if self._shape else self._array[...]
        except Exception as error:  # codecs end in errors of their own
            raise FormatError(f"{self._what} cannot be read: {type(error).__name__}: {error}") from error
        self._rows = rows
        little = np.ascontiguousarray(found)
        if little.dtype.byteorder == ">":
            little = little.astype(little.dtype.newbyteorder("<"))
        self._bytes = memoryview(little.reshape(-1).view(np.uint8).data)


class ZarrGroup(Foreign):
    """Its files may be many, so each is open only while it is read by itself."""

    def __init__(self, path: Path, tensors: Mapping[str, SourceTensor], metadata: Mapping[str, str]) -> None:
        super().__init__("zarr", path, tensors, [], metadata)
        self._facts = self._look()

    def _look(self) -> dict[str, tuple[int, int]]:
        found = {}
        for folder, _, names in os.walk(self.path):
            for name in sorted(names):
                facts = os.stat(os.path.join(folder, name))
                found[os.path.relpath(os.path.join(folder, name), self.path)] = facts.st_size, facts.st_mtime_ns
        return found

    @property
    def files_nbytes(self) -> int:
        return sum(nbytes for nbytes, _ in self._facts.values())

    def digests(self, read: Callable[[int], None] | None = None) -> Iterator[tuple[str, int, str]]:
        for name in sorted(self._facts):
            file = LocalFile(self.path / name, name)
            try:
                yield name, file.nbytes, file.digest(read)
            finally:
                file.close()

    def changed(self) -> str | None:
        now = self._look()
        return next((name for name in sorted(now.keys() | self._facts) if now.get(name) != self._facts.get(name)), None)


def open_zarr(path: Path) -> Foreign:
    """``InvalidInput`` without ``ckptfmt[zarr]``, ``FormatError`` for what zarr cannot open, ``UnsupportedValue``
    naming an array of text, of dates or of records. Chunks that are not there are the fill value, as in every Zarr."""
    from ckptfmt.views.zarr import require_zarr

    require_zarr()
    import zarr

    from ckptfmt.views.zarr_dtypes import register

    register()
    try:
        root = zarr.open_group(os.fspath(path), mode="r", zarr_format=3)
        members = dict(root.members(max_depth=None))
    except Exception as error:
        raise FormatError(f"{path} is no Zarr v3 group that can be opened: {type(error).__name__}: {error}") from error
    tensors: dict[str, SourceTensor] = {}
    for place, member in sorted(members.items()):
        if isinstance(member, zarr.Array):
            name = place.replace("/", ".")
            if name in tensors:
                raise FormatError(f"{path}: two arrays would be called {name!r}")
            tensors[name] = _tensor(member, name, path)
    return ZarrGroup(path, tensors, _attributes(root))


def _tensor(array: Any, name: str, path: Path) -> SourceTensor:
    word = from_numpy(array.dtype)
    if word is None:
        raise UnsupportedValue(f"{path}: array {name!r} of {array.dtype} has no place in the format")
    box = SourceBox((0,) * array.ndim, array.shape, _ArrayBytes(array, name, path, dtype(word).itemsize))
    return SourceArray(name, word, array.shape, (box,), f"{array.path}/zarr.json")


def _attributes(root: Any) -> dict[str, str]:
    import json

    return {str(key): value if isinstance(value, str) else json.dumps(value) for key, value in root.attrs.items()}
