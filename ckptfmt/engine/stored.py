"""The tensors of an opened generation as readers work on them: their boxes say which object holds each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise, repeat
from typing import Final

import msgspec

from ckptfmt.engine.read import StoredBox
from ckptfmt.format.boxes import Extent
from ckptfmt.format.index import Index
from ckptfmt.format.tables import Kind


class Stored(msgspec.Struct, frozen=True, gc=False):
    """One stored tensor. ``rank`` is -1 unless ``kind`` is ``per_rank``. ``nbytes`` counts all of its boxes."""

    name: str
    kind: Kind
    rank: int
    dtype: str
    shape: Extent
    nbytes: int
    boxes: tuple[StoredBox, ...]


_FEW: Final = 100
"""Who asks for more tensors than this will ask for most: then all are made at once, at a fifth of the cost of each."""


class StoredTensors:
    """The tensors of a manifest as ``Stored``, made when asked for. ``keys`` are the object keys of its packs."""

    def __init__(self, index: Index, keys: Sequence[str]) -> None:
        self._index = index
        self._keys = keys
        self._rows: dict[int, Stored] = {}
        self._by_name: dict[str, Stored] = {}
        """Those that belong to no single rank."""

    def find(self, name: str, rank: int | None) -> Stored:
        """The tensor called ``name``; ``NotFound`` as ``Index.row`` raises it."""
        found = self._by_name.get(name)
        return self._find(name, rank) if found is None else found

    def _find(self, name: str, rank: int | None) -> Stored:
        row = self._index.row(name, rank)
        found = self._rows.get(row)
        if found is None:
            found = self.all[row] if len(self._rows) >= _FEW else self._make(row)
            self._rows[row] = found
        if found.rank < 0:
            self._by_name[name] = found
        return found

    @cached_property
    def all(self) -> Sequence[Stored]:
        """Every row, in order."""
        table = self._index.manifest.tensors
        boxes, first = self._boxes(), self._index.first_box
        groups: list[tuple[StoredBox, ...]]
        if isinstance(first, range):
            groups, nbytes = list(zip(boxes, strict=True)), self._index.box_bytes
        else:
            groups = [tuple(boxes[start:stop]) for start, stop in pairwise(first)]
            nbytes = [sum([box.nbytes for box in group]) for group in groups]
        rows = list(map(Stored, table.name, table.kind, table.rank, table.dtype, table.shape, nbytes, groups))
        self._rows = dict(enumerate(rows))
        self._by_name = {row.name: row for row in rows if row.rank < 0}
        return rows

    def _boxes(self) -> list[StoredBox]:
        manifest = self._index.manifest
        table, names = manifest.boxes, manifest.tensors.name
        pack_bytes = [pack.nbytes for pack in manifest.packs]
        columns = (
            [names[row] for row in table.tensor],
            table.start,
            table.size,
            [self._keys[pack] for pack in table.pack],
            [pack_bytes[pack] for pack in table.pack],
            table.offset,
            self._index.box_bytes,
            self._digests(),
            repeat(manifest.chunk_bytes),
        )
        return list(map(StoredBox, *columns))

    def _digests(self) -> Iterator[tuple[bytes, ...]]:
        return map(self._index.digests, range(len(self._index.manifest.boxes.digests)))

    def _make(self, row: int) -> Stored:
        entry, chunk_bytes = self._index.entry(row), self._index.manifest.chunk_bytes
        boxes = [
            StoredBox(
                tensor=entry.name,
                start=box.start,
                size=box.size,
                pack=self._keys[box.pack_index],
                pack_bytes=box.pack.nbytes,
                offset=box.offset,
                nbytes=box.nbytes,
                digests=box.digests,
                chunk_bytes=chunk_bytes,
            )
            for box in entry.boxes
        ]
        return Stored(entry.name, entry.kind, entry.rank, entry.dtype, entry.shape, entry.nbytes, tuple(boxes))
