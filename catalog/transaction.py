"""One writing transaction: the run's lock, the fence, and the compare-and-swap of a generation's state."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Connection, Row, Table, TextClause, inspect, select, text, update
from sqlalchemy.sql import Insert

from ckptfmt.__about__ import __version__
from ckptfmt.catalog.clock import NOW
from ckptfmt.catalog.column_types import database_now
from ckptfmt.catalog.events import append
from ckptfmt.catalog.schema import catalog_meta, generations, launches, runs
from ckptfmt.errors import CatalogError, Conflict, Fenced, NotFound
from ckptfmt.format.states import TRANSITIONS, State


class ConnectionSnapshot:
    """What ``ckptfmt.catalog.queries`` sees of a SQLAlchemy connection: with what it has written itself."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def rows(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        statement = _statement(query, self._connection.dialect.name)
        return [tuple(row) for row in self._connection.execute(statement, values)]

    def table_names(self) -> list[str]:
        return sorted(inspect(self._connection).get_table_names())


@cache
def _statement(query: str, dialect: str) -> TextClause:
    return text(query.replace("{now}", NOW[dialect]))


@dataclass(frozen=True)
class Transaction:
    """A connection that may write, and on whose behalf. ``repository_id`` bounds everything it may touch."""

    connection: Connection
    repository_id: int
    url: str

    @property
    def snapshot(self) -> ConnectionSnapshot:
        """What this transaction sees."""
        return ConnectionSnapshot(self.connection)

    def now(self) -> datetime:
        """The database's clock. Ask after the lock: waiting for it takes time."""
        return self.connection.execute(select(database_now())).scalar_one()

    def epoch(self) -> int:
        return int(self.connection.execute(select(catalog_meta.c.epoch)).scalar_one())

    def insert_if_absent(self, table: Table) -> Insert:
        """An INSERT that leaves an existing row alone, for rows that have no lock to be taken before."""
        if self.connection.dialect.name == "sqlite":
            from sqlalchemy.dialects import sqlite

            return sqlite.insert(table).on_conflict_do_nothing()
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table).on_conflict_do_nothing()


def lock_run(tx: Transaction, run_id: int, *, fence: int | None = None) -> Row[Any]:
    """Lock the run's row and return it. ``Fenced`` unless ``fence`` is None or the run's."""
    run = tx.connection.execute(
        select(runs).where(runs.c.id == run_id, runs.c.repository_id == tx.repository_id).with_for_update()
    ).one()
    if fence is not None and run.fence != fence:
        raise _fenced(tx, run, fence)
    return run


def lock_run_named(tx: Transaction, name: str) -> Row[Any]:
    """Lock the run called ``name``; ``NotFound`` if there is none."""
    run = tx.connection.execute(
        select(runs).where(runs.c.name == name, runs.c.repository_id == tx.repository_id).with_for_update()
    ).one_or_none()
    if run is None:
        raise NotFound(f"the catalog {tx.url} has no run {name!r}: list its runs with `ckptfmt ls`")
    return run


def lock_launch(tx: Transaction, launch_id: int, *, fence: int | None = None) -> tuple[Row[Any], Row[Any]]:
    """Lock the launch's run; return run and launch, read under the lock."""
    run_id = tx.connection.execute(
        select(launches.c.run_id)
        .join(runs, runs.c.id == launches.c.run_id)
        .where(launches.c.id == launch_id, runs.c.repository_id == tx.repository_id)
    ).scalar_one_or_none()
    if run_id is None:
        raise NotFound(f"the catalog {tx.url} has no launch {launch_id} in this repository")
    run = lock_run(tx, run_id, fence=fence)
    return run, tx.connection.execute(select(launches).where(launches.c.id == launch_id)).one()


def lock_generation(tx: Transaction, generation_id: int, *, fence: int | None = None) -> tuple[Row[Any], Row[Any]]:
    """Lock the generation's run; return run and generation, read under the lock."""
    run_id = tx.connection.execute(
        select(generations.c.run_id).where(
            generations.c.id == generation_id, generations.c.repository_id == tx.repository_id
        )
    ).scalar_one_or_none()
    if run_id is None:
        raise NotFound(
            f"the catalog {tx.url} has no generation {generation_id} in this repository: "
            "list generations with `ckptfmt ls`"
        )
    run = lock_run(tx, run_id, fence=fence)
    return run, tx.connection.execute(select(generations).where(generations.c.id == generation_id)).one()


def move(
    tx: Transaction, generation: Row[Any], name: str, values: Mapping[str, Any], detail: Mapping[str, Any]
) -> None:
    """Take the transition called ``name`` by compare-and-swap, and write the event of it."""
    source = State(generation.state)
    target = next((step.target for step in TRANSITIONS if step.name == name and step.source == source), None)
    if target is None:
        raise Conflict(f"generation {generation.id} is {source}: {name} is not possible from there")
    result = tx.connection.execute(
        update(generations)
        .where(generations.c.id == generation.id, generations.c.state == source)
        .values(state=target, **values)
    )
    if result.rowcount != 1:
        raise CatalogError(
            f"generation {generation.id} changed its state under the lock of its run: another program writes to the "
            f"catalog {tx.url} without locking; stop it and repeat",
            transient=True,
        )
    record(tx, generation.run_id, name, generation_id=generation.id, source=source, target=target, detail=detail)


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
        tx.connection,
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


def _fenced(tx: Transaction, run: Row[Any], fence: int) -> Fenced:
    newer = tx.connection.execute(
        select(launches).where(launches.c.run_id == run.id, launches.c.fence == run.fence)
    ).one_or_none()
    owner = f"launch {newer.id} (host {newer.host}, pid {newer.pid})" if newer else "another launch"
    return Fenced(
        f"run {run.name!r} belongs to {owner} with fence {run.fence}; this process has fence {fence}: "
        "it must stop saving to the run"
    )
