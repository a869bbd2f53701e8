"""Filling live tensors through a small window: for ``atomic=False``, where the state must not be held twice."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfmt.engine.arena import PAGE, map_memory
from ckptfmt.engine.load.decisions import Fill
from ckptfmt.engine.load.filling import Filling, takes_all
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.plan import WINDOW_BYTES
from ckptfmt.engine.read_plan import StoredBox
from ckptfmt.engine.touch import address_of
from ckptfmt.engine.transfer import copy_memory, run_all
from ckptfmt.engine.units import align_down, align_up
from ckptfmt.format import checksum


def fill_through_window(opened: Opened, fills: Sequence[Fill], changed: list[str]) -> int:
    """Fill tensor by tensor, and return how many bytes were read for that. ``changed`` gets the path of each tensor
    into which bytes were put.

    Dense host tensors take verified chunks one by one through a window of one chunk a thread; for others (strided, on
    a device, cast, or put together from parts of stored boxes) what they need is read first, for those of one stored
    tensor at a time: each of its chunks once.
    """
    read_bytes = 0
    with opened.noting_damage():
        for together in _by_stored(fills):
            first = together[0]
            address = _dense_address(first)
            if address is None:
                read_bytes += _fill_at_once(opened, together, changed)
                continue
            try:
                read_bytes += _fill_dense(opened, first.row.boxes[0], address, first.path, changed)
            finally:
                first.family.wrote_to([first.value])
    return read_bytes


def _by_stored(fills: Sequence[Fill]) -> list[list[Fill]]:
    """Those that take the same stored tensor together, those that go through the window by themselves."""
    groups: list[list[Fill]] = []
    of_row: dict[tuple[str, int], list[Fill]] = {}
    for fill in fills:
        if not fill.row.nbytes:
            continue
        row = (fill.row.name, fill.row.rank)
        if _dense_address(fill) is not None:
            groups.append([fill])
        elif row in of_row:
            of_row[row].append(fill)
        else:
            of_row[row] = [fill]
            groups.append(of_row[row])
    return groups


def _dense_address(fill: Fill) -> int | None:
    """Where the whole of one stored box goes as it is; None where more is to be done."""
    return None if fill.cast or not takes_all(fill) else fill.family.host_address(fill.value)


def _fill_dense(opened: Opened, box: StoredBox, address: int, path: str, changed: list[str]) -> int:
    spans = list(enumerate(checksum.chunk_spans(box.nbytes, box.chunk_bytes)))
    window_bytes = align_up(min(box.chunk_bytes, box.nbytes)) + 2 * PAGE
    workers = max(1, min(opened.nearest.threads([box.pack]), len(spans), WINDOW_BYTES // window_bytes))
    windows = [map_memory(window_bytes) for _ in range(workers)]

    def work(number: int) -> None:
        for index, (inner, nbytes) in spans[number::workers]:
            offset = box.offset + inner
            start, stop = align_down(offset), min(align_up(offset + nbytes), box.pack_bytes)
            window = windows[number][: stop - start]
            opened.nearest.fill(box.pack, start, window, [(box, index, offset, nbytes)])
            data = window[offset - start : offset - start + nbytes]
            _note(path, changed)
            copy_memory([(address + inner, address_of(data), nbytes)])

    run_all([lambda n=n: work(n) for n in range(workers)], threads=workers, name="ckptfmt-read")  # type: ignore[misc]
    return box.nbytes


def _fill_at_once(opened: Opened, fills: Sequence[Fill], changed: list[str]) -> int:
    filling = Filling(fills)
    memory = filling.read(opened)
    for fill in fills:
        if 0 not in fill.size:
            _note(fill.path, changed)
    filling.fill(memory)
    return filling.read_bytes


def _note(path: str, changed: list[str]) -> None:
    if path not in changed:
        changed.append(path)
