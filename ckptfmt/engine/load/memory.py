"""Host memory that stored bytes were read into, or in which the page cache shows them."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable

from ckptfmt.engine.arena import map_memory
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.read import read_regions, show_regions, verify_shown
from ckptfmt.engine.read_plan import ReadPlan, StoredBox, plan_reads
from ckptfmt.engine.touch import address_of
from ckptfmt.errors import BackendError, Corrupt

log = logging.getLogger("ckptfmt")


class Memory:
    """The bytes of boxes, or of runs of their chunks, each as it lies in its pack."""

    def __init__(self, plan: ReadPlan, memory: memoryview) -> None:
        self._memory = memory
        self._base = address_of(memory)
        self._packs: dict[str, tuple[list[int], list[int]]] = {}
        """For each pack the offsets of its regions, and how far from them their bytes lie in memory."""
        for region in plan.regions:
            starts, shifts = self._packs.setdefault(region.pack, ([], []))
            starts.append(region.start)
            shifts.append(region.memory_offset - region.start)

    def address(self, pack: str, offset: int) -> int:
        """Where a byte of ``pack`` that was read lies as long as this memory is held."""
        starts, shifts = self._packs[pack]
        return self._base + offset + shifts[bisect_right(starts, offset) - 1]

    def view(self, pack: str, offset: int, nbytes: int) -> memoryview:
        """Bytes that were read: a range of one box or of one run of chunks."""
        at = self.address(pack, offset) - self._base
        return self._memory[at : at + nbytes]


def read_boxes(
    opened: Opened,
    boxes: Iterable[StoredBox],
    *,
    verify: bool = True,
    memory: Callable[[int], memoryview] = map_memory,
) -> Memory:
    """Read ``boxes``, no byte of which may be wanted twice."""
    plan = plan_reads(boxes, opened.nearest.gap_bytes)
    target = memory(plan.memory_bytes) if plan.memory_bytes else memoryview(bytearray())
    with opened.noting_damage():
        read_regions(opened.nearest, plan, target, verify=verify)
    return Memory(plan, target)


def show_boxes(opened: Opened, boxes: Iterable[StoredBox]) -> Memory | None:
    """``boxes``, verified, where the host has their bytes and keeps them: only to be copied from. None: read them."""
    plan = plan_reads(boxes)
    shown = show_regions(opened.nearest, plan)
    if shown is None:
        return None
    try:
        verify_shown(plan, shown)
    except (BackendError, Corrupt) as error:
        log.info("%s: what the page cache held cannot be used: %s", opened.name, error)
        return None  # reading it says what is wrong with it, or finds it elsewhere
    for region in plan.regions:
        opened.nearest.shown(region.pack, sum(box.nbytes for box in region.boxes))
    return Memory(plan, shown.memory)
