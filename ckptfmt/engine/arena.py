"""Page-aligned host memory that is mapped once and used by every save.

First-touch allocation costs several times the copy itself, so the arena persists between saves. It is
private anonymous memory (a shared mapping gets no huge pages), excluded from forks (a forked
DataLoader worker would make every later write to it a copy-on-write fault).
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ckptfmt.engine.touch import populate
from ckptfmt.errors import CkptError, OutOfSpace

log = logging.getLogger("ckptfmt")

Undo = Callable[[], None]

PAGE: Final = 4096
HUGE_PAGE: Final = 2 << 20


def map_memory(nbytes: int, *, fork: bool = True) -> memoryview:
    """Map ``nbytes`` (rounded up to huge pages where large) of zeroed, page-aligned private memory.

    The memory is unmapped when the last view of it goes away. With ``fork=False`` child processes
    do not get it. Raises ``OutOfSpace`` when the system has no address space or memory left.
    """
    unit = HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE
    length = max(unit, -(-nbytes // unit) * unit)
    try:
        region = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfSpace(
            f"cannot map {length} bytes of host memory: {error.strerror}; free memory or save less at a time",
            needed=length,
            free=available_memory(),
            errno=error.errno,
            kind="host_memory",
        ) from error
    for name in ("MADV_HUGEPAGE",) if fork else ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        advice = getattr(mmap, name, None)
        if advice is not None:
            try:
                region.madvise(advice)
            except OSError:  # a kernel without huge pages, say: slower, not wrong
                log.debug("madvise(%s) was refused for %d bytes", name, length)
    return memoryview(region)


class Arena:
    """One growing region of host memory, used by one save or restore at a time.

    ``pin`` registers it for fast device copies and returns the undo; where that is refused the copies are slower.
    """

    def __init__(self, pin: Callable[[memoryview], Undo] | None = None) -> None:
        self._view = memoryview(b"")
        self._touched = 0
        self._granted = 0
        """So many bytes from the start were found to be there when they were asked for."""
        self._owner_pid = os.getpid()
        self._pin = pin
        self._unpin: Undo | None = None

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    @property
    def touched(self) -> int:
        """How many bytes from the start are known to have been written to."""
        return self._touched

    def reserve(self, nbytes: int) -> bool:
        """Make room for ``nbytes``; earlier content is lost if the region has to grow. Returns whether it grew.

        Raises ``OutOfSpace`` naming needed and available bytes before anything is mapped or taken anew.
        """
        if self._owner_pid != os.getpid():
            # The mapping is absent in a forked child: start afresh there.
            self._view, self._touched, self._granted = memoryview(b""), 0, 0
            self._unpin, self._owner_pid = None, os.getpid()
        if nbytes <= self._granted:
            return False
        check_memory(nbytes - self._touched)
        if nbytes <= self._view.nbytes:  # mapped still, but given back by ``trim``
            self._granted = nbytes
            return False
        self.drop()  # let the old region go before the new one is mapped
        self._view = map_memory(nbytes, fork=False)
        self._granted = self._view.nbytes
        if self._pin is not None:
            try:
                self._unpin = self._pin(self._view)
            except CkptError as error:
                log.warning("device copies will be slower: %s", error)
        return True

    def populate(self) -> None:
        """Touch the whole region, off the training path."""
        if self._touched < self._view.nbytes:
            populate(self._view[self._touched :])
            self._touched = self._view.nbytes

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._view[offset : offset + nbytes]

    def mark_touched(self, nbytes: int) -> None:
        """The first ``nbytes`` have been written to by the region's user."""
        self._touched = max(self._touched, nbytes)

    def trim(self, nbytes: int) -> None:
        """Give the memory beyond ``nbytes`` back to the system, for a user who is to take no more."""
        keep = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
        region = self._view.obj
        if keep >= self._view.nbytes or not isinstance(region, mmap.mmap) or self._owner_pid != os.getpid():
            return
        if self._unpin is not None:  # what is pinned cannot be taken apart
            self.drop()
            return
        region.madvise(mmap.MADV_DONTNEED, keep, self._view.nbytes - keep)
        self._touched, self._granted = min(self._touched, keep), min(self._granted, keep)

    def drop(self) -> None:
        """Unpin and forget the region; it is unmapped when its last view goes away."""
        unpin, self._unpin = self._unpin, None
        self._view, self._touched, self._granted = memoryview(b""), 0, 0
        if unpin is not None:
            try:
                unpin()
            except CkptError as error:
                log.warning("host memory stays pinned: %s", error)


def check_memory(needed: int) -> None:
    """Raise ``OutOfSpace`` if ``needed`` more bytes of host memory are clearly not there."""
    free = available_memory()
    if free is not None and needed > free:
        raise OutOfSpace(
            f"a snapshot needs {needed} more bytes of host memory but only {free} are available; "
            "nothing was saved; free memory, or let saves take less of it (host_bytes_max, sync)",
            needed=needed,
            free=free,
            kind="host_memory",
        )


def available_memory() -> int | None:
    """Bytes that can still be allocated: the least of the system's and the control group's room, None if unknown."""
    rooms = [room for room in (_system_room(), _cgroup_room()) if room is not None]
    return min(rooms) if rooms else None


def _system_room() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _cgroup_room() -> int | None:
    pairs = (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    )
    for limit_file, usage_file in pairs:
        try:
            limit = Path(limit_file).read_text().strip()
            if limit == "max":
                return None
            return max(0, int(limit) - int(Path(usage_file).read_text()) + _cgroup_cache(limit_file))
        except (OSError, ValueError):
            continue
    return None


def _cgroup_cache(limit_file: str) -> int:
    """Page cache that the group counts as used but gives up under pressure."""
    for line in (Path(limit_file).parent / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
