"""Looking tensors up by name in a validated manifest."""

from __future__ import annotations

import difflib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from math import prod

import msgspec

from ckptfmt.errors import NotFound
from ckptfmt.format.boxes import Extent
from ckptfmt.format.checksum import DIGEST_BYTES
from ckptfmt.format.dtypes import dtype
from ckptfmt.format.manifest import Manifest
from ckptfmt.format.tables import Kind, PackRow


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

    Iterating yields the stored names in order, aliases left out. Entries are made when asked for.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._entries: dict[int, TensorEntry] = {}
        self._rows: dict[str, list[int]] = {}
        for i, name in enumerate(manifest.tensors.name):
            self._rows.setdefault(name, []).append(i)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in self.manifest.aliases

    def canonical(self, name: str) -> str:
        """Return the name under which ``name`` is stored: itself, unless an alias. ``NotFound`` with near names."""
        stored = self.manifest.aliases.get(name, name)
        if stored not in self._rows:
            near = difflib.get_close_matches(name, [*self._rows, *self.manifest.aliases], n=5, cutoff=0.5)
            hint = f"; near names: {', '.join(map(repr, near))}" if near else f"; it has {len(self._rows)} tensors"
            raise NotFound(f"generation {self.manifest.key} has no tensor {name!r}{hint}")
        return stored

    def find(self, name: str, rank: int | None = None) -> TensorEntry:
        """Return the tensor called ``name``; for a per-rank one, that of ``rank`` (None: of the only one).

        ``NotFound`` if there is no such tensor, or not for this rank.
        """
        rows = self._rows.get(name) or self._rows[self.canonical(name)]
        if len(rows) == 1 and (rank is None or self.manifest.tensors.rank[rows[0]] == -1):
            return self.entry(rows[0])
        ranks = [self.manifest.tensors.rank[i] for i in rows]
        if rank not in ranks:
            raise NotFound(
                f"tensor {name!r} of generation {self.manifest.key} is kept for each of the ranks {ranks[:8]}, not for "
                f"{rank}: name one of them"
            )
        return self.entry(rows[ranks.index(rank)])

    def entries(self, name: str) -> list[TensorEntry]:
        """Return all tensors called ``name``: one, or one for each rank that keeps its own."""
        return [self.entry(i) for i in self._rows[self.canonical(name)]]

    def entry(self, row: int) -> TensorEntry:
        """Return the tensor in row ``row`` of the manifest's table. Made once."""
        found = self._entries.get(row)
        if found is None:
            found = self._entries[row] = self._make(row)
        return found

    def _make(self, row: int) -> TensorEntry:
        tensors, boxes = self.manifest.tensors, self.manifest.boxes
        width = dtype(tensors.dtype[row]).itemsize
        stored = []
        for j in range(bisect_left(boxes.tensor, row), bisect_right(boxes.tensor, row)):
            raw = bytes.fromhex(boxes.digests[j])
            digests = tuple([raw[k : k + DIGEST_BYTES] for k in range(0, len(raw), DIGEST_BYTES)])
            at = boxes.pack[j]
            nbytes = prod(boxes.size[j]) * width
            stored.append(
                StoredBox(boxes.start[j], boxes.size[j], self.manifest.packs[at], at, boxes.offset[j], nbytes, digests)
            )
        return TensorEntry(
            tensors.name[row],
            tensors.kind[row],
            tensors.rank[row],
            tensors.dtype[row],
            tensors.shape[row],
            sum(box.nbytes for box in stored),
            tuple(stored),
        )
