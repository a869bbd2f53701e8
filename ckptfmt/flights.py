"""The saves of one checkpointer that are under way, oldest first, and the arenas in which their snapshots lie."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ckptfmt.engine.arena import Arena
from ckptfmt.engine.save.session import SaveSession
from ckptfmt.engine.transfer import Background
from ckptfmt.pending import PendingSave

if TYPE_CHECKING:
    from ckptfmt.ports.records import GenerationRecord

log = logging.getLogger("ckptfmt")

_TIDY_SECONDS: Final = 10.0
"""How long the end waits for what saves do after their verdict: nothing depends on it."""


@dataclass(eq=False)
class Flight:
    """One save under way: its handle, what takes it to its verdict on which thread, and where its snapshot lies."""

    pending: PendingSave
    session: SaveSession
    thread: Background
    arena: Arena
    holds: bool = True
    """Whether its snapshot needs the arena still."""
    abandoned: bool = False
    """Its verdict was given by the watchdog: the thread hangs, and may still read the arena when it comes back."""


class Flights:
    """At most ``limit`` saves in flight. One thread saves and waits; the watchdog may call from another."""

    def __init__(self, make_arena: Callable[[], Arena], *, limit: int) -> None:
        self._make_arena = make_arena
        self._limit = limit
        self._lock = threading.Lock()
        self._flights: tuple[Flight, ...] = ()
        """Also those that are done, until they have landed."""
        self._untold: list[PendingSave] = []
        self._stuck: list[Flight] = []
        self._tidying: list[Background] = []
        """Threads of saves that have landed: they clean the stage, which may hang."""
        self._idle: list[Arena] = []
        self._preparing: Background | None = None

    # -- what is under way ------------------------------------------------------------------------
    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """The saves without a verdict, oldest first."""
        return tuple(flight.pending for flight in self._flights if not flight.pending.done())

    @property
    def full(self) -> bool:
        return len(self.pending) >= self._limit

    def newest_row(self) -> GenerationRecord | None:
        """The last committed generation among them."""
        rows = [flight.pending.row for flight in self._flights if flight.pending.row is not None]
        return max(rows, key=lambda row: row.commit_seq or 0, default=None)

    def start(self, flight: Flight) -> None:
        """Start its thread. ``RuntimeError`` if there is none to be had: then the flight is none, its arena idle."""
        with self._lock:
            self._flights = (*self._flights, flight)
        try:
            flight.thread.start()
        except RuntimeError:
            with self._lock:
                self._flights = tuple(other for other in self._flights if other is not flight)
            raise

    def call_off(self, pending: PendingSave, cause: BaseException) -> bool:
        """``save`` was left in the middle: its state is not to be taken for whole. False if it is not under way."""
        flight = next((flight for flight in self._flights if flight.pending is pending), None)
        if flight is None:
            return False
        flight.session.call_off(cause)
        return True

    # -- arenas -----------------------------------------------------------------------------------
    def idle_arena(self) -> Arena:
        """An arena that no snapshot lies in; a new one only if all are in use. It stays among the idle ones."""
        with self._lock:
            if not self._idle:
                self._idle.append(self._make_arena())
            return self._idle[-1]

    def take_arena(self) -> Arena:
        """An idle arena, for one snapshot. Give it back, or start the flight that holds it."""
        arena = self.idle_arena()
        with self._lock:
            self._idle.remove(arena)
        return arena

    def give_back(self, arena: Arena) -> None:
        with self._lock:
            self._idle.append(arena)

    def freed(self, arena: Arena) -> None:
        """A snapshot needs its memory no longer, though its save may go on for long: the next one may have it."""
        with self._lock:
            flight = next((each for each in (*self._flights, *self._stuck) if each.arena is arena and each.holds), None)
            if flight is not None:
                flight.holds = False
                self._idle.append(arena)

    def drop_arenas(self) -> None:
        """Give the memory back; that of a thread that still hangs goes when it ends."""
        self._free_stuck()
        with self._lock:
            idle, self._idle = self._idle, []
        for arena in idle:
            arena.drop()

    def _free_stuck(self) -> None:
        gone = [flight for flight in self._stuck if not flight.thread.alive()]
        self._stuck = [flight for flight in self._stuck if flight not in gone]
        for flight in gone:
            if flight.holds:
                flight.arena.drop()

    # -- deferred copies --------------------------------------------------------------------------
    def before_update(self) -> None:
        """Wait until every state is copied."""
        for flight in self._flights:
            flight.pending.before_update()

    def lift(self) -> None:
        """Take hooks away that have done their work."""
        for flight in self._flights:
            flight.pending.lift()

    # -- the arena of the next save, ahead of time --------------------------------------------------
    def prefault(self, nbytes: int = 0) -> None:
        """Touch it in the background; ``nbytes``: what it has to hold at least."""
        arena = self.idle_arena()
        arena.reserve(nbytes)
        preparing = Background(arena.populate, name="ckptfmt-prepare")
        try:
            preparing.start()
        except RuntimeError as error:  # no thread to be had: the next save touches the arena itself
            log.warning("the next save will block longer: %s", error)
        else:
            self._preparing = preparing

    def prefaulted(self) -> None:
        """Wait until no arena is being touched."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    # -- verdicts ---------------------------------------------------------------------------------
    def make_room(self) -> None:
        """Wait until one more save may begin. Raises the failures that nobody has been told of."""
        pending = self.pending
        for oldest in pending[: max(0, len(pending) - self._limit + 1)]:
            oldest.wait_done()
        self.land()
        self._tell()

    def settle(self, timeout: float | None = None) -> None:
        """Wait for all verdicts, ``timeout`` seconds at most (``TimeoutError``). Raises as ``make_room`` does."""
        until = None if timeout is None else time.monotonic() + timeout
        self.before_update()
        for pending in self.pending:
            pending.wait_done(_left(until))
        self.land(_left(until))
        self._tidied(_left(until))
        self._tell()

    def expire_overdue(self) -> None:
        """Past its deadline a save is aborted on behalf of a writer that hangs."""
        for flight in self._flights:
            if not flight.pending.done() and flight.session.overdue:
                flight.abandoned = True
                flight.session.expire()

    def land(self, timeout: float | None = None) -> None:
        """Let go of the saves that are done: their arenas are idle again."""
        done = [flight for flight in self._flights if flight.pending.done()]
        for flight in done:
            if not flight.abandoned and not flight.thread.is_current():
                flight.session.wait_reported(timeout)  # callbacks run there; what comes after them is not waited for
            flight.pending.lift()
        with self._lock:
            self._flights = tuple(flight for flight in self._flights if flight not in done)
            self._idle += [flight.arena for flight in done if flight.holds and not flight.abandoned]
        self._stuck += [flight for flight in done if flight.abandoned]
        self._tidying = [thread for thread in self._tidying if thread.alive()]
        self._tidying += [flight.thread for flight in done if not flight.abandoned]
        self._untold += [flight.pending for flight in done]
        self._free_stuck()

    def _tidied(self, timeout: float | None) -> None:
        until = time.monotonic() + (_TIDY_SECONDS if timeout is None else min(timeout, _TIDY_SECONDS))
        threads, self._tidying = self._tidying, []
        for thread in threads:
            thread.join(_left(until))
        if any(thread.alive() and not thread.is_current() for thread in threads):
            log.warning("the stage hangs while it is cleaned: it is not waited for")

    def _tell(self) -> None:
        """Raise what became of the saves that landed and at which nobody has looked, the first of them."""
        landed, self._untold = self._untold, []
        errors = [error for save in landed if save.unseen_error() is not None and (error := save.exception())]
        if errors:
            first, *others = errors
            for other in others:
                first.add_note(f"in addition: {other}")
            raise first


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
