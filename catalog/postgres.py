"""Sessions with a PostgreSQL server: what a transaction begins with, and how its end is known.

- Connect, one transaction, close. No connection is kept: thousands of ranks would hold thousands of server processes
  for a call every few minutes, a fork would inherit them, and pgbouncer makes connecting cheap where it is not.
- A writer is READ COMMITTED: the row lock of the run orders the transactions, and what is read after it was taken is
  what the one before has committed. A reader has one snapshot (REPEATABLE READ), and may be served by a standby.
- What fails before the transaction has begun is tried again for a while, after a pause that is nobody else's. What
  fails later is not: the port's methods may be repeated by their callers, who know for how long it makes sense.
"""

from __future__ import annotations

import json
import logging
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import psycopg

from ckptfmt.catalog.clock import POSTGRESQL_NOW
from ckptfmt.catalog.database import Mode
from ckptfmt.catalog.free_text import kept
from ckptfmt.catalog.location import display
from ckptfmt.catalog.postgres_connecting import BoundedConnection, connected, parameters
from ckptfmt.catalog.postgres_failures import translate
from ckptfmt.catalog.snapshot import Row, Values
from ckptfmt.errors import CatalogError

if TYPE_CHECKING:
    from sqlalchemy import Connection

WAIT_SECONDS: Final = 10.0
"""For how long a connection is tried to be made."""
_log = logging.getLogger("ckptfmt")
# Of its own: the module's global generator belongs to the training, whose next number must not depend on us.
_JITTER: Final = random.SystemRandom()
_BOUNDS: Final = """
SET LOCAL lock_timeout = '5s'; SET LOCAL statement_timeout = '30s';
SET LOCAL idle_in_transaction_session_timeout = '10s';
"""
# Nobody who saves waits for a reader, and comparing a schema takes a busy machine long.
_EXAMINED: Final = f"{_BOUNDS} SET LOCAL idle_in_transaction_session_timeout = '60s';"
# A commit that the server might forget is none. What is stronger than "on" stays.
_DURABLE: Final = """
SELECT set_config('synchronous_commit', 'on', true)
WHERE current_setting('synchronous_commit') NOT IN ('on', 'remote_apply');
"""
_SETTLED: Final = f"{_BOUNDS} {_DURABLE} SELECT pg_is_in_recovery(), current_setting('fsync') = 'on'"
_READ: Final = f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {_BOUNDS}"
# Said each time: the default of a role or a database may be another one.
_BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED;"
_WRITE: Final = f"{_BEGIN} {_SETTLED}"
_NAME: Final = re.compile(r"(?<![:\w]):([a-z_][a-z0-9_]*)")


class PostgresSession:
    """``Session`` on a connection that is in a transaction; of a reader's only ``Snapshot`` is used."""

    one_host = False

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def rows(self, query: str, **values: Any) -> list[Row]:
        return self._run(query, values).fetchall()

    def execute(self, statement: str, **values: Any) -> int:
        return self._run(statement, values).rowcount

    def insert_rows(self, table: str, rows: Sequence[Values], *, if_absent: bool = False) -> None:
        if rows:
            names = ", ".join(rows[0])
            end = " ON CONFLICT DO NOTHING" if if_absent else ""
            self._run(f"INSERT INTO {table} ({names}) SELECT {names} FROM {_recordset(table)}{end}", _given(rows))

    def update_rows(self, table: str, keys: Sequence[str], rows: Sequence[Values]) -> None:
        if rows:
            changes = ", ".join(f"{name} = given.{name}" for name in rows[0] if name not in keys)
            where = " AND ".join(f"standing.{name} = given.{name}" for name in keys)
            statement = f"UPDATE {table} AS standing SET {changes} FROM {_recordset(table)} AS given WHERE {where}"
            self._run(statement, _given(rows))

    def lift_ids(self, table: str, used: int, margin: int) -> None:
        # The sequence is outside the transaction: should that be undone, ids are skipped, which harms nothing.
        sequence = "pg_get_serial_sequence(:table, 'id')"
        last = f"COALESCE(pg_sequence_last_value({sequence}::regclass), 0)"
        self._run(
            f"SELECT setval({sequence}, GREATEST({last}, :used) + :margin)",
            {"table": table, "used": used, "margin": margin},
        )

    def table_names(self) -> list[str]:
        query = "SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema()"
        return sorted(name for (name,) in self.rows(query))

    def _run(self, template: str, values: Values) -> psycopg.Cursor[Row]:
        # In binary form, which no setting of a role changes (DateStyle, extra_float_digits).
        return self._connection.execute(_statement(template), _bound(values), binary=True)


