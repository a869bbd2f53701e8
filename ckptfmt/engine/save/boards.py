"""Messages between ranks as rows of the catalog, and how one waits for messages on any board."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from ckptfmt.engine import protocol
from ckptfmt.engine.save.outcome import fenced_by
from ckptfmt.engine.transfer import Line
from ckptfmt.errors import CatalogError
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.coordination import Board, Body

T = TypeVar("T")

_PAUSE_SECONDS: Final = 0.25
_CALL_SECONDS: Final = 10.0
_CHECK_SECONDS: Final = 2.0
"""How often a rank that waits asks whether its launch is still the newest."""
_RANKS_AT_FULL_PACE: Final = 16
"""More ranks look less often each: one database answers them all."""

_SAVES_KEPT: Final = 4
"""Saves whose messages stay: nobody reads those of a save so much older than one in which all ranks took part."""

_jitter = random.SystemRandom()
"""Not the global generator, which belongs to the training that is to be reproduced, and nothing that forks share."""


class CatalogBoard:
    """Implements ``Board`` by rows of the catalog."""

    def __init__(self, catalog: Catalog, launch_id: int, *, world_size: int, pause: float = _PAUSE_SECONDS) -> None:
        self.pause = pause * max(1.0, world_size / _RANKS_AT_FULL_PACE)
        self._catalog = catalog
        self._launch_id = launch_id
        self._check_after = 0.0

    def post(self, topic: str, slot: int, body: Body) -> Body:
        return self._catalog.post(self._launch_id, topic, slot, body)

    def peek(self, topic: str, slots: Sequence[int]) -> dict[int, Body]:
        wanted = set(slots)
        found = {slot: body for slot, body in self._catalog.posts(self._launch_id, topic).items() if slot in wanted}
        if len(found) < len(wanted):
            self._require_owner()
        return found

    def _require_owner(self) -> None:
        """Nobody posts any more in a launch that a newer one has fenced, and what was posted is gone."""
        if time.monotonic() < self._check_after:
            return
        self._check_after = time.monotonic() + _CHECK_SECONDS
        launch = self._catalog.launch(self._launch_id)
        if launch.live:
            return
        fenced = fenced_by(self._catalog, launch)
        if fenced is not None:
            raise fenced

    def complete(self, topic: str, slots: Sequence[int]) -> dict[int, Body] | None:
        found = self.peek(topic, slots)
        return found if len(found) == len(slots) else None

    def forget(self, topic: str, slots: Sequence[int]) -> None:
        self._catalog.forget_posts(self._launch_id, topic)


def save_topic(n: int, what: str) -> str:
    return f"save/{n}/{what}"


class Kept:
    """The messages about saves that stand on the board still. Saves and decisions tell of them, on their threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: dict[int, set[str]] = {}

    def add(self, n: int, *what: str) -> None:
        """Of save ``n`` there are, or may be, these messages."""
        with self._lock:
            self._saves.setdefault(n, set()).update(what)

    def forget(self, n: int, remove: Callable[[int, str], object]) -> None:
        """Save ``n`` is committed: every rank took part, and has read what came long before it. ``remove`` that.

        Not after another verdict, nor when a save is skipped: a rank may be far behind.
        """
        with self._lock:
            old = sorted((save, what) for save, known in self._saves.items() for what in known)
        for save, what in old:
            if save <= n - _SAVES_KEPT:
                remove(save, what)
        with self._lock:
            self._saves = {save: known for save, known in self._saves.items() if save > n - _SAVES_KEPT}


class Looks:
    """The pauses between looks: short at first, since most answers are near, then about ``pause`` seconds each.

    Not quite, as ranks that look at one time would meet for ever.
    """

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._next = pause / 12

    def rest(self, at_most: float = float("inf")) -> None:
        time.sleep(min(self._next * _jitter.uniform(0.5, 1.5), max(0.0, at_most) + 0.001))
        self._next = min(self._pause, self._next * 1.6)


def await_posts(board: Board, topic: str, slots: Sequence[int], *, until: float) -> dict[int, Body] | None:
    """The messages of all ``slots``, or None if one is missing at ``until`` (``time.monotonic``).

    A board that cannot be reached is asked again; what it says at the end is raised.
    """
    looks = Looks(board.pause)
    while True:
        found = protocol.repeat(lambda: board.complete(topic, slots), until=until)
        if found is not None or time.monotonic() > until:
            return found
        looks.rest(until - time.monotonic())


def post_within(board: Board, topic: str, slot: int, body: Body, *, until: float) -> Body:
    """``post``, asked again while the board cannot be reached."""
    return protocol.repeat(lambda: board.post(topic, slot, body), until=until)


class PatientBoard:
    """Another board, whose calls may hang for as long as its server is stopped: here they fail in time."""

    def __init__(self, inner: Board, *, seconds: float = _CALL_SECONDS) -> None:
        self.pause = inner.pause
        self._inner = inner
        self._seconds = seconds
        self._line = Line(name="ckptfmt-board")

    def post(self, topic: str, slot: int, body: Body) -> Body:
        return self._asked(lambda: self._inner.post(topic, slot, body))

    def peek(self, topic: str, slots: Sequence[int]) -> dict[int, Body]:
        return self._asked(lambda: self._inner.peek(topic, slots))

    def complete(self, topic: str, slots: Sequence[int]) -> dict[int, Body] | None:
        return self._asked(lambda: self._inner.complete(topic, slots))

    def forget(self, topic: str, slots: Sequence[int]) -> None:
        self._asked(lambda: self._inner.forget(topic, slots))

    def _asked(self, call: Callable[[], T]) -> T:
        try:
            return self._line.ask(call, seconds=self._seconds)
        except TimeoutError as error:
            raise CatalogError(
                f"the ranks' message board does not answer within {self._seconds:g} s: the process that serves it may "
                "be stopped",
                kind="board_silent",
                transient=True,
            ) from error
