"""The history of a run: append-only, numbered from 1 without gaps."""

from __future__ import annotations

from ckptfmt.catalog.clock import moment
from ckptfmt.catalog.snapshot import Row, Snapshot, from_json
from ckptfmt.ports.records import EventRecord

_HISTORY = """
SELECT e.seq, r.name, e.generation_id, e.at, e.kind, e.from_state, e.to_state, e.actor, e.detail, e.library
FROM events AS e JOIN runs AS r ON r.id = e.run_id
WHERE r.repository_id = :repository
"""


def history(
    snapshot: Snapshot, repository_id: int, *, run: str | None, generation_id: int | None, limit: int | None
) -> list[EventRecord]:
    """Events, oldest first; with ``limit`` the newest that many, still oldest first."""
    query = _HISTORY
    if run is not None:
        query += " AND r.name = :run"
    if generation_id is not None:
        query += " AND e.generation_id = :generation"
    query += " ORDER BY e.id DESC"
    if limit is not None:
        query += " LIMIT :limit"
    found = snapshot.rows(query, repository=repository_id, run=run, generation=generation_id, limit=limit)
    return [_record(row) for row in reversed(found)]


def _record(row: Row) -> EventRecord:
    seq, run, generation_id, at, kind, from_state, to_state, actor, detail, library = row
    return EventRecord(
        seq=seq,
        run=run,
        generation_id=generation_id,
        at=moment(at),
        kind=kind,
        from_state=from_state,
        to_state=to_state,
        actor=actor,
        detail=from_json(detail),
        library=library,
    )
