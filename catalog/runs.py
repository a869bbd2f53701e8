"""Runs: named series of generations."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select

from ckptfmt.catalog.clock import database_now
from ckptfmt.catalog.schema import runs
from ckptfmt.catalog.transaction import Transaction, lock_run, record
from ckptfmt.errors import Conflict, InvalidInput
from ckptfmt.ports.catalog import RunRecord


def ensure(tx: Transaction, name: str, key: str) -> RunRecord:
    """Find or insert the run; ``Conflict`` if the name has another key or the key another name."""
    if not name or not key:
        raise InvalidInput("a run needs a name and a key")
    inserted = tx.connection.execute(
        tx.insert_if_absent(runs).values(repository_id=tx.repository_id, name=name, key=key, created_at=database_now())
    )
    row = tx.connection.execute(
        select(runs).where(runs.c.repository_id == tx.repository_id, (runs.c.name == name) | (runs.c.key == key))
    ).first()
    if row is None or row.name != name or row.key != key:
        raise Conflict(
            f"run {name!r} with key {key!r} meets "
            + (f"run {row.name!r} with key {row.key!r}" if row else "another run")
            + f" in the catalog {tx.url}: choose another name"
        )
    if inserted.rowcount == 1:
        lock_run(tx, row.id)
        record(tx, row.id, "run", detail={"name": name, "key": key})
    return _record(row)


def every(connection: Connection, repository_id: int) -> list[RunRecord]:
    """All runs of the repository, by name."""
    query = select(runs).where(runs.c.repository_id == repository_id).order_by(runs.c.name)
    return [_record(row) for row in connection.execute(query)]


def _record(row: Row[Any]) -> RunRecord:
    return RunRecord(
        id=row.id,
        name=row.name,
        key=row.key,
        fence=row.fence,
        next_commit_seq=row.next_commit_seq,
        retention_hold=row.retention_hold,
        created_at=row.created_at,
    )
