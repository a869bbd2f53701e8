"""What the rooms of the catalog see of a database: a moment of it, and the right to change it.

Statements are text, the same for every database: ``:name`` stands for a value, ``{now}`` for the database's clock,
``{locked}`` for what keeps the selected rows from others. A SQLite session runs them on the driver itself: importing
SQLAlchemy takes longer than anything that a reader asks, and its own work on a statement takes several times
SQLite's (spec/decisions/006-statements-without-sqlalchemy.md).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, Protocol

from ckptfmt.catalog.clock import SQLITE_NOW, to_text
from ckptfmt.catalog.free_text import kept

Row = tuple[Any, ...]
Values = Mapping[str, Any]
"""Of columns, by name."""


class Snapshot(Protocol):
    """Answers queries about one moment."""

    def rows(self, query: str, **values: Any) -> list[Row]:
        """Run one statement and return its rows."""

    def table_names(self) -> list[str]:
        """All tables, sorted; those of the database's own are left out."""


class Session(Snapshot, Protocol):
    """A snapshot that may be changed, by one transaction; it shows what that has changed."""

    @property
    def one_host(self) -> bool:
        """Whether only processes of one host may use this database."""

    def execute(self, statement: str, **values: Any) -> int:
        """Run one statement that returns no rows; return how many rows it changed."""

    def insert_rows(self, table: str, rows: Sequence[Values], *, if_absent: bool = False) -> None:
        """Insert any number of rows, with values for the same columns; ``if_absent`` leaves standing ones alone."""

    def update_rows(self, table: str, keys: Sequence[str], rows: Sequence[Values]) -> None:
        """Set the columns that the rows name, the same in each, where the columns ``keys`` have their values."""

    def lift_ids(self, table: str, used: int, margin: int) -> None:
        """Leave ``margin`` ids of ``table`` free above ``used``, and above whatever was given out so far."""


class SqliteSession:
    """``Session`` on a connection that is in a transaction; of a reader's connection only ``Snapshot`` is used."""

    one_host = True

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, query: str, **values: Any) -> list[Row]:
        return self._connection.execute(_statement(query), _bound(values)).fetchall()

    def execute(self, statement: str, **values: Any) -> int:
        return self._connection.execute(_statement(statement), _bound(values)).rowcount

    def insert_rows(self, table: str, rows: Sequence[Values], *, if_absent: bool = False) -> None:
        if rows:
            names = list(rows[0])
            given = ", ".join(f":{name}" for name in names)
            statement = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({given})"
            self._each(f"{statement} ON CONFLICT DO NOTHING" if if_absent else statement, rows)

    def update_rows(self, table: str, keys: Sequence[str], rows: Sequence[Values]) -> None:
        if rows:
            changes = ", ".join(f"{name} = :{name}" for name in rows[0] if name not in keys)
            where = " AND ".join(f"{name} = :{name}" for name in keys)
            self._each(f"UPDATE {table} SET {changes} WHERE {where}", rows)

    def _each(self, statement: str, rows: Sequence[Values]) -> None:
        # No bound on the number of rows, as there is one on the parameters of a statement.
        self._connection.executemany(statement, map(_bound, rows))

    def lift_ids(self, table: str, used: int, margin: int) -> None:
        lift = "UPDATE sqlite_sequence SET seq = MAX(seq, :used) + :margin WHERE name = :name"
        if not self.execute(lift, used=used, margin=margin, name=table):
            begin = "INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :seq)"
            self.execute(begin, name=table, seq=used + margin)

    def table_names(self) -> list[str]:
        # sqlite_master is read when a connection opens: asking it costs nothing more.
        return [
            name
            for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
            if not name.startswith("sqlite_")
        ]


def from_json(stored: Any) -> Any:
    """A JSON column's value: some drivers return it decoded."""
    return json.loads(stored) if isinstance(stored, str) else stored


@cache
def _statement(template: str) -> str:
    # The lock on the whole database, taken at the beginning, covers every row.
    return template.replace("{now}", SQLITE_NOW).replace("{locked}", "")


def _bound(values: Values) -> dict[str, Any]:
    return {name: _time_text(value) if isinstance(value, datetime) else kept(value) for name, value in values.items()}


def _time_text(value: datetime) -> str:
    if value.tzinfo is None:
        raise TypeError(f"the catalog stores aware datetimes only, not {value!r}")
    return to_text(value)
