"""The history of a run: append-only, numbered from 1 without gaps."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, func, insert, select

from ckptfmt.catalog.clock import database_now
from ckptfmt.catalog.schema import events, runs
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import EventRecord


def append(
    connection: Connection,
    *,
    run_id: int,
    generation_id: int | None,
    kind: str,
    from_state: State | None,
    to_state: State | None,
    actor: str,
    detail: dict[str, Any],
    library: str,
) -> None:
    """Write the next event of a run whose lock is held."""
    # Events are never deleted and the lock is held, so the largest number plus one is the next.
    latest = connection.execute(select(func.max(events.c.seq)).where(events.c.run_id == run_id)).scalar_one()
    connection.execute(
        insert(events).values(
            run_id=run_id,
            seq=(latest or 0) + 1,
            generation_id=generation_id,
            at=database_now(),
            kind=kind,
            from_state=from_state,
            to_state=to_state,
            actor=actor,
            detail=detail,
            library=library,
        )
    )


def history(
    connection: Connection, repository_id: int, *, run: str | None, generation_id: int | None, limit: int | None
) -> list[EventRecord]:
    """Events, oldest first; with ``limit`` the newest that many, still oldest first."""
    query = (
        select(events, runs.c.name.label("run"))
        .join(runs, runs.c.id == events.c.run_id)
        .where(runs.c.repository_id == repository_id)
    )
    if run is not None:
        query = query.where(runs.c.name == run)
    if generation_id is not None:
        query = query.where(events.c.generation_id == generation_id)
    rows = connection.execute(query.order_by(events.c.id.desc()).limit(limit)).all()
    return [
        EventRecord(
            seq=row.seq,
            run=row.run,
            generation_id=row.generation_id,
            at=row.at,
            kind=row.kind,
            from_state=row.from_state,
            to_state=row.to_state,
            actor=row.actor,
            detail=row.detail,
            library=row.library,
        )
        for row in reversed(rows)
    ]
