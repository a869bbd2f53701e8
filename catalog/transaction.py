"""One writing transaction: the run's lock, the fence, and the compare-and-swap of a generation's state."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from ckptfmt.__about__ import __version__
from ckptfmt.catalog.events import append
from ckptfmt.catalog.queries import generations, identity, launches, runs
from ckptfmt.catalog.snapshot import Session
from ckptfmt.errors import CatalogError, Conflict, Fenced, NotFound
from ckptfmt.format.states import TRANSITIONS, State
from ckptfmt.ports.records import GenerationRecord, LaunchRecord, RunRecord

NOW: Final = object()
"""As a value of ``insert`` or ``update``: the database's clock when the statement runs."""


@dataclass(frozen=True)
class Transaction:
    """A session that may write, and on whose behalf. ``repository_id`` bounds everything it may touch."""

    session: Session
    repository_id: int
    url: str

    def now(self) -> datetime:
        """The database's clock. Ask after the lock: waiting for it takes time."""
        return identity.now(self.session)

    def epoch(self) -> int:
        return identity.identity(self.session).epoch

    def insert(self, table: str, **values: Any) -> None:
        self.session.execute(_insert(table, values), **_given(values))

    def insert_new(self, table: str, **values: Any) -> int:
        """Insert a row whose id the database chooses; return the id."""
        ((id,),) = self.session.rows(f"{_insert(table, values)} RETURNING id", **_given(values))
        return int(id)

    def insert_if_absent(self, table: str, **values: Any) -> bool:
        """Leave an existing row alone, for rows that have no lock to be taken before. False: there was one."""
        return self.session.execute(f"{_insert(table, values)} ON CONFLICT DO NOTHING", **_given(values)) == 1

    def update(self, table: str, where: str, changes: Mapping[str, Any], **values: Any) -> int:
        """Set columns where a condition on ``values`` holds; return how many rows it held for."""
        columns = ", ".join(f"{name} = {_expression(value, f'new_{name}')}" for name, value in changes.items())
        given = {f"new_{name}": value for name, value in _given(changes).items()}
        return self.session.execute(f"UPDATE {table} SET {columns} WHERE {where}", **given, **values)


def _insert(table: str, values: Mapping[str, Any]) -> str:
    expressions = ", ".join(_expression(value, name) for name, value in values.items())
    return f"INSERT INTO {table} ({', '.join(values)}) VALUES ({expressions})"


def _expression(value: Any, name: str) -> str:
    return "{now}" if value is NOW else f":{name}"


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not NOW}


def lock_run(tx: Transaction, run_id: int, *, fence: int | None = None) -> RunRecord:
    """Lock the run's row and return it. ``Fenced`` unless ``fence`` is None or the run's."""
    run = runs.locked(tx.session, tx.repository_id, run_id)
    if run is None:
        raise CatalogError(f"the catalog {tx.url} has no run {run_id} in this repository: run `ckptfmt db check`")
    if fence is not None and run.fence != fence:
        raise _fenced(tx, run, fence)
    return run


def lock_run_named(tx: Transaction, name: str) -> RunRecord:
    """Lock the run called ``name``; ``NotFound`` if there is none."""
    run = runs.locked_by_name(tx.session, tx.repository_id, name)
    if run is None:
        raise NotFound(f"the catalog {tx.url} has no run {name!r}: list its runs with `ckptfmt ls`")
    return run


def lock_launch(tx: Transaction, launch_id: int, *, fence: int | None = None) -> tuple[RunRecord, LaunchRecord]:
    """Lock the launch's run; return run and launch, read under the lock."""
    run_id = launches.run_id_of(tx.session, tx.repository_id, launch_id)
    if run_id is None:
        raise NotFound(
            f"the catalog {tx.url} has no launch {launch_id} in this repository: it was rebuilt, or an older copy "
            "of it put back, since that launch began; open the repository again, for a new launch"
        )
    run = lock_run(tx, run_id, fence=fence)
    return run, launches.by_id(tx.session, tx.repository_id, launch_id)


def lock_generation(
    tx: Transaction, generation_id: int, *, fence: int | None = None
) -> tuple[RunRecord, GenerationRecord]:
    """Lock the generation's run; return run and generation, read under the lock."""
    run_id = generations.run_id_of(tx.session, tx.repository_id, generation_id)
    if run_id is None:
        raise NotFound(
            f"the catalog {tx.url} has no generation {generation_id} in this repository: "
            "list generations with `ckptfmt ls`"
        )
    run = lock_run(tx, run_id, fence=fence)
    return run, generations.by_id(tx.session, tx.repository_id, generation_id)


def move(
    tx: Transaction,
    run: RunRecord,
    generation: GenerationRecord,
    name: str,
    values: Mapping[str, Any],
    detail: Mapping[str, Any],
) -> None:
    """Take the transition called ``name`` by compare-and-swap, and write the event of it."""
    source = generation.state
    target = next((step.target for step in TRANSITIONS if step.name == name and step.source == source), None)
    if target is None:
        raise Conflict(f"generation {generation.id} is {source}: {name} is not possible from there")
    changed = tx.update(
        "generations",
        "id = :id AND state = :source",
        {"state": target, **values},
        id=generation.id,
        source=source,
    )
    if changed != 1:
        raise CatalogError(
            f"generation {generation.id} changed its state under the lock of its run: another program writes to the "
            f"catalog {tx.url} without locking; stop it and repeat",
            transient=True,
        )
    record(tx, run.id, name, generation_id=generation.id, source=source, target=target, detail=detail)


def record(
    tx: Transaction,
    run_id: int,
    kind: str,
    *,
    generation_id: int | None = None,
    source: State | None = None,
    target: State | None = None,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Append one event under the run's lock."""
    append(
        tx.session,
        run_id=run_id,
        generation_id=generation_id,
        kind=kind,
        from_state=source,
        to_state=target,
        actor=actor(),
        detail=dict(detail or {}),
        library=__version__,
    )


def actor() -> str:
    """``host:pid`` of this process, as events and pins record it."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _fenced(tx: Transaction, run: RunRecord, fence: int) -> Fenced:
    newer = launches.with_fence(tx.session, tx.repository_id, run.id, run.fence)
    owner = f"launch {newer.id} (host {newer.host}, pid {newer.pid})" if newer else "another launch"
    return Fenced(
        f"run {run.name!r} belongs to {owner} with fence {run.fence}; this process has fence {fence}: "
        "it must stop saving to the run"
    )
