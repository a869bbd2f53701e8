"""Host memory for snapshots: how much, on which pages, and what the kernel grants."""

from __future__ import annotations

import ctypes
import mmap
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ckptfmt.doctor.report import Finding
from ckptfmt.engine.arena import HUGE_PAGE, available_memory, map_memory
from ckptfmt.engine.reports import human_bytes
from ckptfmt.engine.touch import address_of, populate

_SYS: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TEST_BYTES: Final = 32 * HUGE_PAGE
_MADV_DONTFORK: Final = 10
_MADV_POPULATE_WRITE: Final = 23
_libc: Final = ctypes.CDLL(None, use_errno=True)


def available() -> Finding:
    """What a snapshot may take: the system's and the control group's room."""
    free = available_memory()
    facts = {"bytes": free}
    if free is None:
        return Finding("host memory", "note", "not told", "a snapshot that does not fit fails at mapping", None, facts)
    consequence = "an asynchronous save holds a copy of the state here while it is written"
    return Finding("host memory", "note", f"{human_bytes(free)} available", consequence, None, facts)


def huge_pages(setting: Callable[[], str | None] | None = None) -> Finding:
    """The setting of the kernel, and how much of a test mapping really got huge pages."""
    text = (setting or _setting)()
    got = huge_bytes_of(map_memory(_TEST_BYTES))
    facts = {"setting": text, "tested_bytes": _TEST_BYTES, "huge_bytes": got}
    found = f"{text or 'not told'}; {human_bytes(got)} of a mapping of {human_bytes(_TEST_BYTES)}"
    if got >= _TEST_BYTES // 2:
        return Finding(
            "huge pages", "good", found, "the stall of a save copies at the full speed of memory", None, facts
        )
    consequence = "the first touch of a snapshot's memory and the copies into it are slower: longer stalls"
    fix = (
        f"echo madvise > {_SYS}  # as root"
        if text == "never"
        else "memory is short or fragmented: free some, then echo 1 > /proc/sys/vm/compact_memory  # as root"
    )
    return Finding("huge pages", "slow", found, consequence, fix, facts)


def huge_bytes_of(memory: memoryview) -> int:
    """Touch all of a new mapping; returns how many of its bytes lie on huge pages then."""
    before = _huge_bytes_around(memory)
    populate(memory)
    return max(0, min(_huge_bytes_around(memory) - before, len(memory)))


def _huge_bytes_around(memory: memoryview) -> int:
    """AnonHugePages in proc_pid_smaps(5), in bytes. The kernel tells them of neighbours that are alike as of one."""
    address, inside, found = address_of(memory), False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            start, _, stop = head.partition("-")
            begin, end = int(start, 16), int(stop, 16)
            inside = begin < address + len(memory) and address < end
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    return found


def advice() -> Finding:
    """Whether the kernel takes MADV_DONTFORK and MADV_POPULATE_WRITE."""
    memory = memoryview(mmap.mmap(-1, HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    address = address_of(memory)
    taken = {
        name: _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), number) == 0
        for name, number in (("MADV_DONTFORK", _MADV_DONTFORK), ("MADV_POPULATE_WRITE", _MADV_POPULATE_WRITE))
    }
    facts = {name.lower(): works for name, works in taken.items()}
    missing = [name for name, works in taken.items() if not works]
    if not missing:
        consequence = "workers that are forked do not slow the next save down, and memory is touched beside training"
        return Finding("memory advice", "good", " and ".join(taken), consequence, None, facts)
    consequence = "the first save, or with forked workers every save, stalls longer"
    return Finding("memory advice", "slow", f"refused: {', '.join(missing)}", consequence, "Linux 5.14 or newer", facts)


def locked_memory(limit: int | None = None) -> Finding:
    """RLIMIT_MEMLOCK: how much may be pinned for copies from a GPU."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    endless = soft == resource.RLIM_INFINITY
    facts = {"bytes": None if endless else soft}
    if endless:
        consequence = "snapshots can be pinned, so that a GPU copies into them at full speed"
        return Finding("locked memory", "good", "no limit", consequence, None, facts)
    consequence = "with a GPU, pinning a snapshot may be refused: copies then go through small buffers of the driver"
    fix = "ulimit -l unlimited (docker: --ulimit memlock=-1); without a GPU it does not matter"
    return Finding("locked memory", "note", f"at most {human_bytes(soft)}", consequence, fix, facts)


def _setting() -> str | None:
    """The word in brackets: ``always [madvise] never``."""
    try:
        text = _SYS.read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None
