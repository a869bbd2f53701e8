"""Readers: who reads a generation now, so that retention leaves it alone."""

from __future__ import annotations

from datetime import timedelta

from ckptfmt.catalog.transaction import Transaction, lock_generation
from ckptfmt.errors import InvalidInput, NotCommitted
from ckptfmt.format.states import State

_FORGET_LAPSED = """
DELETE FROM readers
WHERE expires_at <= :now AND generation_id IN (SELECT id FROM generations WHERE run_id = :run)
"""
_FORGET = """
DELETE FROM readers
WHERE id = :reader AND generation_id IN (SELECT id FROM generations WHERE repository_id = :repository)
"""


def open_reader(tx: Transaction, generation_id: int, *, host: str, pid: int, ttl_seconds: float) -> int:
    """Register a reader; rows whose time is over go in the same transaction."""
    if ttl_seconds <= 0:
        raise InvalidInput("a reader needs a positive time to live")
    run, generation = lock_generation(tx, generation_id)
    if generation.state != State.COMMITTED:
        raise NotCommitted(f"generation {generation_id} is {generation.state}, not committed: read another one")
    now = tx.now()
    tx.session.execute(_FORGET_LAPSED, now=now, run=run.id)
    return tx.insert_new(
        "readers",
        generation_id=generation.id,
        host=host,
        pid=pid,
        opened_at=now,
        expires_at=now + timedelta(seconds=ttl_seconds),
    )


def close_reader(tx: Transaction, reader_id: int) -> None:
    """Forget the reader. Idempotent; an unknown or lapsed one is gone already."""
    tx.session.execute(_FORGET, reader=reader_id, repository=tx.repository_id)
