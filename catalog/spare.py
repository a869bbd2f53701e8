"""The connection of the transaction before, kept for the next: SQLite reads the whole schema for every new one (1 ms).

It is idle: no lock, no transaction. What may happen meanwhile:

- A fork. A child must neither use nor close what it inherits (https://sqlite.org/howtocorrupt.html, 2.6), so the
  parent closes it before. If another thread made one in between, the child forgets it, without closing it.
- The file is removed, replaced or written by somebody else. Then its identity or its time differs, and a new
  connection is made, which sees what is there now.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
import threading
import weakref
from pathlib import Path
from typing import Any

FileFacts = tuple[int, int, int, int]


class SpareConnection:
    """At most one idle connection to one file. Safe to use from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        # A list, so that it can be emptied when this object is gone.
        self._kept: list[tuple[sqlite3.Connection, FileFacts]] = []
        weakref.finalize(self, _close_all, self._kept)
        _spares.add(self)

    def take(self) -> sqlite3.Connection | None:
        """The idle connection, now the caller's; None if there is none for the file as it is."""
        with self._lock:
            if not self._kept:
                return None
            connection, facts = self._kept.pop()
        if _facts(self._path) == facts:
            return connection
        connection.close()
        return None

    def keep(self, connection: sqlite3.Connection) -> bool:
        """Take back a connection that is in no transaction. False: one is kept already, or its file is gone."""
        facts = _facts(self._path)
        with self._lock:
            if facts is None or self._kept:
                return False
            self._kept.append((connection, facts))
            return True

    def close(self) -> None:
        with self._lock:
            _close_all(self._kept)

    def _forget(self) -> None:
        """In a forked child. The lock may be that of a thread which is not here."""
        self._lock = threading.Lock()
        for connection, _ in self._kept:
            never_close(connection)
        self._kept.clear()


_spares: weakref.WeakSet[SpareConnection] = weakref.WeakSet()


def never_close(connection: sqlite3.Connection) -> None:
    """Keep a connection that a forked child inherited from being closed, at exit too."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def _before_fork() -> None:
    for spare in list(_spares):
        spare.close()


def _after_fork_in_child() -> None:
    for spare in list(_spares):
        spare._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def _close_all(kept: list[tuple[sqlite3.Connection, Any]]) -> None:
    while kept:
        connection, _ = kept.pop()
        connection.close()


def _facts(path: Path) -> FileFacts | None:
    """What changes when the file becomes another one, or gets other bytes."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
