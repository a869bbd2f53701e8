"""When to save, decided by all ranks together: for reasons that are no function of the step (seconds, signals).

The coordinator proposes a step ahead. A rank acknowledges it only while its own step is lower, and having acknowledged
it waits at that step for the outcome, which whoever posts first decides. No rank decides alone, and none waits for
ever. All messages are sent and read on a thread of their own: training waits only at an agreed step.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from ckptfmt.engine.save.boards import post_within
from ckptfmt.engine.save.context import Ranks
from ckptfmt.engine.transfer import Heartbeat
from ckptfmt.errors import CatalogError, CkptError
from ckptfmt.ports.coordination import COMMON, Board

log = logging.getLogger("ckptfmt")

Why = Literal["seconds", "preempted"]

ACKNOWLEDGE_SECONDS: Final = 15.0
"""How long the coordinator waits for all ranks before it calls a proposal off."""
OUTCOME_SECONDS: Final = 30.0
"""How long a rank waits at the proposed step before it calls the proposal off itself."""
_LEAD_LOOKS: Final = 4
"""Looks at the board from a proposal to its outcome on every rank: so far ahead is the step that is proposed."""
_WISH: Final = "save-when/wish"


@dataclass(frozen=True)
class Proposal:
    number: int
    step: int
    why: Why

    def topic(self, what: str) -> str:
        return f"save-when/{self.number}/{what}"


class Council:
    """One rank's seat. ``wanted`` tells why this rank would have a save; asked on the council's thread. ``told`` hears
    of each save at its step, before anything further is wanted."""

    def __init__(
        self,
        board: Board,
        ranks: Ranks,
        wanted: Callable[[], Why | None],
        told: Callable[[Why], None],
        *,
        acknowledge_seconds: float = ACKNOWLEDGE_SECONDS,
        outcome_seconds: float = OUTCOME_SECONDS,
    ) -> None:
        self._board = board
        self._ranks = ranks
        self._wanted = wanted
        self._told_of = told
        self._acknowledge_seconds = acknowledge_seconds
        self._outcome_seconds = outcome_seconds
        self._others = [rank for rank in ranks.every if rank != ranks.rank]
        self._changed = threading.Condition()
        self._at: int | None = None
        self._pace = _Pace()
        self._number = 0
        self._oldest = 0
        """The first proposal whose messages may still stand."""
        self._open: Proposal | None = None
        """Acknowledged by this rank, or proposed by it; its outcome is not known."""
        self._answer: tuple[Proposal, dict[str, object]] | None = None
        """What is still to be posted: the proposal itself, or what this rank says to one."""
        self._due: list[Proposal] = []
        """Confirmed: every rank saves when it gets there. A slow rank may have several ahead of it."""
        self._wished = False
        self._heeded = False
        """A preemption has led to a save: one is enough."""
        self._opened_at = 0.0
        self._quiet_until = 0.0
        self._hurry = 1
        self._over = False
        self._told = ""
        self._beat = Heartbeat(self._look, seconds=2 * board.pause, name="ckptfmt-council")

    # -- on the thread that trains ----------------------------------------------------------------
    def ask(self, step: int) -> Why | None:
        """Why every rank saves at ``step``; None: no rank does. Waits only where this rank has acknowledged it."""
        with self._changed:
            self._pace.at(step)
            self._at = step
            waiting = self._open
            if waiting is not None and step >= waiting.step:
                known = self._changed.wait_for(lambda: self._open is not waiting, self._outcome_seconds)
                waiting = None if known else waiting
            else:
                waiting = None
        if waiting is not None:
            log.warning("step %d: no outcome of the proposal to save; this rank calls it off", step)
            self._call_off(waiting)
        with self._changed:
            reached = {due.why for due in self._due if due.step <= step}
            self._due = [due for due in self._due if due.step > step]
            why: Why | None = "preempted" if "preempted" in reached else next(iter(reached), None)
            if why is not None:
                self._told_of(why)
        return why

    def _call_off(self, proposal: Proposal) -> None:
        try:
            self._resolve(proposal, confirmed=False, until=time.monotonic() + self._outcome_seconds)
        except CatalogError as error:
            if error.transient:
                raise  # the others may have an outcome: whoever goes on without it would be alone
            self._know(proposal, confirmed=False)  # there is no board any more, so that nobody can save

    def close(self) -> None:
        """Leave; a proposal of this rank is called off."""
        self._beat.stop()
        proposal = self._open
        if proposal is not None and self._ranks.is_coordinator:
            try:
                self._resolve(proposal, confirmed=False, until=time.monotonic())
            except CkptError as error:
                log.warning("a proposal to save at step %d could not be called off: %s", proposal.step, error)

    # -- on the council's own thread --------------------------------------------------------------
    def _look(self) -> None:
        """One look at the board: everything here may be repeated by the next one."""
        if self._over:
            return
        try:
            if self._ranks.is_coordinator:
                self._lead()
            else:
                self._follow()
            self._told = ""
        except CkptError as error:
            self._over = not (isinstance(error, CatalogError) and error.transient)  # fenced, or without a board
            if self._told != str(error):
                log.warning("when to save could not be discussed: %s", error)
            self._told = str(error)

    def _lead(self) -> None:
        proposal = self._open
        if proposal is None:
            self._propose()
            return
        self._send("step", COMMON)
        answers = self._board.complete(proposal.topic("answer"), self._others)
        if answers is not None:
            late = [int(body["at"]) for body in answers.values() if not body["agreed"]]
            self._hurry = 1 if not late else 2 * max(self._hurry, max(late) - proposal.step + 1)
            self._resolve(proposal, confirmed=not late)
            self._forget(proposal.number)
        elif time.monotonic() - self._opened_at > self._acknowledge_seconds:
            heard = self._board.peek(proposal.topic("answer"), self._others)
            silent = [rank for rank in self._others if rank not in heard]
            log.warning("no save at step %d: ranks %s do not answer", proposal.step, silent[:16])
            self._quiet_until = time.monotonic() + self._acknowledge_seconds
            self._resolve(proposal, confirmed=False)

    def _propose(self) -> None:
        if self._due:
            return
        wished = not self._heeded and bool(self._board.peek(_WISH, [COMMON]))
        with self._changed:  # the last save may have been reached while the board was asked: what it satisfied is over
            why: Why | None = "preempted" if wished and not self._heeded else self._wanted()
            if why is None or self._at is None or self._due or time.monotonic() < self._quiet_until:
                return
            lead = max(self._hurry, self._pace.steps_in(_LEAD_LOOKS * self._board.pause))
            proposal = Proposal(self._number, self._at + lead, why)
            self._open, self._opened_at = proposal, time.monotonic()
            self._answer = (proposal, {"step": proposal.step, "why": why})
        self._lead()

    def _follow(self) -> None:
        if not self._wished and self._wanted() == "preempted":
            self._board.post(_WISH, COMMON, {"rank": self._ranks.rank})
            self._wished = True
        proposal = self._open
        self._send("answer", self._ranks.rank)
        if proposal is None:
            self._hear()
            return
        found = self._board.peek(proposal.topic("outcome"), [COMMON]).get(COMMON)
        if found is not None:
            self._know(proposal, confirmed=bool(found["confirmed"]))

    def _hear(self) -> None:
        found = self._board.peek(f"save-when/{self._number}/step", [COMMON]).get(COMMON)
        if found is None:
            return
        proposal = Proposal(self._number, int(found["step"]), found["why"])
        with self._changed:
            agreed = self._at is None or self._at < proposal.step
            self._answer = (proposal, {"agreed": agreed, "at": self._at})
            if agreed:
                self._open = proposal
            else:
                self._number += 1  # it cannot be confirmed any more
        self._send("answer", self._ranks.rank)

    def _send(self, what: str, slot: int) -> None:
        """Post what is still to be posted; the next look does it again where the board could not be reached."""
        if self._answer is not None:
            proposal, body = self._answer
            self._board.post(proposal.topic(what), slot, body)
            self._answer = None

    def _forget(self, answered: int) -> None:
        """Every rank has answered that proposal, so it knows the outcomes of all before."""
        while self._oldest < answered:
            for what in ("step", "outcome"):
                self._board.forget(f"save-when/{self._oldest}/{what}", [COMMON])
            self._board.forget(f"save-when/{self._oldest}/answer", self._others)
            self._oldest += 1

    def _resolve(self, proposal: Proposal, *, confirmed: bool, until: float | None = None) -> None:
        """Post the outcome; what stands there counts, whoever came first. No outcome without its step: the others would
        wait at a number that the coordinator has left."""
        unsent = self._answer
        if unsent is not None and unsent[0] is proposal and self._ranks.is_coordinator:
            post_within(self._board, proposal.topic("step"), COMMON, unsent[1], until=until or 0.0)
        topic, body = proposal.topic("outcome"), {"confirmed": confirmed, "rank": self._ranks.rank}
        stands = post_within(self._board, topic, COMMON, body, until=until or 0.0)
        self._know(proposal, confirmed=bool(stands["confirmed"]))

    def _know(self, proposal: Proposal, *, confirmed: bool) -> None:
        with self._changed:
            if self._open is not proposal:
                return
            self._open = None
            self._number = proposal.number + 1
            if confirmed:
                self._due.append(proposal)
                self._heeded = self._heeded or proposal.why == "preempted"
            self._changed.notify_all()


class _Pace:
    """How long a step takes, from the calls at their ends."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._last: tuple[int, float] | None = None

    def at(self, step: int) -> None:
        now, last = time.monotonic(), self._last
        self._last = (step, now)
        if last is None or step <= last[0]:
            return
        seconds = (now - last[1]) / (step - last[0])
        self._seconds = seconds if self._seconds is None else 0.8 * self._seconds + 0.2 * seconds

    def steps_in(self, seconds: float) -> int:
        """Steps that begin within so many seconds: at least one."""
        if self._seconds is None:
            return 1
        return max(1, math.ceil(seconds / max(self._seconds, 1e-6)))
