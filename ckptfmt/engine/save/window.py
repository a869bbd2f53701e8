"""Turn-taking between the thread that copies a state and those that write it, where not all of it is held at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ckptfmt.engine.units import Unit
from ckptfmt.errors import CkptError

_STEP_BYTES = 64 << 20
"""Copied at most before the writers get any of it."""


class Window:
    """Who may touch which unit. Units are copied in the order of their turns, each as soon as those before it that lie
    in its place have been written; writers may finish in any order.

    Nobody waits for someone who is gone: once closed, every wait ends with a ``CkptError``.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._changed = threading.Condition()
        self._copied = 0
        self._written = [False] * len(units)
        self._gone = 0
        """All units before this one have been written."""
        self._broken: BaseException | None = None
        """Why the pack that is being written cannot be finished."""
        self._closed = False
        self._cause: BaseException | None = None

    # -- the side that copies -------------------------------------------------------------------
    def next_units(self) -> Sequence[Unit]:
        """Block until there is room for a unit; returns the ones to copy now, none at the end."""
        with self._changed:
            first = self._copied
            if first == len(self._units):
                return ()
            self._changed.wait_for(lambda: self._closed or self._units[first].after <= self._gone)
            self._check_open()
            last, nbytes = first, 0
            while last < len(self._units) and self._units[last].after <= self._gone and nbytes < _STEP_BYTES:
                nbytes += self._units[last].nbytes
                last += 1
            return self._units[first:last]

    def copied(self, count: int) -> None:
        """The next ``count`` units have their final bytes."""
        with self._changed:
            self._copied += count
            self._changed.notify_all()

    def wait_written(self, count: int) -> None:
        """Block until the first ``count`` units have been written."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._gone >= count)
            if self._gone < count:
                self._check_open()

    # -- the side that writes -------------------------------------------------------------------
    def wait_copied(self, turn: int) -> None:
        """Block until a unit is final. Raises ``CkptError`` if it never will be, or what broke off its pack."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._broken is not None or self._copied > turn)
            self._check_open()
            if self._broken is not None:
                raise self._broken

    def wrote(self, turn: int) -> None:
        """A unit's place may be used again."""
        with self._changed:
            self._written[turn] = True
            while self._gone < len(self._written) and self._written[self._gone]:
                self._gone += 1
            self._changed.notify_all()

    def break_off(self, error: BaseException) -> None:
        """A unit could not be written: whoever waits to write another one of its pack gives up."""
        with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()

    def rewind(self, units: Sequence[Unit]) -> bool:
        """Whether a pack that was broken off can be written again: only while all of its ``units`` are still held."""
        with self._changed:
            if any(unit.turn is not None and self._written[unit.turn] for unit in units):
                return False
            self._broken = None
            return True

    # -- either ---------------------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._closed:
            why = "the save was given up" if self._cause is None else str(self._cause) or repr(self._cause)
            raise CkptError(f"not all of the state was copied and written: {why}") from self._cause

    def close(self, cause: BaseException | None = None) -> None:
        """Nothing more is copied or written. Again: nothing happens."""
        with self._changed:
            if not self._closed:
                self._closed, self._cause = True, cause
                self._changed.notify_all()
