"""Filling live tensors through a small window: for ``atomic=False``, where the state must not be held twice."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfmt.engine.arena import PAGE, map_memory
from ckptfmt.engine.load.decisions import Fill
from ckptfmt.engine.load.filling import Filling, takes_all
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.plan import align_down, align_up
from ckptfmt.engine.read import StoredBox, check_chunk
from ckptfmt.engine.touch import address_of
from ckptfmt.engine.transfer import IO_THREADS, copy_memory, run_all
from ckptfmt.format import checksum


def fill_through_window(opened: Opened, fills: Sequence[Fill], changed: list[str]) -> None:
    """Fill tensor by tensor. ``changed`` gets the path of each tensor into which bytes were put.

    Dense host tensors take verified chunks one by one through a window of one chunk a thread; for others (strided, on
    a device, cast, or put together from parts of stored boxes) what they need is read first, for one at a time.
    """
    for fill in fills:
        if not fill.row.nbytes:
            continue
        address = None if fill.cast or not takes_all(fill) else fill.family.host_address(fill.value)
        if address is None:
            _fill_at_once(opened, fill, changed)
            continue
        try:
            _fill_dense(opened, fill.row.boxes[0], address, fill.path, changed)
        finally:
            fill.family.wrote_to([fill.value])


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
            _note(path, changed)
            copy_memory([(address + inner, address_of(data), nbytes)])

    run_all([lambda n=n: work(n) for n in range(workers)], threads=workers, name="ckptfmt-read")  # type: ignore[misc]


def _fill_at_once(opened: Opened, fill: Fill, changed: list[str]) -> None:
    filling = Filling([fill])
    memory = filling.read(opened)
    if filling.nbytes:
        _note(fill.path, changed)
        filling.fill(memory)


def _note(path: str, changed: list[str]) -> None:
    if path not in changed:
        changed.append(path)
