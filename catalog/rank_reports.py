"""What ranks report of a generation (C2): each its own row, or one process for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from ckptfmt.catalog.free_text import as_kept
from ckptfmt.catalog.queries import generations as queries
from ckptfmt.catalog.transaction import Transaction
from ckptfmt.errors import Conflict, InvalidInput, NotFound
from ckptfmt.format.states import State
from ckptfmt.ports.records import RankReport

_ENDED = ("durable", "failed")
# Locked in the order of ranks, so that two reports at once wait for each other instead of locking each other out.
_KNOWN = """
SELECT rank, state, part_name, part_digest, nbytes, stall_seconds, write_seconds, error, staged_tier, staged_bytes,
       staged_seconds, replicated_bytes, staged_at, durable_at
FROM ranks WHERE generation_id = :generation{one} ORDER BY rank{{locked}}
"""
_ALL, _ONE = _KNOWN.format(one=""), _KNOWN.format(one=" AND rank = :rank")
_STATES = """
SELECT g.state, q.state FROM generations AS g JOIN ranks AS q ON q.generation_id = g.id
WHERE g.repository_id = :repository AND g.id = :generation AND q.rank = :rank
"""
# The states again, for the rank may have ended since.
_PROGRESS = f"""
UPDATE ranks SET updated_at = {{now}},
  replicated_bytes = CASE WHEN COALESCE(replicated_bytes, 0) > :bytes THEN replicated_bytes ELSE :bytes END
WHERE generation_id = :generation AND rank = :rank AND state NOT IN ({", ".join(map(repr, _ENDED))})
"""
_KEPT_IF_UNTOLD = (
    "part_name",
    "part_digest",
    "nbytes",
    "stall_seconds",
    "write_seconds",
    "error",
    "staged_tier",
    "staged_bytes",
    "staged_seconds",
)
_MOMENTS = (("staged", "staged_at"), ("durable", "durable_at"))


class _Known(NamedTuple):
    """A rank's row as it stands."""

    rank: int
    state: str
    part_name: str | None
    part_digest: str | None
    nbytes: int | None
    stall_seconds: float | None
    write_seconds: float | None
    error: str | None
    staged_tier: str | None
    staged_bytes: int | None
    staged_seconds: float | None
    replicated_bytes: int | None
    staged_at: Any
    durable_at: Any


def report(tx: Transaction, generation_id: int, reports: Sequence[RankReport]) -> None:
    """Note all of the reports, or none. Rows of ranks are not under the run's lock, and there is no event."""
    _check(generation_id, reports)
    reports = list(map(as_kept, reports))
    state = queries.state_of(tx.session, tx.repository_id, generation_id)
    known = {} if state is None else _known(tx, generation_id, reports)
    changed = []
    for one in reports:
        standing = known.get(one.rank)
        if state is None or standing is None:
            raise _unexpected(generation_id, one.rank)
        if _is_news(generation_id, state, standing, one):
            changed.append(_row(generation_id, standing, one))
    if changed:
        now = tx.now()
        rows = [_dated(row, now) for row in changed]
        tx.session.update_rows("ranks", ("generation_id", "rank"), rows)


def progress(tx: Transaction, generation_id: int, rank: int, replicated_bytes: int) -> None:
    """Note how far the copy to the durable tier is. As with reports, no lock and no event."""
    found = tx.session.rows(_STATES, repository=tx.repository_id, generation=generation_id, rank=rank)
    if not found:
        raise _unexpected(generation_id, rank)
    ((state, of_rank),) = found
    if of_rank in _ENDED:
        return
    _require_writing(generation_id, state, rank)
    tx.session.execute(_PROGRESS, generation=generation_id, rank=rank, bytes=replicated_bytes)


def _check(generation_id: int, reports: Sequence[RankReport]) -> None:
    if len({one.rank for one in reports}) != len(reports):
        raise InvalidInput(f"a rank of generation {generation_id} is reported twice: report each once")
    for one in reports:
        if one.state == "durable" and (one.part_name is None or one.part_digest is None):
            raise InvalidInput(
                f"rank {one.rank} of generation {generation_id} is durable only with its part's name and digest"
            )
        if one.state == "failed" and not one.error:
            raise InvalidInput(f"rank {one.rank} of generation {generation_id} failed: say why in error")


def _known(tx: Transaction, generation_id: int, reports: Sequence[RankReport]) -> dict[int, _Known]:
    if len(reports) == 1:
        found = tx.session.rows(_ONE, generation=generation_id, rank=reports[0].rank)
    else:
        found = tx.session.rows(_ALL, generation=generation_id)
    return {known.rank: known for known in (_Known(*row) for row in found)}


def _is_news(generation_id: int, state: State, known: _Known, one: RankReport) -> bool:
    """False for a repeat; ``Conflict`` for what cannot be."""
    if known.part_digest is not None and one.part_digest is not None and known.part_digest != one.part_digest:
        raise Conflict(
            f"rank {one.rank} of generation {generation_id} reported part digest {known.part_digest} before and "
            f"{one.part_digest} now: two processes act as this rank"
        )
    if known.state == one.state and one.state in _ENDED:
        return False
    _require_writing(generation_id, state, one.rank)
    if known.state in _ENDED:
        raise Conflict(
            f"rank {one.rank} of generation {generation_id} is {known.state} already: it cannot become {one.state}",
            kind="rank_ended",
        )
    return True


def _require_writing(generation_id: int, state: str, rank: int) -> None:
    if state != State.WRITING:
        raise Conflict(
            f"generation {generation_id} is {state}, not writing: rank {rank} must stop writing to it",
            kind="not_writing",
        )


def _unexpected(generation_id: int, rank: int) -> NotFound:
    return NotFound(f"generation {generation_id} expects no rank {rank}: check the id and the launch's ranks")


def _row(generation_id: int, known: _Known, one: RankReport) -> dict[str, Any]:
    """The rank's new row: what the report leaves open stays, and progress never goes back."""
    told = {name: getattr(known if getattr(one, name) is None else one, name) for name in _KEPT_IF_UNTOLD}
    progress = [nbytes for nbytes in (known.replicated_bytes, one.replicated_bytes) if nbytes is not None]
    return {
        "generation_id": generation_id,
        "rank": one.rank,
        "state": one.state,
        **told,
        "retries": one.retries,
        "replicated_bytes": max(progress, default=None),
        "staged_at": known.staged_at,
        "durable_at": known.durable_at,
    }


def _dated(row: dict[str, Any], now: datetime) -> dict[str, Any]:
    """The first report of a state gives it its time."""
    moments = {name: now if row["state"] == state and row[name] is None else row[name] for state, name in _MOMENTS}
    return {**row, **moments, "updated_at": now}
