"""Cores, descriptors, and what the kernel tells of cached pages."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Final

from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.doctor.report import Finding
from ckptfmt.engine.transfer import thread_count

_FILES: Final = 256


def cores() -> Finding:
    """CPUs of this process, and the threads that copies and I/O use of them."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = thread_count()
    facts = {"cpus": count, "threads": threads}
    consequence = f"copies, hashes, writes and reads run on {threads} threads"
    return Finding("cores", "note", f"{count} for this process", consequence, None, facts)


def descriptors(limit: int | None = None) -> Finding:
    """RLIMIT_NOFILE."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    facts = {"limit": soft}
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        consequence = "a save beside many open data files may find no descriptor left, and fails"
        return Finding("open files", "slow", f"at most {soft}", consequence, "ulimit -n 4096", facts)
    consequence = "a save or load keeps some ten files open"
    return Finding("open files", "good", f"at most {soft}", consequence, None, facts)


def cached_pages(folder: Path, syscalls: Syscalls) -> Finding:
    """Whether the kernel tells which pages of a file are cached (cachestat, Linux 6.5)."""
    name = "cached pages"
    path = folder / "cached"
    path.write_bytes(b"x" * 8192)
    descriptor = syscalls.open(str(path), os.O_RDONLY)
    try:
        syscalls.cached_pages(descriptor, 0, 8192)
    except OSError as error:
        found = f"not told ({os.strerror(error.errno or errno.EIO)})"
        consequence = "whether a pack is cached is found out by trying its first page: some warm reads go to the device"
        return Finding(name, "slow", found, consequence, "Linux 6.5 or newer", {"works": False})
    finally:
        syscalls.close(descriptor)
    consequence = "what is in the page cache is read from there, all else past it"
    return Finding(name, "good", "told by the kernel (cachestat)", consequence, None, {"works": True})
