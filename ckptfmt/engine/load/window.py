"""Filling live tensors through a small window: for ``atomic=False``, where the state must not be held twice."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfmt.engine.arena import PAGE, map_memory
from ckptfmt.engine.assemble import cut
from ckptfmt.engine.load.build import read_entries
from ckptfmt.engine.load.decisions import Fill
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.plan import align_down, align_up
from ckptfmt.engine.read import StoredBox, check_chunk
from ckptfmt.engine.touch import address_of
from ckptfmt.engine.transfer import IO_THREADS, copy_memory, run_all
from ckptfmt.format import checksum
from ckptfmt.format.boxes import whole


def fill_through_window(opened: Opened, fills: Sequence[Fill], changed: list[str]) -> None:
    """Fill tensor by tensor. ``changed`` gets the path of each tensor into which bytes were put.

    Dense host tensors take verified chunks one by one through a window of one chunk a thread; others (strided, on a
    device, cast, or stored in several boxes) are read whole first, one at a time.
    """
    for fill in fills:
        if not fill.row.nbytes:
            continue
        boxes = fill.row.boxes
        address = None if fill.cast else fill.family.host_address(fill.value)
        if address is not None and len(boxes) == 1 and (fill.start, fill.size) == whole(fill.row.shape):
            try:
                _fill_dense(opened, boxes[0], address, fill.path, changed)
            finally:
                fill.family.wrote_to([fill.value])
        else:
            _fill_whole(opened, fill, changed)


def _fill_dense(opened: Opened, box: StoredBox, address: int, path: str, changed: list[str]) -> None:
    spans = list(enumerate(checksum.chunk_spans(box.nbytes, box.chunk_bytes)))
    workers = min(IO_THREADS, len(spans))
    window_bytes = align_up(min(box.chunk_bytes, box.nbytes)) + 2 * PAGE
    windows = [map_memory(window_bytes) for _ in range(workers)]

    def work(number: int) -> None:
        for index, (inner, nbytes) in spans[number::workers]:
            offset = box.offset + inner
            start, stop = align_down(offset), min(align_up(offset + nbytes), box.pack_bytes)
            window = windows[number][: stop - start]
            opened.site.backend.read_into(box.pack, start, window)
            data = window[offset - start : offset - start + nbytes]
            check_chunk(box, index, offset, data)
            if path not in changed:
                changed.append(path)
            copy_memory([(address + inner, address_of(data), nbytes)])

    run_all([lambda n=n: work(n) for n in range(workers)], threads=workers, name="ckptfmt-read")  # type: ignore[misc]


def _fill_whole(opened: Opened, fill: Fill, changed: list[str]) -> None:
    data = read_entries(opened, [fill.row]).bytes_of(fill.row)
    host = cut(data, fill.row.shape, fill.row.dtype, fill.start, fill.size)
    changed.append(fill.path)
    if fill.cast:
        fill.family.fill_cast(fill.value, fill.row.dtype, host)
    else:
        fill.family.fill([(fill.value, host)]).wait()
