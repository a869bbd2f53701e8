"""Locks that a fork finds open, whatever the parent's threads were doing when it was made."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final


class ForkLock:
    """A mutual exclusion of this process's threads. May be held while a server is asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _open(self) -> None:
        self._lock = threading.Lock()


_all: Final[weakref.WeakSet[ForkLock]] = weakref.WeakSet()


def _open_all() -> None:
    for lock in _all:
        lock._open()


os.register_at_fork(after_in_child=_open_all)
