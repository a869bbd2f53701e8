"""The tensors of an opened generation as readers work on them: their boxes say which object holds each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise, repeat
from math import prod
from typing import Final, overload

import msgspec

from ckptfmt.engine.read_plan import StoredBox
from ckptfmt.format.boxes import Box, Extent
from ckptfmt.format.dtypes import dtype
from ckptfmt.format.index import Index
from ckptfmt.format.tables import Kind


class Stored(msgspec.Struct, frozen=True, gc=False):
    """One stored tensor. ``rank`` is -1 unless ``kind`` is ``per_rank``. ``nbytes`` counts all of its boxes, which tile
    it."""

    name: str
    kind: Kind
    rank: int
    dtype: str
    shape: Extent
    nbytes: int
    boxes: Sequence[StoredBox]

    def meeting(self, wanted: Box) -> Sequence[StoredBox]:
        """Its boxes, without most of those that share no element with ``wanted``."""
        return self.boxes.meeting(wanted) if isinstance(self.boxes, ManyBoxes) else self.boxes


class _Boxes:
    """Makes boxes by their row. ``keys`` are the object keys of the packs."""

    def __init__(self, index: Index, keys: Sequence[str]) -> None:
        self._index = index
        self._keys = keys
        self.table = index.manifest.boxes

    def make(self, row: int) -> StoredBox:
        manifest, table = self._index.manifest, self.table
        pack = table.pack[row]
        return StoredBox(
            tensor=manifest.tensors.name[table.tensor[row]],
            start=table.start[row],
            size=table.size[row],
            pack=self._keys[pack],
            pack_bytes=manifest.packs[pack].nbytes,
            offset=table.offset[row],
            nbytes=self._index.bytes_of(row),
            digests=self._index.digests(row),
            chunk_bytes=manifest.chunk_bytes,
        )

    def every(self) -> list[StoredBox]:
        manifest, table = self._index.manifest, self.table
        names = manifest.tensors.name
        pack_bytes = [pack.nbytes for pack in manifest.packs]
        columns = (
            [names[row] for row in table.tensor],
            table.start,
            table.size,
            [self._keys[pack] for pack in table.pack],
            [pack_bytes[pack] for pack in table.pack],
            table.offset,
            self._index.box_bytes,
            map(self._index.digests, range(len(table.digests))),
            repeat(manifest.chunk_bytes),
        )
        return list(map(StoredBox, *columns))


class ManyBoxes(Sequence[StoredBox]):
    """The boxes of a tensor that has several, each made when it is asked for: of a thousand a reader may want one."""

    def __init__(self, source: _Boxes, rows: range) -> None:
        self._source = source
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> StoredBox: ...
    @overload
    def __getitem__(self, at: slice) -> list[StoredBox]: ...
    def __getitem__(self, at: int | slice) -> StoredBox | list[StoredBox]:
        rows = self._rows[at]
        return self._source.make(rows) if isinstance(rows, int) else [self._source.make(row) for row in rows]

    def __iter__(self) -> Iterator[StoredBox]:
        return map(self._source.make, self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ManyBoxes) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def meeting(self, wanted: Box) -> list[StoredBox]:
        """See ``Stored.meeting``: one dimension after the other, so that a box costs next to nothing."""
        starts, sizes = self._source.table.start, self._source.table.size
        rows: Sequence[int] = self._rows
        for axis, (low, count) in enumerate(zip(*wanted, strict=True)):
            high = low + count
            rows = [row for row in rows if starts[row][axis] < high and starts[row][axis] + sizes[row][axis] > low]
        return list(map(self._source.make, rows))


_FEW: Final = 100
"""Who asks for more tensors than this will ask for most: then all are made at once, at a fifth of the cost of each."""


class StoredTensors:
    """The tensors of a manifest as ``Stored``, made when asked for. ``keys`` are the object keys of its packs."""

    def __init__(self, index: Index, keys: Sequence[str]) -> None:
        self._index = index
        self._boxes = _Boxes(index, keys)
        self._rows: dict[int, Stored] = {}
        self._by_name: dict[str, Stored] = {}
        """Those that belong to no single rank."""

    def find(self, name: str, rank: int | None) -> Stored:
        """The tensor called ``name``; ``NotFound`` as ``Index.row`` raises it."""
        found = self._by_name.get(name)
        return self._find(name, rank) if found is None else found

    def _find(self, name: str, rank: int | None) -> Stored:
        found = self.at(self._index.row(name, rank))
        if found.rank < 0:
            self._by_name[name] = found
        return found

    def every(self, name: str) -> list[Stored]:
        """All tensors called ``name``: one, or one for each rank that kept its own. ``NotFound`` if there is none."""
        return list(map(self.at, self._index.rows(name)))

    def at(self, row: int) -> Stored:
        """The tensor in row ``row`` of the manifest's table."""
        found = self._rows.get(row)
        if found is None:
            found = self.all[row] if len(self._rows) >= _FEW else self._make(row)
            self._rows[row] = found
        return found

    @cached_property
    def all(self) -> Sequence[Stored]:
        """Every row, in order."""
        table, first = self._index.manifest.tensors, self._index.first_box
        groups: list[tuple[StoredBox]] | list[Sequence[StoredBox]]
        if isinstance(first, range):
            groups, nbytes = list(zip(self._boxes.every(), strict=True)), self._index.box_bytes
        else:
            groups, nbytes = [self._group(start, stop) for start, stop in pairwise(first)], self._index.tensor_bytes
        rows = list(map(Stored, table.name, table.kind, table.rank, table.dtype, table.shape, nbytes, groups))
        self._rows = dict(enumerate(rows))
        self._by_name = {row.name: row for row in rows if row.rank < 0}
        return rows

    def _group(self, start: int, stop: int) -> Sequence[StoredBox]:
        return (self._boxes.make(start),) if stop == start + 1 else ManyBoxes(self._boxes, range(start, stop))

    def _make(self, row: int) -> Stored:
        table, rows = self._index.manifest.tensors, self._index.boxes_of(row)
        name, shape, width = table.dtype[row], table.shape[row], dtype(table.dtype[row]).itemsize
        boxes = self._group(rows.start, rows.stop)
        return Stored(table.name[row], table.kind[row], table.rank[row], name, shape, prod(shape) * width, boxes)
