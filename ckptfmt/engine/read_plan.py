"""Which ranges of packs are read for the boxes that are wanted, and in which requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from ckptfmt.engine.transfer import IO_BYTES
from ckptfmt.engine.units import align_down, align_up
from ckptfmt.format import checksum

GAP_BYTES: Final = 64 << 10
"""Wanted boxes closer than this are read through: one request costs more than the bytes between."""


class StoredBox(msgspec.Struct, frozen=True, gc=False):
    """One box as the manifest records it: where its bytes are, and what they must hash to.

    Where only some of its chunks are read (``run_of``) ``offset``, ``nbytes`` and ``digests`` are those of the chunks.
    """

    tensor: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    pack: str
    """Object key of the pack."""
    pack_bytes: int
    offset: int
    nbytes: int
    digests: tuple[bytes, ...]
    """One for each chunk."""
    chunk_bytes: int


def run_of(box: StoredBox, first: int, stop: int) -> StoredBox:
    """The chunks of ``box`` from number ``first`` up to ``stop``, as something to read."""
    if not first and stop == len(box.digests):
        return box
    inner = first * box.chunk_bytes
    return replace(
        box,
        offset=box.offset + inner,
        nbytes=min(stop * box.chunk_bytes, box.nbytes) - inner,
        digests=box.digests[first:stop],
    )


@dataclass(frozen=True)
class Region:
    """A range of a pack that lies in memory as in the file; ``boxes`` are those wanted from it, by offset."""

    pack: str
    start: int
    stop: int
    memory_offset: int
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class ReadPlan:
    regions: tuple[Region, ...]
    memory_bytes: int
    """Size of the memory that ``read_regions`` fills: aligned regions one after another."""
    wanted_bytes: int


Chunk = tuple[StoredBox, int, int, int]
"""(box, chunk number, file offset, bytes)"""


@dataclass(frozen=True)
class ReadUnit:
    """One read, and the chunks that it completes.

    It is rounded out to whole pages where those are not its neighbour's, too: what one has compared with its digest the
    other must not write over.
    """

    start: int
    stop: int
    chunks: tuple[Chunk, ...]


def plan_reads(boxes: Iterable[StoredBox], gap_bytes: Callable[[str], int] = lambda pack: GAP_BYTES) -> ReadPlan:
    """Gather ``boxes`` into aligned regions, pack by pack. Those closer than ``gap_bytes(pack)`` are one region."""
    by_pack: dict[str, list[StoredBox]] = {}
    for box in boxes:
        if box.nbytes:
            by_pack.setdefault(box.pack, []).append(box)
    regions: list[Region] = []
    memory = wanted = 0
    for pack in sorted(by_pack):
        for group in _grouped(sorted(by_pack[pack], key=lambda box: box.offset), gap_bytes(pack)):
            start = align_down(group[0].offset)
            stop = min(align_up(group[-1].offset + group[-1].nbytes), group[-1].pack_bytes)
            regions.append(Region(pack, start, stop, memory, tuple(group)))
            memory += align_up(stop - start)
            wanted += sum(box.nbytes for box in group)
    return ReadPlan(tuple(regions), memory, wanted)


def _grouped(boxes: Sequence[StoredBox], gap_bytes: int) -> list[list[StoredBox]]:
    groups: list[list[StoredBox]] = []
    end = -1
    for box in boxes:
        if groups and box.offset - end <= gap_bytes:
            groups[-1].append(box)
        else:
            groups.append([box])
        end = box.offset + box.nbytes
    return groups


def read_units(region: Region) -> list[ReadUnit]:
    """Cut a region between chunks into reads of about ``IO_BYTES``."""
    shares: list[tuple[Chunk, ...]] = []
    chunks: list[Chunk] = []
    begin = region.start
    for chunk in chunks_of(region):
        _, _, offset, nbytes = chunk
        if chunks and offset + nbytes - begin > IO_BYTES:
            shares.append(tuple(chunks))
            chunks, begin = [], offset
        chunks.append(chunk)
    if chunks:
        shares.append(tuple(chunks))
    return _rounded(shares, region)


def chunks_of(region: Region) -> Iterator[Chunk]:
    """All chunks that are wanted of a region, by offset."""
    for box in region.boxes:
        whole = box.nbytes <= box.chunk_bytes
        spans = ((0, box.nbytes),) if whole else checksum.chunk_spans(box.nbytes, box.chunk_bytes)
        for number, (inner, nbytes) in enumerate(spans):
            yield box, number, box.offset + inner, nbytes


def _rounded(shares: Sequence[tuple[Chunk, ...]], region: Region) -> list[ReadUnit]:
    begins = [share[0][2] for share in shares]
    ends = [share[-1][2] + share[-1][3] for share in shares]
    starts = [align_down(begin) for begin in begins]
    stops = [min(align_up(end), region.stop) for end in ends]
    for number in range(1, len(shares)):
        if stops[number - 1] > starts[number]:  # a page of both
            stops[number - 1], starts[number] = ends[number - 1], begins[number]
    return list(map(ReadUnit, starts, stops, shares))
