"""How long one save may still take, and what it met on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ckptfmt.engine import protocol
from ckptfmt.errors import CkptError, SaveFailed

T = TypeVar("T")


class Patience:
    """The time of one save. ``overdue`` makes the error of a save that is out of it."""

    def __init__(self, seconds: float, overdue: Callable[[], SaveFailed]) -> None:
        self.until = time.monotonic() + seconds
        self.waits = False
        """For other ranks, or for the verdict on an earlier save: the watchdog leaves it alone."""
        self.expired = False
        """The watchdog has given the verdict: the writer hangs."""
        self.passing: CkptError | None = None
        """Why the call that is being repeated failed the last time."""
        self._overdue = overdue
        self._settled_by = 0.0

    @property
    def over(self) -> bool:
        """Whether the watchdog is to give the verdict."""
        return not self.waits and time.monotonic() > max(self.until, self._settled_by)

    def settle(self, seconds: float) -> None:
        """The save has failed, and whoever ran it has so long, past the deadline too, to find the verdict itself."""
        self._settled_by = max(self.until, time.monotonic()) + seconds
        self.waits = False

    @property
    def left(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def give_up(self) -> None:
        """Raise once the time is over, also where others wait for the writer in vain."""
        if self.expired or time.monotonic() > self.until:
            raise self._overdue()

    def repeat(self, call: Callable[[], T]) -> T:
        """Repeat a call that may be repeated while it fails for a passing reason, as long as there is time."""
        self.give_up()
        answer = protocol.repeat(call, until=self.until, noted=self.remember)
        self.passing = None
        return answer

    def look(self, call: Callable[[], T]) -> T:
        """Ask how far the others are: also when the time has just run out, so that whoever waits may say for whom."""
        if self.expired:
            raise self._overdue()
        answer = protocol.repeat(call, until=self.until, noted=self.remember)
        self.passing = None
        return answer

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Whoever waits for others looks at the time by himself, and names them. An error ends the wait in ``settle``:
        before that the watchdog would name this rank instead."""
        self.waits = True
        yield
        self.waits = False

    def remember(self, error: CkptError) -> None:
        self.passing = error

    def pause_for(self, wait: Callable[[], None]) -> None:
        """Wait for something that has a time of its own, and does not shorten this one."""
        self.give_up()
        began = time.monotonic()
        self.waits = True
        try:
            wait()
        finally:
            self.until += time.monotonic() - began
            self.waits = False
