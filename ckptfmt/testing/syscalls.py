"""System calls that are recorded, cut short or made to fail, for tests of the posix backend.

calls = WatchedSyscalls()
calls.fail("fsync", errno.EIO, nth=2)
backend = PosixBackend(root, syscalls=calls)
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ckptfmt.backends.syscalls import Syscalls

__all__ = ["SYSTEM_CALLS", "SystemCall", "WatchedSyscalls"]

SYSTEM_CALLS: Final = tuple(sorted(name for name in vars(Syscalls) if not name.startswith("_")))
"""Names of all methods of ``Syscalls``."""


@dataclass(frozen=True)
class SystemCall:
    """One call. ``path`` is the file it is about, also where it was given a descriptor; of two paths, the second."""

    name: str
    path: str
    number: int
    """Counts all calls from 1."""
    nth: int
    """Counts the calls of this name from 1."""


class WatchedSyscalls(Syscalls):
    """The kernel, watched. Thread-safe.

    ``longest`` bounds the bytes that one read or write moves, as a kernel may do at any time.
    """

    def __init__(self, longest: int | None = None) -> None:
        self.calls: list[SystemCall] = []
        self._counts: Counter[str] = Counter()
        self._longest: Final = longest
        self._hooks: list[Callable[[SystemCall], None]] = []
        self._open: dict[int, str] = {}
        self._lock: Final = threading.Lock()

    def on_call(self, hook: Callable[[SystemCall], None]) -> None:
        """Run ``hook`` before every call; what it raises, the call raises."""
        self._hooks.append(hook)

    def fail(self, name: str, code: int, *, nth: int | None = None, path: str = "", times: int | None = None) -> None:
        """Make calls of ``name`` fail with errno ``code``: the nth one, those whose path contains ``path``,
        and at most ``times`` of them."""
        fired = 0

        def hook(call: SystemCall) -> None:
            nonlocal fired
            if call.name == name and nth in (None, call.nth) and path in call.path and (times is None or fired < times):
                fired += 1
                raise OSError(code, os.strerror(code))

        self.on_call(hook)

    def clear(self) -> None:
        """Forget the calls so far and count anew. Hooks stay."""
        with self._lock:
            self.calls.clear()
            self._counts.clear()

    def trace(self, *names: str) -> list[tuple[str, str]]:
        """Return (name, last component of the path) of the calls so far, only those named if any are."""
        return [(call.name, os.path.basename(call.path)) for call in self.calls if not names or call.name in names]

    @property
    def left_open(self) -> list[str]:
        """Paths of the descriptors that have not been closed."""
        return sorted(self._open.values())

    def _run(self, name: str, arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            subject = arguments[1] if name in ("link", "rename_noreplace") else arguments[0]
            path = self._open.get(subject, "") if isinstance(subject, int) else subject
            self._counts[name] += 1
            call = SystemCall(name, path, len(self.calls) + 1, self._counts[name])
            self.calls.append(call)
        if name == "close":  # the descriptor is gone even when close reports an error
            self._open.pop(arguments[0], None)
        try:
            for hook in self._hooks:
                hook(call)
        except OSError:
            if name == "close":
                os.close(arguments[0])
            raise
        if self._longest is not None and name in ("pwrite", "pread_into", "pread_cached"):
            arguments = (arguments[0], arguments[1][: self._longest], *arguments[2:])
        result = getattr(super(), name)(*arguments)
        if name == "open":
            self._open[result] = path
        return result


def _watched(name: str) -> Callable[..., Any]:
    def method(self: WatchedSyscalls, *arguments: Any) -> Any:
        return self._run(name, arguments)

    method.__name__ = name
    return method


for _name in SYSTEM_CALLS:
    setattr(WatchedSyscalls, _name, _watched(_name))
