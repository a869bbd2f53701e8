"""Counts the system calls with which a process changes its disk, its backend's and SQLite's alike, and stops at one.

A ``mutant`` leaves one kind of sync out ("files", "folders", "sqlite"): the rig must find it out.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Callable
from typing import Any, Final

import rig_sqlite_calls

from ckptfmt.backends import posix
from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.catalog.sqlite import FileMode, SqliteSessions

BLOCK: Final = 4096


class Meter:
    """``stop(call)`` is asked before every change, under a lock: one at a time. It may end the process."""

    def __init__(self, stop: Callable[[Change], None], *, mutant: str | None = None) -> None:
        self.mutant: Final = mutant
        self.names: list[str] = []
        self._stop: Final = stop
        self._lock: Final = threading.RLock()

    def change(self, name: str, descriptor: int | None, path: str, data: memoryview | None, offset: int) -> None:
        with self._lock:
            self.names.append(name)
            self._stop(Change(len(self.names), name, descriptor, path, data, offset))

    def install(self) -> Any:
        """Watch everything that this process opens from now on. Keep what is returned."""
        meter = self
        if self.mutant == "sqlite":
            _let_sqlite_not_sync()

        class Counted(MeteredSyscalls):
            def __init__(self) -> None:
                super().__init__(meter)

        posix.Syscalls = Counted  # type: ignore[attr-defined,misc]  # a process of its own: never put back
        return rig_sqlite_calls.watch(self._sqlite)

    def _sqlite(self, name: str, descriptor: int | None, data: memoryview | None, offset: int) -> None:
        self.change(f"sqlite {name}", descriptor, "", data, offset)


def _let_sqlite_not_sync() -> None:
    connect = SqliteSessions._connect

    def careless(self: SqliteSessions, mode: FileMode | None = None) -> sqlite3.Connection:
        connection = connect(self, mode)
        connection.execute("PRAGMA synchronous=OFF")
        return connection

    SqliteSessions._connect = careless  # type: ignore[method-assign]


class Change:
    """One change that is about to be made. ``number`` counts from 1."""

    def __init__(
        self, number: int, name: str, descriptor: int | None, path: str, data: memoryview | None, offset: int
    ) -> None:
        self.number = number
        self.name = name
        self.path = path
        self._descriptor = descriptor
        self._data = data
        self._offset = offset

    def do_half(self) -> None:
        """Write the first half, if this is a write."""
        if self._data is None or self._descriptor is None:
            return
        half = len(self._data) // 2
        if half >= BLOCK:
            half -= half % BLOCK  # may be direct I/O
        elif self.name == "pwrite":
            return
        if half:
            os.pwrite(self._descriptor, self._data[:half], self._offset)


class MeteredSyscalls(Syscalls):
    """The kernel; every call that changes the disk is shown to the meter first."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._paths: dict[int, str] = {}

    def _about(self, name: str, subject: int | str, data: memoryview | None = None, offset: int = 0) -> None:
        if isinstance(subject, int):
            self._meter.change(name, subject, self._paths.get(subject, ""), data, offset)
        else:
            self._meter.change(name, None, subject, data, offset)

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        if flags & os.O_CREAT:
            self._about("open", path)
        descriptor = super().open(path, flags, mode)
        self._paths[descriptor] = path
        return descriptor

    def mkdir(self, path: str) -> None:
        self._about("mkdir", path)
        super().mkdir(path)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        self._about("pwrite", descriptor, data, offset)
        return super().pwrite(descriptor, data, offset)

    def fsync(self, descriptor: int) -> None:
        self._about("fsync", descriptor)
        if self._meter.mutant == ("folders" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "files"):
            return
        super().fsync(descriptor)

    def ftruncate(self, descriptor: int, nbytes: int) -> None:
        self._about("ftruncate", descriptor)
        super().ftruncate(descriptor, nbytes)

    def fallocate(self, descriptor: int, nbytes: int) -> None:
        self._about("fallocate", descriptor)
        super().fallocate(descriptor, nbytes)

    def link(self, source: str, target: str) -> None:
        self._about("link", target)
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self._about("unlink", path)
        super().unlink(path)

    def rename_noreplace(self, source: str, target: str) -> None:
        self._about("rename", target)
        super().rename_noreplace(source, target)
