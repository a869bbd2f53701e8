"""The system calls that the posix backend uses, one thin method each.

Tests hand in another ``Syscalls`` to record the order of calls, to shorten writes or to raise an
errno; nothing else may stand between the backend and the kernel. Every method raises ``OSError``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
from dataclasses import dataclass
from typing import Final

O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
"""0 where the system has none; the backend then stays buffered."""

_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_RENAME_NOREPLACE: Final = 1
_STATX_DIOALIGN: Final = 0x2000
_SYS_CACHESTAT: Final = 451
"""One number on every architecture (Linux 6.5)."""
_MAP_FIXED: Final = 0x10
_MLOCK_ONFAULT: Final = 1  # Linux 4.4
_MADV_POPULATE_READ: Final = 22  # Linux 5.14


@dataclass(frozen=True)
class DirectAlignment:
    """What direct I/O on one file asks for, in bytes. Zeros: the file can't do it."""

    memory: int
    offset: int


class Syscalls:
    """The kernel itself."""

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def fstat(self, descriptor: int) -> os.stat_result:
        return os.fstat(descriptor)

    def lstat(self, path: str) -> os.stat_result:
        return os.lstat(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        return os.statvfs(path)

    def scandir(self, path: str) -> list[os.DirEntry[str]]:
        with os.scandir(path) as entries:
            return list(entries)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        return os.pwrite(descriptor, data, offset)

    def pread_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [buffer], offset)

    def pread_cached(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Read only what the page cache holds; ``EAGAIN`` if that is nothing, ``EOPNOTSUPP`` where it can't be told."""
        return os.preadv(descriptor, [buffer], offset, os.RWF_NOWAIT)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def ftruncate(self, descriptor: int, nbytes: int) -> None:
        os.ftruncate(descriptor, nbytes)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def lock(self, descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)

    def set_direct(self, descriptor: int, direct: bool) -> None:
        """Turn ``O_DIRECT`` on or off for an open descriptor; ``EINVAL`` where the file system refuses."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | O_DIRECT if direct else flags & ~O_DIRECT)

    def fallocate(self, descriptor: int, nbytes: int) -> None:
        """Reserve ``nbytes`` and make the file that long; never by writing zeros, unlike ``os.posix_fallocate``."""
        if _fallocate is None:
            raise _no_such_call("fallocate")
        while _fallocate(descriptor, 0, 0, nbytes) != 0:
            if ctypes.get_errno() != errno.EINTR:
                raise _os_error("fallocate")

    def rename_noreplace(self, source: str, target: str) -> None:
        """Rename unless ``target`` exists (``EEXIST``); ``EINVAL`` or ``ENOSYS`` where that can't be had."""
        if _renameat2 is None:
            raise _no_such_call("renameat2")
        if _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
            raise _os_error("renameat2")

    def direct_alignment(self, descriptor: int) -> DirectAlignment | None:
        """Ask the kernel (Linux 6.1 on) what direct I/O on this file needs; None if it does not tell."""
        record = ctypes.create_string_buffer(256)
        if _statx is None or _statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, record) != 0:
            return None
        if not int.from_bytes(record.raw[0:4], sys.byteorder) & _STATX_DIOALIGN:
            return None
        # struct statx: stx_dio_mem_align at byte 152, stx_dio_offset_align at 156 (linux/stat.h)
        return DirectAlignment(
            memory=int.from_bytes(record.raw[152:156], sys.byteorder),
            offset=int.from_bytes(record.raw[156:160], sys.byteorder),
        )

    def cached_pages(self, descriptor: int, offset: int, nbytes: int) -> int:
        """Count the pages of a range that are in the page cache; ``ENOSYS`` or ``EPERM`` where that can't be told."""
        counted = (ctypes.c_uint64 * 5)()
        if _syscall is None or sys.platform != "linux":
            raise _no_such_call("cachestat")
        wanted = (ctypes.c_uint64 * 2)(offset, nbytes)
        if _syscall(_SYS_CACHESTAT, descriptor, wanted, counted, 0) != 0:
            raise _os_error("cachestat")
        return int(counted[0])

    def map_locked(self, descriptor: int, offset: int, address: int, nbytes: int) -> None:
        """Map a range of a file over pages of ours, read-only; its pages stay in memory once they were brought in.

        ``EAGAIN``, ``ENOMEM`` or ``EPERM`` beyond ``RLIMIT_MEMLOCK``: then the range is fresh private memory again.
        """
        if _mmap is None or _mlock2 is None:
            raise _no_such_call("mlock2")
        read_only = mmap.MAP_SHARED | _MAP_FIXED
        if _mmap(address, nbytes, mmap.PROT_READ, read_only, descriptor, offset) != address:
            raise _os_error("mmap")
        if _mlock2(address, nbytes, _MLOCK_ONFAULT) != 0:
            refused = _os_error("mlock2")
            fresh = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            if _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, fresh, -1, 0) != address:
                raise _os_error("mmap")
            raise refused

    def fault_in(self, address: int, nbytes: int) -> None:
        """Bring mapped pages in, for reading: an error (``EFAULT``, ``EINVAL``) where a touch would be a signal."""
        if _madvise is None:
            raise _no_such_call("madvise")
        while _madvise(address, nbytes, _MADV_POPULATE_READ) != 0:
            if ctypes.get_errno() != errno.EINTR:
                raise _os_error("madvise")

    def file_system_type(self, path: str) -> int | None:
        """Return ``statfs.f_type`` of the file system that holds ``path``, or None where there is none."""
        record = ctypes.create_string_buffer(512)
        if _statfs is None or sys.platform != "linux":
            return None
        if _statfs(os.fsencode(path), record) != 0:
            raise _os_error("statfs")
        return int.from_bytes(record.raw[0 : ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF


_libc: Final = ctypes.CDLL(None, use_errno=True)


def _function(name: str, result: type, *arguments: type) -> ctypes._NamedFuncPointer | None:
    try:
        function: ctypes._NamedFuncPointer = getattr(_libc, name)
    except AttributeError:  # not in this C library: the caller has another way
        return None
    function.restype = result
    function.argtypes = arguments
    return function


_fallocate = _function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_renameat2 = _function(
    "renameat2", ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint
)
_statx = _function("statx", ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
_statfs = _function("statfs", ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
_mmap = _function(
    "mmap", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
)
_mlock2 = _function("mlock2", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
_madvise = _function("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_syscall = _function(
    "syscall", ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long
)


def _os_error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{os.strerror(code)} in {call}")


def _no_such_call(call: str) -> OSError:
    return OSError(errno.ENOSYS, f"this system has no {call}")
