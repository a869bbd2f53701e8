"""Readers: who reads a generation now, so that retention leaves it alone."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import delete, insert, select

from ckptfmt.catalog.schema import generations, readers, runs
from ckptfmt.catalog.transaction import Transaction, lock_generation
from ckptfmt.errors import InvalidInput, NotCommitted
from ckptfmt.format.states import State


def open_reader(tx: Transaction, generation_id: int, *, host: str, pid: int, ttl_seconds: float) -> int:
    """Register a reader; rows whose time is over go in the same transaction."""
    if ttl_seconds <= 0:
        raise InvalidInput("a reader needs a positive time to live")
    _, row = lock_generation(tx, generation_id)
    if row.state != State.COMMITTED:
        raise NotCommitted(f"generation {generation_id} is {row.state}, not committed: read another one")
    now = tx.now()
    siblings = select(generations.c.id).where(generations.c.run_id == row.run_id)
    tx.connection.execute(delete(readers).where(readers.c.generation_id.in_(siblings), readers.c.expires_at <= now))
    reader_id: int = tx.connection.execute(
        insert(readers)
        .values(
            generation_id=row.id,
            host=host,
            pid=pid,
            opened_at=now,
            expires_at=now + timedelta(seconds=ttl_seconds),
        )
        .returning(readers.c.id)
    ).scalar_one()
    return reader_id


def close_reader(tx: Transaction, reader_id: int) -> None:
    """Forget the reader. Idempotent; an unknown or lapsed one is gone already."""
    mine = (
        select(generations.c.id)
        .join(runs, runs.c.id == generations.c.run_id)
        .where(runs.c.repository_id == tx.repository_id)
    )
    tx.connection.execute(delete(readers).where(readers.c.id == reader_id, readers.c.generation_id.in_(mine)))
