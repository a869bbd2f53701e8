"""Reading packs: ranges into aligned memory on several threads, every chunk compared with its digest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from ckptfmt.engine.arena import map_memory
from ckptfmt.engine.rereading import read_whole
from ckptfmt.engine.touch import touched_ahead
from ckptfmt.engine.transfer import IO_BYTES, IO_THREADS, run_all
from ckptfmt.engine.units import align_down, align_up
from ckptfmt.errors import Corrupt
from ckptfmt.format import checksum
from ckptfmt.format.tables import PackRow
from ckptfmt.ports.backend import Backend, CachedRange

if TYPE_CHECKING:
    from ckptfmt.engine.nearest import Nearest

GAP_BYTES: Final = 64 << 10
"""Wanted boxes closer than this are read through: one request costs more than the bytes between."""
_SHOWN_BYTES_MIN = 8 << 20
"""Less is read as fast as it is mapped."""
_SHOWN_REGIONS_MAX = 256
"""Each is a mapping of its own."""


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


@dataclass(frozen=True)
class Shown:
    """Memory in which regions lie as in a ``ReadPlan``, not to be written to, and the mappings behind it."""

    memory: memoryview
    ranges: tuple[CachedRange, ...]


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


def show_regions(nearest: Nearest, plan: ReadPlan) -> Shown | None:
    """Show all regions of ``plan`` without a copy, where the host has every byte of them in memory already.

    For bytes that are only copied from: nobody may write to that memory.
    """
    if plan.memory_bytes < _SHOWN_BYTES_MIN or len(plan.regions) > _SHOWN_REGIONS_MAX:
        return None
    memory = map_memory(plan.memory_bytes)
    ranges = []
    for region in plan.regions:
        place = memory[region.memory_offset : region.memory_offset + region.stop - region.start]
        found = nearest.map_cached(region.pack, region.start, place)
        if found is None:
            return None
        ranges.append(found)
    return Shown(memory, tuple(ranges))


def verify_shown(plan: ReadPlan, shown: Shown) -> None:
    """Bring all regions in, to stay, and compare every chunk. Raises as ``read_regions`` does."""

    def check(region: Region, pages: CachedRange, unit: ReadUnit) -> None:
        pages.pin(unit.start - region.start, unit.stop - region.start)
        _check_unit(region, unit, shown.memory)

    tasks = [
        lambda region=region, pages=pages, unit=unit: check(region, pages, unit)
        for region, pages in zip(plan.regions, shown.ranges, strict=True)
        for unit in read_units(region)
    ]
    run_all(tasks, threads=IO_THREADS, name="ckptfmt-read")


def read_regions(
    nearest: Nearest,
    plan: ReadPlan,
    memory: memoryview,
    *,
    verify: bool = True,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill ``memory``. The first chunk that is damaged wherever it lies raises ``Corrupt`` naming tensor, object and
    offset.

    ``progress`` is called from worker threads with the bytes of each finished unit.
    """

    def read(region: Region, unit: ReadUnit) -> None:
        at = region.memory_offset - region.start
        nearest.fill(region.pack, unit.start, memory[at + unit.start : at + unit.stop], unit.chunks, verify=verify)
        if progress is not None:
            progress(sum(nbytes for *_, nbytes in unit.chunks))

    tasks = [
        lambda region=region, unit=unit: read(region, unit) for region in plan.regions for unit in read_units(region)
    ]
    threads = nearest.threads({region.pack for region in plan.regions})
    with touched_ahead(memory[: plan.memory_bytes]):
        run_all(tasks, threads=threads, name="ckptfmt-read")


def _check_unit(region: Region, unit: ReadUnit, memory: memoryview) -> None:
    at = region.memory_offset - region.start
    for box, number, offset, nbytes in unit.chunks:
        check_chunk(box, number, offset, memory[at + offset : at + offset + nbytes])


def read_units(region: Region) -> list[ReadUnit]:
    """Cut a region between chunks into reads of about ``IO_BYTES``."""
    shares: list[tuple[Chunk, ...]] = []
    chunks: list[Chunk] = []
    begin = region.start
    for box in region.boxes:
        whole = box.nbytes <= box.chunk_bytes
        spans = ((0, box.nbytes),) if whole else checksum.chunk_spans(box.nbytes, box.chunk_bytes)
        for number, (inner, nbytes) in enumerate(spans):
            offset = box.offset + inner
            if chunks and offset + nbytes - begin > IO_BYTES:
                shares.append(tuple(chunks))
                chunks, begin = [], offset
            chunks.append((box, number, offset, nbytes))
    if chunks:
        shares.append(tuple(chunks))
    return _rounded(shares, region)


def _rounded(shares: Sequence[tuple[Chunk, ...]], region: Region) -> list[ReadUnit]:
    begins = [share[0][2] for share in shares]
    ends = [share[-1][2] + share[-1][3] for share in shares]
    starts = [align_down(begin) for begin in begins]
    stops = [min(align_up(end), region.stop) for end in ends]
    for number in range(1, len(shares)):
        if stops[number - 1] > starts[number]:  # a page of both
            stops[number - 1], starts[number] = ends[number - 1], begins[number]
    return list(map(ReadUnit, starts, stops, shares))


def check_chunk(box: StoredBox, number: int, offset: int, data: memoryview) -> None:
    """Compare one chunk with its recorded digest."""
    expected = box.digests[number]
    found = checksum.digest(data)
    if found != expected:
        raise Corrupt(
            f"tensor {box.tensor!r}: the bytes at offset {offset} of {box.pack} ({len(data)} bytes) hash to "
            f"{found.hex()}, recorded is {expected.hex()}; run `ckptfmt verify`, then restore an older generation "
            "with at=... or recover the object from a copy",
            object=box.pack,
            tensor=box.tensor,
            offset=offset,
        )


def read_header(backend: Backend, key: str, row: PackRow) -> bytes:
    """The header of the pack that ``row`` tells of, from the object ``key``. ``Corrupt`` unless it has its digest."""

    def read() -> bytes:
        header = bytearray(row.header_bytes)
        backend.read_into(key, 0, memoryview(header))
        found = checksum.hex_digest(header)
        if found != row.header_digest:
            raise Corrupt(
                f"{backend.url}: the header of {key} hashes to {found}, recorded is {row.header_digest}",
                object=key,
                offset=0,
            )
        return bytes(header)

    return read_whole(read)
