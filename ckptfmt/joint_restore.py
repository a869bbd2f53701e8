"""All ranks of a launch restore the same generation, or none of them changes anything.

The coordinator chooses once. Every rank reads and verifies its share, then waits for a verdict: the coordinator's, once
all have read, or that of a rank that could not. Whoever posts first decides, so all act alike. Only then is anything
copied.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ckptfmt import errors
from ckptfmt.engine import protocol
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.load.restore import RestoreOptions
from ckptfmt.engine.reports import RestoreReport
from ckptfmt.engine.save.boards import Looks, await_posts, post_within
from ckptfmt.engine.save.context import LaunchContext
from ckptfmt.engine.save.outcome import as_data
from ckptfmt.errors import CkptError, NotFound
from ckptfmt.ports.coordination import COMMON, Board, Body, Failure, RankFailed
from ckptfmt.ports.records import GenerationRecord
from ckptfmt.reference import At
from ckptfmt.restoring import Restoring, is_damage

if TYPE_CHECKING:
    from ckptfmt.generation import Generation

log = logging.getLogger("ckptfmt")

WAIT_SECONDS = 1800.0
"""How long a rank waits for the others: they may read from slow storage."""
_TELL_SECONDS = 60.0
"""How long a rank tries to tell the others, whose own patience is longer."""
_NOTHING_CHANGED = "nothing was changed on any rank"


class JointRestoring(Restoring):
    """Restores generations of one run into live states, on all ranks at once."""

    def __init__(
        self,
        context: LaunchContext,
        board: Board,
        *,
        open_row: Callable[[GenerationRecord], Generation],
        open_at: Callable[[At], Generation],
        open_unguarded: Callable[[GenerationRecord], Generation],
    ) -> None:
        super().__init__(context, open_row=open_row, open_at=open_at)
        self._board = board
        self._open_unguarded = open_unguarded
        self._calls = 0
        self._row: GenerationRecord | None = None
        self._candidates: list[GenerationRecord] = []
        self._damage = False

    def fill(
        self, into: Any, at: At, options: RestoreOptions, *, fallback: bool, arena: Arena | None
    ) -> RestoreReport | None:
        """As with one rank. Raises on every rank what kept one of them from reading, naming it."""
        call, self._calls = self._calls, self._calls + 1
        unreadable: list[int] = []
        while True:
            topic = f"restore/{call}/{len(unreadable)}"
            choice = self._choose(topic, len(unreadable), at, fallback)
            if choice is None:
                return None
            row, more = msgspec.convert(choice["row"], GenerationRecord), bool(choice["more"])
            fault, own, report = self._attempt(topic, choice, row, into, options, arena)
            if report is not None:
                self._row = row
                return self._fell_back(report, unreadable) if unreadable else report
            if fault is None:
                raise AssertionError("neither a report nor a fault")
            if not (fault["damage"] and more):
                raise self._raised(row, Failure(**fault["failure"]), own)
            log.error("run %r: generation %d cannot be restored: %s", row.run, row.id, fault["failure"]["text"])
            unreadable.append(row.id)

    # -- the choice -----------------------------------------------------------------------------------
    def _choose(self, topic: str, number: int, at: At, fallback: bool) -> Body | None:
        """What all ranks are to restore; None: nothing was ever committed, all start afresh."""
        until = time.monotonic() + WAIT_SECONDS
        wanted = "" if at is None else str(at)
        if self._context.ranks.is_coordinator:
            body = self._choice(number, wanted, at, fallback)
            choice = post_within(self._board, f"{topic}/choice", COMMON, body, until=until)
        else:
            found = await_posts(self._board, f"{topic}/choice", [COMMON], until=until)
            if found is None:
                raise self._silent(self._context.ranks.coordinator, "it has chosen nothing to restore")
            choice = found[COMMON]
        if choice["fault"] is not None:
            raise self._told(Failure(**choice["fault"]), "could not choose a generation to restore")
        if choice["at"] != wanted:
            here = (
                f"restore(at={at!r}) here, but at={choice['at'] or None!r} on the coordinator: give all ranks the same"
            )
            failure = Failure(self._context.ranks.rank, "restore", "InvalidInput", here)
            self._post_fault(topic, failure, damage=False)
            raise self._told(failure, "cannot restore")
        return None if choice["row"] is None else choice

    def _choice(self, number: int, wanted: str, at: At, fallback: bool) -> Body:
        choice: dict[str, Any] = {"fault": None, "at": wanted, "row": None, "more": False, "fallback": fallback}
        try:
            if number == 0:
                self._candidates = self._all_candidates(at, fallback)
            if number < len(self._candidates):
                choice["row"] = msgspec.to_builtins(self._candidates[number])
                choice["more"] = number + 1 < len(self._candidates)
        except CkptError as error:
            choice["fault"] = dataclasses.asdict(as_data(self._context, "restore", error))
        return choice

    def _all_candidates(self, at: At, fallback: bool) -> list[GenerationRecord]:
        """The generations to try, best first; none if the run never had any. Asked for by the coordinator alone."""
        catalog, run = self._context.site.sql(), self._context.run
        if at is None and self._never_committed():
            return []
        rows = self._newest_first() if at is None and fallback else []
        if rows:
            return rows
        found = self._open_at(at)
        row = catalog.generation(found.id)
        if row is None:
            raise NotFound(f"generation {found.id} of run {run.name!r} has left the catalog")
        return [row]

    # -- one generation -------------------------------------------------------------------------------
    def _attempt(
        self, topic: str, choice: Body, row: GenerationRecord, into: Any, options: RestoreOptions, arena: Arena | None
    ) -> tuple[Body | None, BaseException | None, RestoreReport | None]:
        """Read it, agree, and fill. (what kept some rank from it, this rank's own error, the report)"""
        agreed = False

        def agree() -> None:
            nonlocal agreed
            self._agree(topic)
            agreed = True

        try:
            # The coordinator is the reader for all: it is registered until every rank has read.
            opener = self._open_row if self._context.ranks.is_coordinator else self._open_unguarded
            generation = opener(row)
            limit = options.host_bytes_max
            if choice["fallback"] and limit is not None and generation.nbytes > limit:
                generation.require_readable()
            report = generation.restore_with(into, dataclasses.replace(options, agree=agree), arena=arena)
        except RankFailed as told:
            return {"failure": dataclasses.asdict(told.failure), "damage": self._damage}, None, None
        except BaseException as error:
            if agreed:
                raise  # all have read; this is about this rank's own objects, which are changed in part
            stands = self._say(topic, error)
            if stands is None or stands["fault"] is None or not isinstance(error, Exception):
                raise  # nobody can be told, or all others go on
            return stands["fault"], error, None
        return None, None, report

    def _say(self, topic: str, error: BaseException) -> Body | None:
        """Tell the others what this rank met; what stands as the verdict then. None if they cannot be told."""
        try:
            return self._post_fault(topic, as_data(self._context, "restore", error), damage=is_damage(error))
        except CkptError as lost:
            error.add_note(f"the other ranks could not be told: {lost}")
            return None

    def _agree(self, topic: str) -> None:
        """Return once every rank has read its share. ``RankFailed`` names one that could not."""
        board, ranks, looks = self._board, self._context.ranks, Looks(self._board.pause)
        until = time.monotonic() + WAIT_SECONDS
        post_within(board, f"{topic}/read", ranks.rank, {}, until=until)
        while True:
            found = protocol.repeat(lambda: board.peek(f"{topic}/verdict", [COMMON]), until=until).get(COMMON)
            if found is None and ranks.is_coordinator and self._all_have_read(topic, until):
                found = post_within(board, f"{topic}/verdict", COMMON, {"fault": None}, until=until)
            if found is None and time.monotonic() > until:
                found = self._post_fault(topic, self._missing(topic), damage=False)
            if found is not None:
                break
            looks.rest()
        if found["fault"] is not None:
            self._damage = bool(found["fault"]["damage"])
            raise RankFailed(Failure(**found["fault"]["failure"]))

    def _all_have_read(self, topic: str, until: float) -> bool:
        ranks = self._context.ranks.every
        found = protocol.repeat(lambda: self._board.complete(f"{topic}/read", ranks), until=until)
        return found is not None

    def _post_fault(self, topic: str, failure: Failure, *, damage: bool) -> Body:
        body = {"fault": {"failure": dataclasses.asdict(failure), "damage": damage}}
        until = time.monotonic() + _TELL_SECONDS
        return post_within(self._board, f"{topic}/verdict", COMMON, body, until=until)

    def _missing(self, topic: str) -> Failure:
        heard = self._board.peek(f"{topic}/read", self._context.ranks.every)
        silent = [rank for rank in self._context.ranks.every if rank not in heard]
        rank = silent[0] if silent else self._context.ranks.coordinator
        return Failure(rank, "restore", "", f"it has not read its share within {WAIT_SECONDS:g} s")

    # -- errors ---------------------------------------------------------------------------------------
    def _raised(self, row: GenerationRecord, failure: Failure, own: BaseException | None) -> BaseException:
        """This rank's own error if it is the one that counts, else what the other rank said."""
        if own is not None and failure.rank == self._context.ranks.rank:
            own.add_note(f"rank {failure.rank} told the other ranks: {_NOTHING_CHANGED}")
            return own
        told = self._told(failure, f"cannot restore generation {row.id} (step {row.step})")
        told.__cause__ = own
        return told

    def _told(self, failure: Failure, what: str) -> CkptError:
        kind = getattr(errors, failure.kind, None)
        known = kind if isinstance(kind, type) and issubclass(kind, CkptError) else CkptError
        if issubclass(known, errors.SaveFailed):
            known = CkptError
        run = self._context.run.name
        return known(f"run {run!r}: rank {failure.rank} {what}: {failure.reason}; {_NOTHING_CHANGED}")

    def _silent(self, rank: int, what: str) -> CkptError:
        return CkptError(
            f"run {self._context.run.name!r}: rank {rank} is silent: {what} within {WAIT_SECONDS:g} s; "
            f"{_NOTHING_CHANGED}; every rank has to call restore(), as often as the others",
            kind="rank_silent",
        )

    def _fell_back(self, report: RestoreReport, unreadable: list[int]) -> RestoreReport:
        """It is noted once."""
        if self._context.ranks.is_coordinator:
            return super()._fell_back(report, unreadable)
        return dataclasses.replace(report, fell_back_from=tuple(unreadable))

    def record(self, report: RestoreReport) -> GenerationRecord:
        """What the launch continues is noted once, by its coordinator."""
        if self._context.ranks.is_coordinator:
            return super().record(report)
        if self._row is None:
            raise AssertionError("nothing was restored")
        return self._row
