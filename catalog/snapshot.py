"""A consistent view of the database, as the queries of ``ckptfmt.catalog.queries`` need it.

Those queries are text, the same for every database and driver. A reader of SQLite runs them on the driver itself:
importing SQLAlchemy takes longer than anything that a reader asks (spec/decisions/006-readers-without-sqlalchemy.md).
"""

from __future__ import annotations

import sqlite3
from typing import Any, Protocol

from ckptfmt.catalog.clock import SQLITE_NOW

Row = tuple[Any, ...]


class Snapshot(Protocol):
    """Answers queries about one moment."""

    def rows(self, query: str, **values: Any) -> list[Row]:
        """Run one SELECT. ``:name`` stands for a value, ``{now}`` for the database's clock."""

    def table_names(self) -> list[str]:
        """All tables, sorted; those of the database's own are left out."""


class SqliteSnapshot:
    """The view of a connection that is in a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, query: str, **values: Any) -> list[Row]:
        return self._connection.execute(query.replace("{now}", SQLITE_NOW), values).fetchall()

    def table_names(self) -> list[str]:
        # sqlite_master is read when a connection opens: asking it costs nothing more.
        return [
            name
            for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
            if not name.startswith("sqlite_")
        ]
