"""The limits of a disk: plain writes and reads of whole blocks by one to four threads, and a cache that can be emptied.

Nothing here shares code with the backends: a limit must not depend on what is measured against it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from ckptfmt.errors import BackendError

BLOCK: Final = 4096
PIECE: Final = 8 << 20
_SYS_CACHESTAT: Final = 451
_CACHED_MAX: Final = 0.02
_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Timed:
    seconds: float
    cpu_seconds: float
    direct: bool
    """Whether it went past the page cache."""


def raw_write(path: Path, memory: memoryview, *, threads: int, hashed: bool = False) -> Timed:
    """Write page-aligned ``memory`` of whole blocks into a new file: reserve, write past the cache, fsync both.

    With ``hashed`` each thread takes the xxh3-128 of its piece first. Buffered where direct I/O is refused.
    """
    began, cpu = time.perf_counter(), time.process_time()
    descriptor, direct = _opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        with contextlib.suppress(OSError):
            os.posix_fallocate(descriptor, 0, len(memory))

        def write(start: int) -> None:
            view = memory[start : start + PIECE]
            if hashed:
                xxhash.xxh3_128_digest(view)
            _all(os.pwrite, descriptor, view, start)

        _in_pieces(write, len(memory), threads)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_folder(path.parent)
    return Timed(time.perf_counter() - began, time.process_time() - cpu, direct)


def raw_read(path: Path, memory: memoryview, *, threads: int, direct: bool, hashed: bool = False) -> Timed:
    """Read the first ``len(memory)`` bytes (whole blocks) of a file into reused memory; ``hashed``: and hash them."""
    began, cpu = time.perf_counter(), time.process_time()
    descriptor, past = _opened(path, os.O_RDONLY) if direct else (os.open(path, os.O_RDONLY), False)
    try:

        def read(start: int) -> None:
            view = memory[start : start + PIECE]
            _all(lambda fd, part, at: os.preadv(fd, [part], at), descriptor, view, start)
            if hashed:
                xxhash.xxh3_128_digest(view)

        _in_pieces(read, len(memory), threads)
    finally:
        os.close(descriptor)
    return Timed(time.perf_counter() - began, time.process_time() - cpu, past)


def drop_cache(folder: Path) -> None:
    """Take all files below ``folder`` out of the page cache. ``BackendError`` if they stay there."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in files:
        _drop(path)
    for path in files:
        cached = cached_bytes(path)
        if cached is not None and cached > max(_CACHED_MAX * path.stat().st_size, 1 << 20):
            raise BackendError(
                f"drop the cache of {path}: {cached} bytes stay in the page cache, so a cold read cannot be measured "
                "here; another process may have the file mapped"
            )


def fill_cache(folder: Path) -> None:
    """Read all files below ``folder`` into the page cache, as far as memory allows."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb", buffering=0) as file:
                while file.read(PIECE):
                    pass


def cached_bytes(path: Path) -> int | None:
    """Bytes of a file in the page cache; None where the kernel does not tell (before Linux 6.5)."""
    found = (ctypes.c_uint64 * 5)()
    whole = (ctypes.c_uint64 * 2)(0, 0)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        failed = _libc.syscall(_SYS_CACHESTAT, descriptor, whole, found, 0)
    finally:
        os.close(descriptor)
    return None if failed else int(found[0]) * mmap.PAGESIZE


def whole_blocks(nbytes: int) -> int:
    return max(BLOCK, nbytes // BLOCK * BLOCK)


def _drop(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # only clean pages can be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _opened(path: Path, flags: int) -> tuple[int, bool]:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags & ~os.O_EXCL, 0o666), False


def _in_pieces(work: Callable[[int], None], nbytes: int, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, range(0, nbytes, PIECE)):
            pass


def _all(call: Callable[[int, memoryview, int], int], descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = call(descriptor, view[done:], offset + done)
        if count <= 0:
            raise BackendError(f"the file ends at offset {offset + done}, {len(view) - done} bytes early")
        done += count


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
