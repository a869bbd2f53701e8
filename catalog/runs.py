"""Runs: named series of generations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Row, select

from ckptfmt.catalog.column_types import database_now
from ckptfmt.catalog.schema import runs
from ckptfmt.catalog.transaction import Transaction, lock_generation, lock_run, lock_run_named, record
from ckptfmt.errors import Conflict, InvalidInput
from ckptfmt.format.states import TRANSITIONS
from ckptfmt.ports.catalog import RunRecord

EVENT_KINDS: Final = frozenset(step.name for step in TRANSITIONS) | {
    "run",
    "launch",
    "close",
    "restore",
    "begin",
    "skip",
    "prove",
    "sweep",
    "tag",
    "untag",
    "pin",
    "unpin",
    "quarantine",
}
"""Kinds of the events that the catalog writes by itself."""


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


def note(tx: Transaction, name: str, *, generation_id: int | None, kind: str, detail: Mapping[str, Any]) -> None:
    """Append an event that is no state change; kinds that the catalog writes itself are refused."""
    if not kind or kind in EVENT_KINDS:
        raise InvalidInput(f"a note needs a kind of its own, not {kind!r}")
    run = lock_run_named(tx, name)
    if generation_id is not None:
        _, generation = lock_generation(tx, generation_id)
        if generation.run_id != run.id:
            raise InvalidInput(f"generation {generation_id} is not of run {name!r}: note it in its own run")
    record(tx, run.id, kind, generation_id=generation_id, detail=detail)


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
