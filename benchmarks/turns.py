"""Processes that take turns, so that what they do stands beside one another in time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_LOOK_SECONDS = 0.02
_BROKEN = -1


@dataclass
class Turns:
    """One of ``count`` that have ``place`` 0 to ``count`` - 1. All are given the same ``file``, which does not exist
    beforehand. Entered by each as a context: whoever leaves it by an error is not waited for."""

    file: Path
    place: int
    count: int
    taken: int = 0

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._set(_BROKEN)

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Wait for the next turn, which ends with the block. ``RuntimeError`` if another one has failed."""
        number = self.taken * self.count + self.place
        while (found := self._number()) != number:
            if found == _BROKEN:
                raise RuntimeError("another one that takes turns has failed")
            time.sleep(_LOOK_SECONDS)
        yield
        self.taken += 1
        self._set(number + 1)

    def _set(self, number: int) -> None:
        whole = self.file.with_suffix(f".{self.place}")
        whole.write_text(str(number))
        whole.replace(self.file)

    def _number(self) -> int:
        try:
            return int(self.file.read_text())
        except FileNotFoundError:
            return 0
