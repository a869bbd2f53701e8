"""What the file system does: direct I/O, syncs, reservations, links. Each probe works in a folder made for it."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

from ckptfmt.backends.posix_direct import BLOCK
from ckptfmt.backends.syscalls import O_DIRECT, Syscalls
from ckptfmt.doctor.report import Finding

SYNCS: Final = 5
_BUFFERED: Final = "packs are written through the page cache and synced, slower and with more CPU time"


def direct_io(folder: Path, syscalls: Syscalls) -> Finding:
    """Write and read one block past the page cache, at the alignment that the kernel asks for."""
    path = folder / "direct"
    descriptor = syscalls.open(str(path), os.O_CREAT | os.O_EXCL | os.O_RDWR)
    try:
        told = syscalls.direct_alignment(descriptor)
        block = max(BLOCK, told.offset) if told is not None else BLOCK
        problem = _try_direct(descriptor, block, syscalls)
    finally:
        syscalls.close(descriptor)
    alignment = {"memory": None, "offset": None} if told is None else {"memory": told.memory, "offset": told.offset}
    asked = "not told (Linux before 6.1)" if told is None else f"memory {told.memory}, offset {told.offset}"
    facts = {"works": problem is None, "alignment": alignment}
    if problem is not None:
        fix = "use a local disk with ext4 or xfs, or mount this file system with direct I/O if it has an option for it"
        return Finding("direct I/O", "slow", f"refused ({problem})", _BUFFERED, fix, facts)
    if block > BLOCK:
        consequence = f"blocks of {block} bytes: what is not a multiple goes through the page cache"
        return Finding("direct I/O", "slow", f"works; alignment: {asked}", consequence, None, facts)
    consequence = "packs are written and cold ones read past the page cache, at the speed of the device"
    return Finding("direct I/O", "good", f"works; alignment: {asked}", consequence, None, facts)


def _try_direct(descriptor: int, block: int, syscalls: Syscalls) -> str | None:
    """The reason why it does not work, None if it does."""
    if not O_DIRECT:
        return "this system has none"
    page = memoryview(mmap.mmap(-1, block))
    page[:5] = b"probe"
    try:
        syscalls.set_direct(descriptor, True)
        if syscalls.pwrite(descriptor, page, 0) != block:
            return "a block was written in part"
        page[:5] = bytes(5)
        if syscalls.pread_into(descriptor, page, 0) != block or bytes(page[:5]) != b"probe":
            return "a block came back otherwise than it was written"
    except OSError as error:
        return os.strerror(error.errno or errno.EIO)
    return None


def file_sync(folder: Path, syscalls: Syscalls) -> Finding:
    """fsync of a file after a small write: what each small object of a commit costs."""
    path = folder / "synced"
    descriptor = syscalls.open(str(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:

        def write_and_sync(number: int) -> None:
            syscalls.pwrite(descriptor, memoryview(b"x" * 100), number * 100)
            syscalls.fsync(descriptor)

        return _synced(
            "fsync of files", write_and_sync, "a commit makes about ten of these: it cannot be faster than they are"
        )
    finally:
        syscalls.close(descriptor)


def folder_sync(folder: Path, syscalls: Syscalls) -> Finding:
    """fsync of a folder after a name was added to it: without it a new name may be lost in a power cut."""
    descriptor = syscalls.open(str(folder), os.O_RDONLY | os.O_DIRECTORY)
    try:

        def add_and_sync(number: int) -> None:
            syscalls.close(syscalls.open(str(folder / f"name{number}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            syscalls.fsync(descriptor)

        return _synced("fsync of folders", add_and_sync, "a new name survives a power cut once the folder is synced")
    finally:
        syscalls.close(descriptor)


def _synced(name: str, work: Callable[[int], None], consequence: str) -> Finding:
    """Median of ``SYNCS`` calls."""
    seconds = []
    for number in range(SYNCS):
        began = time.perf_counter()
        try:
            work(number)
        except OSError as error:
            return _no_sync(name, error)
        seconds.append(time.perf_counter() - began)
    middle = median(seconds)
    facts = {"works": True, "seconds": middle}
    return Finding(name, "good", f"works, {middle * 1e3:.2g} ms", consequence, None, facts)


def _no_sync(name: str, error: OSError) -> Finding:
    reason = os.strerror(error.errno or errno.EIO)
    facts = {"works": False, "seconds": None}
    if name == "fsync of folders" and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
        consequence = "new names become durable when the file system sees fit: a power cut may undo a commit"
        return Finding(name, "slow", f"refused ({reason})", consequence, "use a file system that syncs folders", facts)
    return Finding(
        name, "bad", f"failed ({reason})", "no save can be made durable here", "see the kernel's log (dmesg)", facts
    )


def reservation(folder: Path, syscalls: Syscalls) -> Finding:
    """fallocate: space is taken before the first byte is written."""
    name = "fallocate"
    path = folder / "reserved"
    descriptor = syscalls.open(str(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        syscalls.fallocate(descriptor, 1 << 20)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            consequence = "no save fits"
            return Finding(name, "bad", "no space for 1 MiB", consequence, "free space", {"works": False})
        consequence = "a full disk is found out while a pack is being written, not before; the save fails all the same"
        found = f"refused ({os.strerror(error.errno or errno.EIO)})"
        return Finding(name, "slow", found, consequence, "keep more space free than one save takes", {"works": False})
    finally:
        syscalls.close(descriptor)
    return Finding(name, "good", "works", "a full disk is found out before a pack is written", None, {"works": True})


def hard_links(folder: Path, syscalls: Syscalls) -> Finding:
    """How a finished object gets its name without ever replacing another: link, else an exclusive rename."""
    source, target = folder / "linked", folder / "name-of-linked"
    syscalls.close(syscalls.open(str(source), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    name = "hard links"
    try:
        syscalls.link(str(source), str(target))
    except OSError as error:
        refused = f"refused ({os.strerror(error.errno or errno.EIO)})"
    else:
        consequence = "commit records appear whole or not at all, and never over another"
        return Finding(name, "good", "work", consequence, None, {"link": True, "rename_noreplace": None})
    try:
        syscalls.rename_noreplace(str(source), str(target))
    except OSError as error:
        found = f"{refused}, and so is renaming without replacing ({os.strerror(error.errno or errno.EIO)})"
        consequence = "commit records are written in place under a lock: readers by proof may see one half done"
        fix = "use a local file system, or read with the catalog"
        return Finding(name, "slow", found, consequence, fix, {"link": False, "rename_noreplace": False})
    consequence = "commit records are renamed into place without replacing (renameat2), which is as good"
    return Finding(
        name,
        "good",
        f"{refused}; renaming without replacing works",
        consequence,
        None,
        {"link": False, "rename_noreplace": True},
    )
