"""Runs: named series of generations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ckptfmt.catalog.queries import runs as queries
from ckptfmt.catalog.transaction import NOW, Transaction, lock_generation, lock_run, lock_run_named, record
from ckptfmt.errors import Conflict, InvalidInput
from ckptfmt.format.states import TRANSITIONS
from ckptfmt.ports.records import RunRecord

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
    "hold",
    "release",
    "rebuild",
    "left_out",
}
"""Kinds of the events that the catalog writes by itself."""


def ensure(tx: Transaction, name: str, key: str) -> RunRecord:
    """Find or insert the run; ``Conflict`` if the name has another key or the key another name."""
    if not name or not key:
        raise InvalidInput("a run needs a name and a key")
    inserted = tx.insert_if_absent("runs", repository_id=tx.repository_id, name=name, key=key, created_at=NOW)
    run = queries.by_name_or_key(tx.session, tx.repository_id, name, key)
    if run is None or run.name != name or run.key != key:
        raise Conflict(
            f"run {name!r} with key {key!r} meets "
            + (f"run {run.name!r} with key {run.key!r}" if run else "another run")
            + f" in the catalog {tx.url}: choose another name"
        )
    if inserted:
        lock_run(tx, run.id)
        record(tx, run.id, "run", detail={"name": name, "key": key})
    return run


def note(tx: Transaction, name: str, *, generation_id: int | None, kind: str, detail: Mapping[str, Any]) -> None:
    """Append an event that is no state change; kinds that the catalog writes itself are refused."""
    if not kind or kind in EVENT_KINDS:
        raise InvalidInput(f"a note needs a kind of its own, not {kind!r}")
    run = lock_run_named(tx, name)
    if generation_id is not None:
        owner, _ = lock_generation(tx, generation_id)
        if owner.id != run.id:
            raise InvalidInput(f"generation {generation_id} is not of run {name!r}: note it in its own run")
    record(tx, run.id, kind, generation_id=generation_id, detail=detail)


def set_retention_hold(tx: Transaction, name: str, held: bool) -> RunRecord:
    """Hold everything of a run, or let it go."""
    run = lock_run_named(tx, name)
    if run.retention_hold != held:
        tx.update("runs", "id = :run", {"retention_hold": held}, run=run.id)
        record(tx, run.id, "hold" if held else "release")
    return lock_run(tx, run.id)
