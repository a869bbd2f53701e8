"""A limit on what all copies between tiers may move, so that a checkpoint does not starve the reading of data."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from ckptfmt.errors import InvalidInput

_LOOK_SECONDS: Final = 0.25
"""Whoever waits asks this often whether there is any point in it still."""


def _go_on() -> None:
    """Nobody wants it stopped."""


class Limiter:
    """At most ``bytes_per_second``, of all threads together. Time that nobody used is not made up for.

    Thread-safe, and fair: each ``take`` gets the next free moment, in the order in which they come.
    """

    def __init__(self, bytes_per_second: int) -> None:
        if type(bytes_per_second) is not int or bytes_per_second < 1:
            raise InvalidInput(f"bandwidth_max={bytes_per_second!r}: give a positive number of bytes per second")
        self.bytes_per_second: Final = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, nbytes: int, give_up: Callable[[], None] = _go_on) -> None:
        """Block until ``nbytes`` may be moved. ``give_up`` raises to end the wait."""
        with self._lock:
            turn = max(self._free_at, time.monotonic())
            self._free_at = turn + nbytes / self.bytes_per_second
        while (left := turn - time.monotonic()) > 0:
            give_up()
            time.sleep(min(left, _LOOK_SECONDS))
