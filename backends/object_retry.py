"""How long a failure that may pass is put up with."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from ckptfmt.backends.object_errors import PASSING, Failure
from ckptfmt.errors import InvalidInput

ATTEMPTS_MAX: Final = 100
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 10.0

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """At most ``attempts`` tries of one request, none begun later than ``seconds`` after the first."""

    attempts: int = 10
    seconds: float = 120.0

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= ATTEMPTS_MAX:
            raise InvalidInput(f"retry_attempts={self.attempts}: give 1 to {ATTEMPTS_MAX}")
        if not 0 <= self.seconds < float("inf"):
            raise InvalidInput(f"retry_seconds={self.seconds}: give 0 or more seconds")

    def insist(self, call: Callable[[], T], *, wanted: Callable[[], bool] = lambda: True) -> T:
        """Return what ``call`` returns; repeat it after a ``Failure`` that may pass, while it is still ``wanted``.

        Only for calls whose repetition does no harm, whatever became of the one before.
        """
        began = time.monotonic()
        for attempt in range(self.attempts):
            try:
                return call()
            except Failure as failure:
                if failure.cause not in PASSING or attempt + 1 == self.attempts or not wanted():
                    raise
                pause = _pause(attempt, failure.retry_after)
                if time.monotonic() - began + pause > self.seconds:
                    raise
            time.sleep(pause)
        raise AssertionError("the last attempt neither succeeded nor raised")


def _pause(attempt: int, asked: float | None) -> float:
    """Seconds. Half of it is chance, so that many ranks that were refused together don't come back together."""
    longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**attempt)
    return max(asked or 0.0, longest * random.uniform(0.5, 1.0))
