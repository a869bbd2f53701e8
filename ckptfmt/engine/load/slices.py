"""Reading a slice of one stored tensor: only the chunks that it touches, each verified."""

from __future__ import annotations

from typing import Any

from ckptfmt.engine.arena import PAGE, map_memory
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.plan import align_down, align_up
from ckptfmt.engine.read import StoredBox, check_chunk
from ckptfmt.engine.stored import Stored
from ckptfmt.engine.transfer import IO_THREADS, run_all
from ckptfmt.format import boxes
from ckptfmt.format.dtypes import dtype
from ckptfmt.ports.arrays import ArrayFamily, LeafSpec


def read_slice(
    opened: Opened,
    entry: Stored,
    start: tuple[int, ...],
    size: tuple[int, ...],
    family: ArrayFamily,
    *,
    device: Any | None,
    verify: bool,
) -> Any:
    """Return the box (start, size) of a tensor as a new value."""
    width = dtype(entry.dtype).itemsize
    nbytes = boxes.volume(size) * width
    host = map_memory(nbytes)[:nbytes]
    if nbytes:
        for box in entry.boxes:
            common = boxes.intersect((start, size), (box.start, box.size))
            if common is not None:
                _copy_common(opened, box, common, (start, size), host, width, verify)
    spec = LeafSpec(entry.dtype, size, (0,) * len(size), size, nbytes, entry.kind)
    return family.build(spec, host, (), device)


def _copy_common(
    opened: Opened, box: StoredBox, common: boxes.Box, wanted: boxes.Box, host: memoryview, width: int, verify: bool
) -> None:
    """Copy what a stored box shares with the wanted one; both sides as byte ranges of equal total length."""
    at, extent = common
    source = boxes.byte_ranges(box.size, tuple(a - s for a, s in zip(at, box.start, strict=True)), extent, width)
    target = boxes.byte_ranges(wanted[1], tuple(a - s for a, s in zip(at, wanted[0], strict=True)), extent, width)
    chunks = _read_chunks(opened, box, source, verify)
    goal = iter(target)
    into, room = next(goal)
    for offset, length in source:
        while length:
            take = min(length, room, box.chunk_bytes - offset % box.chunk_bytes)
            inner = offset % box.chunk_bytes
            host[into : into + take] = chunks[offset // box.chunk_bytes][inner : inner + take]
            offset, length, into, room = offset + take, length - take, into + take, room - take
            if not room:
                into, room = next(goal, (0, 0))


def _read_chunks(opened: Opened, box: StoredBox, ranges: list[tuple[int, int]], verify: bool) -> dict[int, memoryview]:
    """The chunks of a box that ``ranges`` touch, by number."""
    numbers = sorted(
        {
            number
            for offset, length in ranges
            for number in range(offset // box.chunk_bytes, (offset + length - 1) // box.chunk_bytes + 1)
        }
    )
    chunks: dict[int, memoryview] = {}

    def read(number: int) -> None:
        inner = number * box.chunk_bytes
        nbytes = min(box.chunk_bytes, box.nbytes - inner)
        offset = box.offset + inner
        begin, stop = align_down(offset), min(align_up(offset + nbytes), box.pack_bytes)
        window = map_memory(stop - begin + PAGE)[: stop - begin]
        opened.site.backend.read_into(box.pack, begin, window)
        data = window[offset - begin : offset - begin + nbytes]
        if verify:
            check_chunk(box, number, offset, data)
        chunks[number] = data

    run_all([lambda n=n: read(n) for n in numbers], threads=IO_THREADS, name="ckptfmt-read")  # type: ignore[misc]
    return chunks
