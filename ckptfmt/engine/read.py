"""Reading packs: ranges into aligned memory on several threads, every chunk compared with its digest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckptfmt.engine.arena import map_memory
from ckptfmt.engine.read_plan import Chunk, ReadPlan, ReadUnit, Region, StoredBox, read_units
from ckptfmt.engine.rereading import read_whole
from ckptfmt.engine.spans import Span, read_spans, span_bytes
from ckptfmt.engine.touch import touched_ahead
from ckptfmt.engine.transfer import IO_THREADS, Task, run_all
from ckptfmt.errors import Corrupt
from ckptfmt.format import checksum
from ckptfmt.format.tables import PackRow
from ckptfmt.ports.backend import Backend, CachedRange

if TYPE_CHECKING:
    from ckptfmt.engine.nearest import Nearest

_SHOWN_BYTES_MIN = 8 << 20
"""Less is read as fast as it is mapped."""
_SHOWN_REGIONS_MAX = 256
"""Each is a mapping of its own."""


@dataclass(frozen=True)
class Shown:
    """Memory in which regions lie as in a ``ReadPlan``, not to be written to, and the mappings behind it."""

    memory: memoryview
    ranges: tuple[CachedRange, ...]


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


def read_regions(nearest: Nearest, plan: ReadPlan, memory: memoryview, *, verify: bool = True) -> None:
    """Fill ``memory``. The first chunk that is damaged wherever it lies raises ``Corrupt`` naming tensor, object and
    offset.
    """

    def fill(region: Region, start: int, stop: int, chunks: Sequence[Chunk], *, is_read: bool = False) -> None:
        at = region.memory_offset - region.start
        target = memory[at + start : at + stop]
        nearest.fill(region.pack, start, target, chunks, verify=verify, is_read=is_read)

    def read_span(region: Region, span: Span) -> None:
        fill(region, span.start, span.stop, span.chunks)
        for chunk in span.came():
            _, _, offset, nbytes = chunk
            fill(region, offset, offset + nbytes, (chunk,), is_read=True)

    threads = nearest.threads({region.pack for region in plan.regions})
    length = span_bytes(plan.memory_bytes, threads)
    tasks: list[Task] = []
    for region in plan.regions:
        if nearest.is_distant(region.pack):
            tasks += [partial(read_span, region, span) for span in read_spans(region, length)]
        else:
            tasks += [partial(fill, region, unit.start, unit.stop, unit.chunks) for unit in read_units(region)]
    with touched_ahead(memory[: plan.memory_bytes]) as touch:
        run_all(tasks, threads=threads, name="ckptfmt-read", begun=touch)


def _check_unit(region: Region, unit: ReadUnit, memory: memoryview) -> None:
    at = region.memory_offset - region.start
    for box, number, offset, nbytes in unit.chunks:
        check_chunk(box, number, offset, memory[at + offset : at + offset + nbytes])


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
