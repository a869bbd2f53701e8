"""What ranks report of a generation (C2): each its own row, or one process for all of them."""

from __future__ import annotations

from collections.abc import Sequence
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
SELECT rank, state, part_name, part_digest, nbytes, stall_seconds, write_seconds, error
FROM ranks WHERE generation_id = :generation{one} ORDER BY rank{{locked}}
"""
_ALL, _ONE = _KNOWN.format(one=""), _KNOWN.format(one=" AND rank = :rank")


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
            raise NotFound(
                f"generation {generation_id} expects no rank {one.rank}: check the id and the launch's ranks"
            )
        if _is_news(generation_id, state, standing, one):
            changed.append(_row(generation_id, standing, one))
    if changed:
        now = tx.now()
        rows = [{**row, "updated_at": now} for row in changed]
        tx.session.update_rows("ranks", ("generation_id", "rank"), rows)


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
    if state != State.WRITING:
        raise Conflict(
            f"generation {generation_id} is {state}, not writing: rank {one.rank} must stop writing to it",
            kind="not_writing",
        )
    if known.state in _ENDED:
        raise Conflict(
            f"rank {one.rank} of generation {generation_id} is {known.state} already: it cannot become {one.state}",
            kind="rank_ended",
        )
    return True


def _row(generation_id: int, known: _Known, one: RankReport) -> dict[str, Any]:
    """The rank's new row: what the report leaves open stays."""
    return {
        "generation_id": generation_id,
        "rank": one.rank,
        "state": one.state,
        "part_name": known.part_name if one.part_name is None else one.part_name,
        "part_digest": known.part_digest if one.part_digest is None else one.part_digest,
        "nbytes": known.nbytes if one.nbytes is None else one.nbytes,
        "stall_seconds": known.stall_seconds if one.stall_seconds is None else one.stall_seconds,
        "write_seconds": known.write_seconds if one.write_seconds is None else one.write_seconds,
        "retries": one.retries,
        "error": known.error if one.error is None else one.error,
    }
