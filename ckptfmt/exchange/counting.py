"""How far a long import or export is, told to whoever looks on: bytes done and all of them, phase after phase."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from msgspec.structs import replace

from ckptfmt.engine.keep.verify import Progress
from ckptfmt.ports.arrays import ArrayFamily, Capture, LeafSpec

Phases = Callable[[str], AbstractContextManager[Progress | None]]
"""Begins a phase by its name; what it gives is told how far that one is, if anybody looks."""


def nobody_looks(name: str) -> AbstractContextManager[None]:
    """``Phases`` of what nobody looks at."""
    return nullcontext()


class Count:
    """Bytes of one phase, added from any thread; None if nobody is to be told."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done = done = min(self._done + nbytes, self._total)
        if self._progress is not None:
            self._progress(done, self._total)


class CountedFamily:
    """An array family whose copies are counted: all of a save that goes through a window passes here once, and up to a
    page at the ends of its units twice."""

    def __init__(self, family: ArrayFamily, count: Count) -> None:
        self._family = family
        self._count = count

    def describe(self, value: Any, path: str, known: LeafSpec | None = None) -> LeafSpec:
        # Whoever knows an address copies from there, past ``capture``.
        return replace(self._family.describe(value, path, known), address=None)

    def capture(self, pairs: Sequence[tuple[Any, memoryview]]) -> Capture:
        captured = self._family.capture(pairs)
        self._count.add(sum(host.nbytes for _, host in pairs))
        return captured

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)