class PostgresSessions:
    """Transactions on one server's database. Safe to use from any thread and in forked children."""

    def __init__(self, url: str, *, mode: Mode, wait_seconds: float = WAIT_SECONDS) -> None:
        self.mode = mode
        self._url = url
        self._shown = display(url)
        self._parameters = parameters(url)
        self._wait_seconds = wait_seconds
        self._closed = False
        self._warned = False

    @contextmanager
    def read(self) -> Iterator[PostgresSession]:
        """A consistent snapshot; nothing is held after the block."""
        with self._begun(_READ) as connection:
            yield PostgresSession(connection)

    @contextmanager
    def write(self) -> Iterator[PostgresSession]:
        """The right to write, committed at the end of the block. Any exception closes the connection, which undoes."""
        if self.mode == "r":
            raise CatalogError(f"the catalog {self._shown} was opened for reading: open the repository with mode='w'")
        with self._begun(_WRITE) as connection:
            yield PostgresSession(connection)
            self._commit(connection)

    @contextmanager
    def trial(self) -> Iterator[PostgresSession]:
        """A transaction that is always undone."""
        with self._begun(f"{_BEGIN} {_BOUNDS}") as connection:
            yield PostgresSession(connection)

    @contextmanager
    def held(self) -> Iterator[PostgresSession]:
        """A transaction that may idle for as long as this process lives; always undone."""
        with self._begun(f"{_BEGIN} SET LOCAL idle_in_transaction_session_timeout = 0") as connection:
            yield PostgresSession(connection)

    @contextmanager
    def alembic(self, *, write: bool) -> Iterator[Connection]:
        """A transaction on a SQLAlchemy connection, which Alembic needs; committed at the end if it may ``write``."""
        from ckptfmt.catalog.postgres_engine import driver_connection, postgres_engine

        opened: list[psycopg.Connection[Any]] = []

        def connect() -> psycopg.Connection[Any]:
            made = connected(self._parameters, self._url, autocommit=False)
            opened.append(made)
            # A snapshot of the whole transaction would be from before the lock, and show no schema that others made.
            made.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            return made

        try:
            with postgres_engine(connect).connect() as connection:
                connection.begin()
                facts = _last(driver_connection(connection).execute(_SETTLED if write else _EXAMINED))
                if write:
                    self._require_primary(facts)
                yield connection
                if write:
                    connection.commit()
        finally:
            for each in opened:
                each.close()

    def close(self) -> None:
        self._closed = True

    @contextmanager
    def _begun(self, begin: str) -> Iterator[BoundedConnection]:
        if self._closed:
            raise CatalogError(f"the catalog {self._shown} was closed: open the repository again")
        connection = self._connected(begin)
        try:
            yield connection
        finally:
            connection.close()

    def _connected(self, begin: str) -> BoundedConnection:
        """Connect and begin; while that fails for a reason that may pass, again."""
        until, pause = time.monotonic() + self._wait_seconds, 0.05
        while True:
            try:
                return self._connect(begin)
            except psycopg.Error as error:
                if not translate(error, self._shown).transient or time.monotonic() + pause > until:
                    raise
            time.sleep(_JITTER.uniform(pause / 2, pause))
            pause = min(2 * pause, 1.0)

    def _connect(self, begin: str) -> BoundedConnection:
        connection = connected(self._parameters, self._url)
        try:
            facts = _last(connection.execute(begin))
            if begin is _WRITE:
                self._require_primary(facts)
        except BaseException:
            connection.close()
            raise
        return connection

    def _require_primary(self, facts: Row) -> None:
        in_recovery, synced = facts
        if in_recovery:
            raise CatalogError(
                f"catalog {self._shown}: the server is a standby, which takes no changes: name the primary, or wait "
                "until it is promoted",
                kind="catalog_read_only",
                transient=True,
            )
        if not synced and not self._warned:
            self._warned = True
            _log.warning("catalog %s: the server runs with fsync=off and may forget commits", self._shown)

    def _commit(self, connection: BoundedConnection) -> None:
        """A transaction that failed before answers COMMIT with ROLLBACK, and without an error."""
        told = connection.execute("COMMIT").statusmessage
        if told != "COMMIT":
            raise CatalogError(
                f"catalog {self._shown} answered {told} to COMMIT; nothing was changed: repeat the call", transient=True
            )


def _last(cursor: psycopg.Cursor[Row]) -> Row:
    """The row of the last of several statements, which were sent in one message; empty if it has none."""
    while cursor.nextset():
        pass
    return (cursor.fetchone() or ()) if cursor.description else ()


def _recordset(table: str) -> str:
    """Any number of rows in one parameter, with the types of the table's columns."""
    return f"jsonb_populate_recordset(NULL::{table}, :rows::jsonb)"


def _given(rows: Sequence[Values]) -> dict[str, Any]:
    return {"rows": json.dumps([{name: _plain(value) for name, value in row.items()} for row in rows])}


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else kept(value)


def _bound(values: Values) -> dict[str, Any]:
    return {name: kept(value) for name, value in values.items()}


@cache
def _statement(template: str) -> str:
    text = template.replace("%", "%%").replace("{now}", POSTGRESQL_NOW).replace("{locked}", " FOR UPDATE")
    return _NAME.sub(r"%(\1)s", text)
