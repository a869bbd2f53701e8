"""What is known about direct I/O, file system by file system."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from ckptfmt.backends.syscalls import O_DIRECT, DirectAlignment, Syscalls
from ckptfmt.errors import BackendError

BLOCK: Final = 4096
"""Offsets and lengths that are multiples of this many bytes suit every common disk and page size."""
_ASSUMED: Final = DirectAlignment(memory=BLOCK, offset=BLOCK)
"""For kernels that do not tell (before Linux 6.1): the first write or read finds out."""


@dataclass(frozen=True)
class DirectRule:
    """How one file may be read and written past the page cache. All in bytes."""

    memory: int
    block: int

    def suits(self, offset: int, nbytes: int, address: int) -> bool:
        return offset % self.block == 0 and nbytes % self.block == 0 and address % self.memory == 0


class DirectRules:
    """Remembers, per file system (``st_dev``), whether direct I/O works. Thread-safe.

    ``wanted`` None: use it where it works. True: refuse to do without. False: never.
    """

    def __init__(self, syscalls: Syscalls, wanted: bool | None) -> None:
        self._sys: Final = syscalls
        self._wanted: Final = wanted
        self._lock: Final = threading.Lock()
        self._known: dict[int, DirectRule | None] = {}

    def rule(self, descriptor: int, device: int, path: str) -> DirectRule | None:
        """Return the rule for an open file on ``device``, or None where reads and writes stay buffered."""
        if self._wanted is False:
            return None
        with self._lock:
            if device not in self._known:
                self._known[device] = self._ask(descriptor)
            found = self._known[device]
        if found is None and self._wanted:
            raise self._refused(path)
        return found

    def refuse(self, device: int, path: str) -> None:
        """Note that the file system has answered ``EINVAL`` to direct I/O."""
        with self._lock:
            self._known[device] = None
        if self._wanted:
            raise self._refused(path)

    def _ask(self, descriptor: int) -> DirectRule | None:
        if not O_DIRECT:
            return None
        told = self._sys.direct_alignment(descriptor) or _ASSUMED
        if not told.memory or not told.offset:
            return None
        return DirectRule(memory=told.memory, block=max(BLOCK, told.offset))

    def _refused(self, path: str) -> BackendError:
        return BackendError(
            f"open {path}: this file system refuses direct I/O, which the option direct=true asks for; "
            "leave the option out, or choose another file system",
            kind="direct_refused",
        )
