"""Waiting for other ranks: for all acknowledgements, and for the coordinator's verdict. Both within bounds, by name."""

from __future__ import annotations

import logging
import time
from typing import Final

from ckptfmt.engine import protocol
from ckptfmt.engine.save import outcome
from ckptfmt.engine.save.alone import ended
from ckptfmt.engine.save.boards import Looks
from ckptfmt.engine.save.context import LaunchContext, SaveOrder
from ckptfmt.engine.save.outcome import as_data, tell
from ckptfmt.engine.save.patience import Patience
from ckptfmt.errors import CatalogError, CkptError, NotFound, SaveFailed, Unavailable
from ckptfmt.format.naming import ranks_shown
from ckptfmt.format.states import State
from ckptfmt.ports.coordination import Failure, RankFailed, SaveRequest
from ckptfmt.ports.records import GenerationRecord

log = logging.getLogger("ckptfmt")

_MARGIN_SECONDS: Final = 15.0
_PROOF_SECONDS: Final = 5.0
"""How long the coordinator has for C5 before another rank does it: it gives up after less."""
_LATE_SECONDS: Final = 5.0
"""How long what a rank has acknowledged may be out of sight."""


def margin(commit_timeout: float) -> float:
    """Seconds after its deadline in which the coordinator has the last word."""
    return min(_MARGIN_SECONDS, commit_timeout / 2)


def settling(commit_timeout: float) -> float:
    """Seconds in which a save that has failed hears its coordinator, and finds its verdict."""
    return margin(commit_timeout) + outcome.SETTLE_SECONDS


def gather(context: LaunchContext, row: GenerationRecord, patience: Patience) -> None:
    """C3: wait until every expected rank has acknowledged. ``RankFailed`` names one that failed or stayed silent."""
    coordination, looks = context.coordination, Looks(context.coordination.pause)
    if len(context.ranks.members) == 1 and patience.repeat(lambda: coordination.gathered(row)):
        return
    with patience.waiting():
        while not patience.look(lambda: coordination.gathered(row)):
            if not patience.left:
                raise _silence(context, row)
            looks.rest(patience.left)


def merge(context: LaunchContext, row: GenerationRecord, parent: str | None, patience: Patience) -> GenerationRecord:
    """C3, once all have acknowledged: what the catalog calls present is looked for again where a place that hosts
    share does not show it. ``NotFound`` if it does not come into sight."""
    site, until = context.site, time.monotonic() + _LATE_SECONDS

    def look() -> GenerationRecord:
        try:
            return protocol.merge(site, row, parent=parent, fence=context.launch.fence)
        except NotFound as error:
            if site.backend.traits.local or time.monotonic() > until:
                raise
            raise Unavailable(f"{error}; its rank has acknowledged it") from error

    return patience.repeat(look)


def follow(context: LaunchContext, row: GenerationRecord, patience: Patience) -> GenerationRecord:
    """The verdict on a save that this rank has acknowledged. ``RankFailed`` says why it was aborted.

    Past the deadline and a margin this rank finishes what is durable; else it raises, and its caller aborts. What it
    does itself has a time of its own, at whose end the watchdog gives the verdict: storage may hang.
    """
    patience.until += margin(context.commit_timeout)
    with patience.waiting():
        now = _await_end(context, row, patience)
        patience.until = max(patience.until, time.monotonic()) + margin(context.commit_timeout)
    if now is None:
        return _step_in(context, row)
    return protocol.prove(context.site, now) if _is_unproven(context, now) else now


def _await_end(context: LaunchContext, row: GenerationRecord, patience: Patience) -> GenerationRecord | None:
    """The generation as the coordinator left it, proven or not for too long; None if it does not within the time."""
    coordination, looks = context.coordination, Looks(context.coordination.pause)
    unproven = None
    while True:
        try:
            now = patience.look(lambda: coordination.verdict(row))
        except CatalogError:
            if coordination.settles:
                raise
            return None  # the board is out of reach, perhaps with the coordinator
        if now is not None:
            if now.commit_seq is None:
                raise ended(now)
            unproven = unproven or time.monotonic()
            if not _is_unproven(context, now) or time.monotonic() - unproven > _PROOF_SECONDS:
                return now
        if not patience.left:
            return None
        looks.rest(patience.left)


