"""What a copy of a pack goes by: its spans, each to the end of a chunk, with the digests of what is in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ckptfmt.engine.read_plan import StoredBox
from ckptfmt.engine.transfer import IO_BYTES
from ckptfmt.engine.units import align_down
from ckptfmt.format import checksum
from ckptfmt.format.dtypes import dtype
from ckptfmt.format.manifest import Shared
from ckptfmt.format.tables import PackRow


@dataclass(frozen=True)
class Span:
    """Bytes ``start`` to ``stop`` of a pack, handed on at once, and the chunks that begin in them.

    They are read up to ``end``: the last chunk may reach past ``stop``, by less than a page.
    """

    start: int
    stop: int
    end: int
    chunks: tuple[tuple[StoredBox, int, int, int], ...]
    """(box, chunk number, offset in the pack, bytes)"""


@dataclass(frozen=True)
class PackToCopy:
    """A pack, as a part or a manifest tells of it."""

    row: PackRow
    spans: tuple[Span, ...]


def packs_to_copy(told: Shared, rank: int | None = None) -> list[PackToCopy]:
    """The packs that lie in the generation's own folder: all of them, or those that ``rank`` wrote."""
    chosen = {
        index: row
        for index, row in enumerate(told.packs)
        if row.generation is None and (rank is None or row.rank == rank)
    }
    boxes: dict[int, list[StoredBox]] = defaultdict(list)
    table, names = told.boxes, told.tensors.name
    widths = [dtype(name).itemsize for name in told.tensors.dtype]
    for box, pack in enumerate(table.pack):
        if pack in chosen:
            tensor = table.tensor[box]
            boxes[pack].append(
                StoredBox(
                    tensor=names[tensor],
                    start=table.start[box],
                    size=table.size[box],
                    pack=chosen[pack].name,
                    pack_bytes=chosen[pack].nbytes,
                    offset=table.offset[box],
                    nbytes=prod(table.size[box]) * widths[tensor],
                    digests=_digests(table.digests[box]),
                    chunk_bytes=told.chunk_bytes,
                )
            )
    return [PackToCopy(row, tuple(_spans(row, boxes[index]))) for index, row in chosen.items()]


def _digests(joined: str) -> tuple[bytes, ...]:
    raw = bytes.fromhex(joined)
    return tuple(raw[at : at + checksum.DIGEST_BYTES] for at in range(0, len(raw), checksum.DIGEST_BYTES))


def _spans(row: PackRow, boxes: Sequence[StoredBox]) -> Iterator[Span]:
    """Cut a pack at whole pages into ranges of about ``IO_BYTES``, none of which cuts a chunk but within a page."""
    start, chunks = 0, []
    while row.header_bytes - start >= IO_BYTES:
        yield Span(start, start + IO_BYTES, start + IO_BYTES, ())
        start += IO_BYTES
    for box in sorted(boxes, key=lambda box: box.offset):
        for number, (inner, nbytes) in enumerate(checksum.chunk_spans(box.nbytes, box.chunk_bytes)):
            chunks.append((box, number, box.offset + inner, nbytes))
            end = box.offset + inner + nbytes
            stop = align_down(end)
            if stop - start >= IO_BYTES:
                yield Span(start, stop, end, tuple(chunks))
                start, chunks = stop, []
    if start < row.nbytes:
        yield Span(start, row.nbytes, row.nbytes, tuple(chunks))
