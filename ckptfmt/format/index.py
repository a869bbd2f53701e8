"""Looking tensors up by name in a validated manifest."""

from __future__ import annotations

import difflib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from operator import mul

import msgspec

from ckptfmt.errors import NotFound
from ckptfmt.format.boxes import Extent
from ckptfmt.format.checksum import DIGEST_BYTES
from ckptfmt.format.dtypes import dtype
from ckptfmt.format.manifest import Manifest
from ckptfmt.format.naming import ranks_shown
from ckptfmt.format.tables import Kind, PackRow, itemsizes


class StoredBox(msgspec.Struct, frozen=True, gc=False):
    """Where one box lies. ``offset`` is absolute in the pack; ``digests`` has 16 bytes for each chunk."""

    start: Extent
    size: Extent
    pack: PackRow
    pack_index: int
    offset: int
    nbytes: int
    digests: tuple[bytes, ...]


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """One stored tensor. ``rank`` is -1 unless ``kind`` is ``per_rank``. ``nbytes`` counts all of its boxes."""

    name: str
    kind: Kind
    rank: int
    dtype: str
    shape: Extent
    nbytes: int
    boxes: tuple[StoredBox, ...]


class Index:
    """The tensors of one manifest by every name they were saved under.

    Iterating yields the stored names in order, aliases left out. Entries are made when asked for. Who works on
    thousands of tensors takes ``row`` and the columns: those of the manifest's tables, by row, and ``first_box``
    and ``box_bytes`` here.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._entries: dict[int, TensorEntry] = {}

    @cached_property
    def _last(self) -> dict[str, int]:
        names = self.manifest.tensors.name
        return dict(zip(names, range(len(names)), strict=True))

    @cached_property
    def _several(self) -> dict[str, list[int]]:
        """The rows of names that stand more than once, for each rank its own."""
        found: dict[str, list[int]] = {}
        names = self.manifest.tensors.name
        if len(self._last) != len(names):
            for i, name in enumerate(names):
                if self._last[name] != i or name in found:
                    found.setdefault(name, []).append(i)
        return found

    def __len__(self) -> int:
        return len(self._last)

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def __contains__(self, name: object) -> bool:
        return name in self._last or name in self.manifest.aliases

    def canonical(self, name: str) -> str:
        """Return the name under which ``name`` is stored: itself, unless an alias. ``NotFound`` with near names."""
        if name in self._last:
            return name
        stored = self.manifest.aliases.get(name)
        if stored is None or stored not in self._last:
            near = difflib.get_close_matches(name, [*self._last, *self.manifest.aliases], n=5, cutoff=0.5)
            hint = f"; near names: {', '.join(map(repr, near))}" if near else f"; it has {len(self._last)} tensors"
            raise NotFound(f"generation {self.manifest.key} has no tensor {name!r}{hint}")
        return stored

    def row(self, name: str, rank: int | None = None) -> int:
        """Return the row, in the manifest's table, of the tensor called ``name``; for a per-rank one, that of
        ``rank`` (None: of the only one).

        ``NotFound`` if there is no such tensor, or not for this rank.
        """
        row = self._last.get(name)
        if row is None:
            row = self._last[self.canonical(name)]
        if rank is None and not self._several:
            return row
        owner = self.manifest.tensors.rank
        if owner[row] == -1 or (rank is None and self._rows(row) == [row]):
            return row
        rows = self._rows(row)
        ranks = [owner[i] for i in rows]
        if rank not in ranks:
            other = "" if rank is None else f", not by {rank}"
            raise NotFound(
                f"tensor {name!r} of generation {self.manifest.key} is kept by {ranks_shown(ranks)}, each for itself"
                f"{other}: load(rank=..., keys=...) builds that of one"
            )
        return rows[ranks.index(rank)]

    def _rows(self, row: int) -> list[int]:
        """All rows of the name that stands in ``row``."""
        return self._several.get(self.manifest.tensors.name[row]) or [row]

    def rows(self, name: str) -> list[int]:
        """Return the rows of all tensors called ``name``: one, or one for each rank that keeps its own."""
        return self._rows(self._last[self.canonical(name)])

    def entries(self, name: str) -> list[TensorEntry]:
        """Return the tensors of ``rows``."""
        return [self.entry(i) for i in self.rows(name)]

    def entry(self, row: int) -> TensorEntry:
        """Return the tensor in row ``row`` of the manifest's table. Made once."""
        found = self._entries.get(row)
        if found is None:
            found = self._entries[row] = self._make(row)
        return found

    @cached_property
    def first_box(self) -> Sequence[int]:
        """The boxes of tensor row i are rows ``first_box[i]`` up to ``first_box[i + 1]`` of the manifest's boxes."""
        at = self.manifest.boxes.tensor
        rows = range(len(self.manifest.tensors.name))
        if at == list(rows):
            return range(len(rows) + 1)  # one box each
        return [bisect_left(at, row) for row in range(len(rows) + 1)]

    @cached_property
    def box_bytes(self) -> list[int]:
        """Bytes of every box row."""
        tensors, boxes = self.manifest.tensors, self.manifest.boxes
        of_tensor = list(itemsizes(tensors))
        return [n * of_tensor[i] for n, i in zip(map(prod, boxes.size), boxes.tensor, strict=True)]

    @cached_property
    def tensor_bytes(self) -> list[int]:
        """Bytes of every tensor row: those of its boxes, which tile it."""
        tensors = self.manifest.tensors
        return list(map(mul, map(prod, tensors.shape), itemsizes(tensors)))

    def boxes_of(self, row: int) -> range:
        """The box rows of tensor row ``row``."""
        at = self.manifest.boxes.tensor
        return range(bisect_left(at, row), bisect_right(at, row))

    def bytes_of(self, box: int) -> int:
        """Bytes of one box row."""
        tensors, boxes = self.manifest.tensors, self.manifest.boxes
        return prod(boxes.size[box]) * dtype(tensors.dtype[boxes.tensor[box]]).itemsize

    def digests(self, box: int) -> tuple[bytes, ...]:
        """Return the digests of the chunks of box row ``box``, 16 bytes each."""
        raw = bytes.fromhex(self.manifest.boxes.digests[box])
        if len(raw) == DIGEST_BYTES:
            return (raw,)
        return tuple([raw[k : k + DIGEST_BYTES] for k in range(0, len(raw), DIGEST_BYTES)])

    def _make(self, row: int) -> TensorEntry:
        tensors, boxes = self.manifest.tensors, self.manifest.boxes
        stored = []
        for j in self.boxes_of(row):
            at = boxes.pack[j]
            place = (self.manifest.packs[at], at, boxes.offset[j], self.bytes_of(j))
            stored.append(StoredBox(boxes.start[j], boxes.size[j], *place, self.digests(j)))
        return TensorEntry(
            tensors.name[row],
            tensors.kind[row],
            tensors.rank[row],
            tensors.dtype[row],
            tensors.shape[row],
            sum(box.nbytes for box in stored),
            tuple(stored),
        )
