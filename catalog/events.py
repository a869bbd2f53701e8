"""The history of a run: append-only, numbered from 1 without gaps."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, func, insert, select

from ckptfmt.catalog.column_types import database_now
from ckptfmt.catalog.schema import events
from ckptfmt.format.states import State


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
