"""The system calls by which SQLite changes the disk, shown to a hook before they are made.

SQLite's unix VFS lets every system call be replaced (``xSetSystemCall``, https://sqlite.org/c3ref/vfs.html). ``fsync``
is not among them, but each stands between two that are: a hook before the next one comes right after it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_size_t, c_ssize_t, c_void_p
from typing import Any, Final

Hook = Callable[[str, int | None, memoryview | None, int], None]
"""(call, descriptor or None, the bytes of a write or None, offset)."""

_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "open": (c_int, c_char_p, c_int, c_int),
    "close": (c_int, c_int),
    "ftruncate": (c_int, c_int, c_int64),
    "write": (c_ssize_t, c_int, c_void_p, c_size_t),
    "pwrite": (c_ssize_t, c_int, c_void_p, c_size_t, c_int64),
    "pwrite64": (c_ssize_t, c_int, c_void_p, c_size_t, c_int64),
    "unlink": (c_int, c_char_p),
    "openDirectory": (c_int, c_char_p, POINTER(c_int)),
}


class _Vfs(ctypes.Structure):
    """``sqlite3_vfs`` of version 3."""

    _fields_ = (
        ("iVersion", c_int),
        ("szOsFile", c_int),
        ("mxPathname", c_int),
        ("pNext", c_void_p),
        ("zName", c_char_p),
        ("pAppData", c_void_p),
        *((name, c_void_p) for name in ("xOpen", "xDelete", "xAccess", "xFullPathname")),
        *((name, c_void_p) for name in ("xDlOpen", "xDlError", "xDlSym", "xDlClose")),
        *((name, c_void_p) for name in ("xRandomness", "xSleep", "xCurrentTime", "xGetLastError")),
        ("xCurrentTimeInt64", c_void_p),
        ("xSetSystemCall", CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p)),
        ("xGetSystemCall", CFUNCTYPE(c_void_p, c_void_p, c_char_p)),
        ("xNextSystemCall", c_void_p),
    )


def watch(hook: Hook) -> list[Any]:
    """Show every such call of this process to ``hook``. Keep what is returned for as long as SQLite may call.

    For a process of its own: nothing is put back.
    """
    import _sqlite3  # the very library that Python's driver uses

    library = ctypes.CDLL(_sqlite3.__file__)
    library.sqlite3_vfs_find.restype = POINTER(_Vfs)
    vfs = library.sqlite3_vfs_find(None)
    kept: list[Any] = []
    folders: set[int] = set()
    for name, signature in _SIGNATURES.items():
        address = vfs.contents.xGetSystemCall(vfs, name.encode())
        if not address:
            continue
        prototype = CFUNCTYPE(*signature, use_errno=True)
        wrapped = prototype(_wrapper(name, prototype(address), hook, folders))
        kept.append(wrapped)
        if vfs.contents.xSetSystemCall(vfs, name.encode(), ctypes.cast(wrapped, c_void_p)) != 0:
            raise OSError(f"SQLite does not let {name} be watched")
    return kept


def _wrapper(name: str, real: Callable[..., int], hook: Hook, folders: set[int]) -> Callable[..., int]:
    """Opening what exists and closing a file change nothing, and are not shown; a folder is closed once synced."""
    if name in ("write", "pwrite", "pwrite64"):

        def write(descriptor: int, data: int, nbytes: int, *offset: int) -> int:
            view = memoryview(ctypes.string_at(data, nbytes))
            hook(name, descriptor, view, offset[0] if offset else os.lseek(descriptor, 0, os.SEEK_CUR))
            return real(descriptor, data, nbytes, *offset)

        return write

    def open_folder(path: bytes, descriptor: Any) -> int:
        hook(name, None, None, 0)
        result = real(path, descriptor)
        folders.add(descriptor[0])
        return result

    def open_file(path: bytes, flags: int, mode: int) -> int:
        if flags & os.O_CREAT:
            hook(name, None, None, 0)
        return real(path, flags, mode)

    def close(descriptor: int) -> int:
        if descriptor in folders:
            folders.remove(descriptor)
            hook("folder synced", None, None, 0)
        return real(descriptor)

    def other(*arguments: Any) -> int:
        hook(name, None, None, 0)
        return real(*arguments)

    return {"openDirectory": open_folder, "open": open_file, "close": close}.get(name, other)