def _is_unproven(context: LaunchContext, row: GenerationRecord) -> bool:
    """Whether C5 is still to be done, and this rank may."""
    return row.proven_at is None and row.state is State.COMMITTED and context.coordination.settles


def _step_in(context: LaunchContext, row: GenerationRecord) -> GenerationRecord:
    """The coordinator gave no verdict in time: any rank may commit what is durable, and prove what is committed."""
    catalog, fence = context.site.sql(), context.launch.fence
    until = time.monotonic() + margin(context.commit_timeout)
    now = protocol.repeat(lambda: catalog.generation(row.id), until=until)
    if now is not None and now.state is State.DURABLE:
        told = "generation %d of run %r: rank %d commits it, its coordinator is silent"
        log.warning(told, row.id, row.run, context.ranks.rank)
        now = protocol.commit(context.site, now, fence=fence, until=until)
    if now is not None and now.commit_seq is not None:
        return protocol.prove(context.site, now)
    raise _silence(context, row)


def await_verdict(context: LaunchContext, row: GenerationRecord, patience: Patience) -> GenerationRecord | None:
    """What a rank that has failed is told by its coordinator, which alone speaks to the catalog; None if it is not."""
    coordination, looks = context.coordination, Looks(context.coordination.pause)
    if coordination.settles:
        return None
    until = max(patience.until, time.monotonic()) + margin(context.commit_timeout)
    while time.monotonic() < until:
        try:
            now = protocol.repeat(lambda: coordination.verdict(row), until=until)
        except CkptError as error:
            log.warning("generation %d of run %r: the coordinator cannot be asked: %s", row.id, row.run, error)
            return None
        if now is not None:
            return now
        looks.rest()
    return None


def _silence(context: LaunchContext, row: GenerationRecord) -> RankFailed:
    """Name the ranks that said nothing; if all have acknowledged, the coordinator is the silent one."""
    limit, unseen = f"within {context.commit_timeout:g} s", ""
    try:
        silent = context.coordination.silent(row)
    except CkptError as error:
        silent, unseen = [], f"; which ranks are silent cannot be seen: {error}"
    if not silent:
        return RankFailed(Failure(context.ranks.coordinator, "merge", "", f"it did not commit {limit}{unseen}"))
    text = f"it did not acknowledge its part {limit}"
    if len(silent) > 1:
        text += f"; nor did {ranks_shown(silent[1:])}"
    return RankFailed(Failure(silent[0], "persist", "", text))


def decide(context: LaunchContext, request: SaveRequest, *, busy: bool) -> bool:
    """With ``on_busy="skip"`` and several ranks: whether the save begins. ``SaveFailed`` if nobody says so in time."""
    coordination, looks = context.coordination, Looks(context.coordination.pause)
    until = time.monotonic() + context.commit_timeout
    try:
        while (begun := protocol.repeat(lambda: coordination.decide(request, busy=busy), until=until)) is None:
            if time.monotonic() > until:
                limit = f"it did not decide within {context.commit_timeout:g} s whether to save"
                raise RankFailed(Failure(context.ranks.coordinator, "begin", "", limit))
            looks.rest()
    except RankFailed as failed:
        failure = failed.failure
        raise SaveFailed(
            f"run {context.run.name!r}, step {request.step}: {failed}",
            stage=failure.stage,
            rank=failure.rank,
            key=request.key,
        ) from failed
    return begun


def decline(context: LaunchContext, order: SaveOrder, error: BaseException) -> None:
    """This rank takes no part in the save, which has not begun: the others would wait for it."""
    if len(context.ranks.members) > 1:
        request, failure = order.request(context.commit_timeout), as_data(context, "begin", error)
        tell("of a failure", lambda: context.coordination.decline(request, failure))
