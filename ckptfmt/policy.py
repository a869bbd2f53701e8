"""When to save: steps, seconds, preemption signals, what to do while a save is in flight, and how saves use memory."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, Protocol

from ckptfmt.engine.plan import check_host_bytes_max
from ckptfmt.engine.save.context import Ranks
from ckptfmt.engine.save.council import Council, Why
from ckptfmt.errors import InvalidInput
from ckptfmt.ports.coordination import Board

log = logging.getLogger("ckptfmt")

BusyRule = Literal["wait", "skip"]
Freeze = Literal["now", "deferred"]


def check_bytes_max(bytes_max: int | None) -> None:
    """Raise ``InvalidInput`` unless it is a limit, or None."""
    if bytes_max is not None and (type(bytes_max) is not int or bytes_max < 1):
        raise InvalidInput(f"bytes_max={bytes_max!r}: give a positive number of bytes, or None")


@dataclass(frozen=True)
class Modes:
    """How saves use memory and space, and block training. ``host_bytes_max``: bytes of host memory for all snapshots
    together; ``bytes_max``: of all generations of the run."""

    in_flight_max: int = 1
    host_bytes_max: int | None = None
    freeze: Freeze = "now"
    bytes_max: int | None = None

    def __post_init__(self) -> None:
        if type(self.in_flight_max) is not int or self.in_flight_max not in (1, 2):
            raise InvalidInput(
                f"in_flight_max={self.in_flight_max!r}: give 1, or 2 for two snapshots; more would only queue up, "
                "since generations are committed one after the other"
            )
        if self.freeze not in ("now", "deferred"):
            raise InvalidInput(f'freeze={self.freeze!r}: give "now" or "deferred"')
        check_host_bytes_max(self.host_bytes_max, arenas=self.in_flight_max)
        check_bytes_max(self.bytes_max)
        if self.host_bytes_max is not None and self.freeze == "deferred":
            raise InvalidInput(
                'freeze="deferred" with host_bytes_max: a deferred snapshot is copied beside training and needs room '
                "for the whole state, while under a limit save copies and writes one group of tensors after the other "
                "before it returns; choose one of them"
            )

    @property
    def arena_bytes_max(self) -> int | None:
        """The share of one snapshot."""
        return None if self.host_bytes_max is None else self.host_bytes_max // self.in_flight_max


class SavePolicy:
    """Decides at a step boundary. With world size 1 it acts at once."""

    def __init__(self, *, every_steps: int | None, every_seconds: float | None, on_busy: BusyRule) -> None:
        if every_steps is not None and (not isinstance(every_steps, int) or every_steps < 1):
            raise InvalidInput(f"every_steps={every_steps!r}: give a positive number of steps, or None")
        if every_seconds is not None and not every_seconds > 0:
            raise InvalidInput(f"every_seconds={every_seconds!r}: give a positive number of seconds, or None")
        if on_busy not in ("wait", "skip"):
            raise InvalidInput(f'on_busy={on_busy!r}: give "wait" or "skip"')
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.on_busy = on_busy
        self._last_save = time.monotonic()
        self._preempt_saved = False

    def should_save(self, step: int, *, preempted: bool) -> bool:
        """Whether to save at the end of ``step``.

        ``every_steps`` is a pure function of the step: its multiples, step 0 only when every step is saved.
        A preemption asks for one save.
        """
        return self.wanted(preempted=preempted) is not None or self.at_step(step)

    def at_step(self, step: int) -> bool:
        """What every rank knows by itself."""
        return self.every_steps is not None and step % self.every_steps == 0 and (step > 0 or self.every_steps == 1)

    def wanted(self, *, preempted: bool) -> Why | None:
        """Why this process would save now, whatever the step."""
        if preempted and not self._preempt_saved:
            return "preempted"
        over = self.every_seconds is not None and time.monotonic() - self._last_save >= self.every_seconds
        return "seconds" if over else None

    def saved(self, *, preempted: bool) -> None:
        """A save has begun: the clock of ``every_seconds`` starts anew."""
        self._last_save = time.monotonic()
        self._preempt_saved = self._preempt_saved or preempted


class Decisions(Protocol):
    """When one rank saves, and whether it is to end."""

    @property
    def preempted(self) -> bool: ...

    def should_save(self, step: int) -> bool: ...

    def saved(self) -> None:
        """A save has begun."""

    def close(self) -> None: ...


class OwnDecisions:
    """Of the only rank: at once."""

    def __init__(self, policy: SavePolicy, flag: PreemptionFlag) -> None:
        self._policy = policy
        self._flag = flag

    @property
    def preempted(self) -> bool:
        return self._flag.raised

    def should_save(self, step: int) -> bool:
        return self._policy.should_save(step, preempted=self.preempted)

    def saved(self) -> None:
        self._policy.saved(preempted=self.preempted)

    def close(self) -> None:
        self._flag.close()


class JointDecisions:
    """Of one of several ranks. What is no function of the step they decide together, and hear of at the same step: a
    preemption, too, so that none of them ends alone. Without reasons of that kind nobody is asked."""

    def __init__(self, policy: SavePolicy, flag: PreemptionFlag, board: Board, ranks: Ranks) -> None:
        self._policy = policy
        self._flag = flag
        self._is_coordinator = ranks.is_coordinator
        self.preempted = False
        asks = policy.every_seconds is not None or flag.watches
        self._council = Council(board, ranks, self._wanted, self._told) if asks else None

    def _wanted(self) -> Why | None:
        """Seconds pass on the coordinator's clock alone; a signal may reach any rank."""
        why = self._policy.wanted(preempted=self._flag.raised)
        return why if self._is_coordinator or why == "preempted" else None

    def should_save(self, step: int) -> bool:
        why = None if self._council is None else self._council.ask(step)
        return why is not None or self._policy.at_step(step)

    def _told(self, why: Why) -> None:
        self.preempted = self.preempted or why == "preempted"
        self.saved()  # it is told once, whether or not the caller follows

    def saved(self) -> None:
        self._policy.saved(preempted=self.preempted)

    def close(self) -> None:
        if self._council is not None:
            self._council.close()
        self._flag.close()


class PreemptionFlag:
    """Signal handlers that only set a flag, in the process that installed them; earlier handlers are chained."""

    def __init__(self, signals: Sequence[int | signal.Signals]) -> None:
        self.raised = False
        self.watches = bool(signals)
        self._pid = os.getpid()
        self._closed = False
        self._previous: dict[int, Any] = {}
        if signals and threading.current_thread() is not threading.main_thread():
            raise InvalidInput("preempt_signals can be set from the main thread only: signal handlers live there")
        for number in signals:
            try:
                self._previous[int(number)] = signal.signal(number, self._handle)
            except (OSError, ValueError) as error:
                self.close()
                raise InvalidInput(f"preempt_signals: signal {number!r} cannot be handled: {error}") from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if self._closed or os.getpid() != self._pid:
            self._stand_aside(number, frame, previous)
            return
        self.raised = True
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _stand_aside(self, number: int, frame: FrameType | None, previous: Any) -> None:
        """As if not installed: a forked worker inherited this handler, or one that was set later still chains it."""
        if signal.getsignal(number) == self._handle:
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def close(self) -> None:
        """Put the earlier handlers back, unless somebody has replaced ours in the meantime."""
        self._closed = True
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
