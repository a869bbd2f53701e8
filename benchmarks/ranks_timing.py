"""Seconds of a step: by the clock, of the processor, in the database and on storage."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Timed:
    """Another object, whose calls are counted and timed."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.seconds = 0.0
        self.calls: Counter[str] = Counter()
        self.each: Counter[str] = Counter()
        """Seconds of all calls, by name."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return found(*arguments, **named)
            finally:
                took = time.perf_counter() - began
                self.seconds += took
                self.each[name] += took  # type: ignore[assignment]
                self.calls[name] += 1

        return call


class Steps:
    """Figures of named steps. ``database`` and ``storage`` are what the steps call."""

    def __init__(self, database: Timed, storage: Timed) -> None:
        self.found: dict[str, dict[str, float]] = {}
        self._database = database
        self._storage = storage

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        before = self._now()
        yield
        figures = {what: after - before[what] for what, after in self._now().items()}
        known = self.found.setdefault(name, dict.fromkeys(figures, 0.0))
        for what, seconds in figures.items():
            known[what] += seconds

    def _now(self) -> dict[str, float]:
        return {
            "wall": time.perf_counter(),
            "cpu": time.process_time(),
            "database": self._database.seconds,
            "storage": self._storage.seconds,
        }
