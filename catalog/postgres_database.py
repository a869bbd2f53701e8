"""A catalog in a database of a PostgreSQL server: migrated under an advisory lock, examined through its system tables.

The tables lie in the first schema of the role's ``search_path`` (as a rule ``public``). The database itself is its
operator's: it is neither made nor moved here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal

from ckptfmt.catalog.database import Mode, Problem
from ckptfmt.catalog.failures import translated
from ckptfmt.catalog.location import display
from ckptfmt.catalog.revision import VERSION_TABLE, stored_revision
from ckptfmt.catalog.snapshot import Snapshot
from ckptfmt.errors import CatalogError, Conflict, InvalidInput

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from ckptfmt.catalog.postgres import PostgresSessions

# Locks of the whole database, by a number that nobody else is likely to have: eight letters.
_MIGRATING: Final = int.from_bytes(b"ckptfmtM")
_REBUILDING: Final = int.from_bytes(b"ckptfmtR")


class PostgresDatabase:
    """``ckptfmt.catalog.database.Database`` of a server."""

    dialect: Literal["postgresql"] = "postgresql"

    def __init__(self, url: str) -> None:
        self._url = url
        self._shown = display(url)

    def exists(self) -> bool:
        return True

    def sessions(self, mode: Mode, *, wait_seconds: float | None = None) -> PostgresSessions:
        try:
            from ckptfmt.catalog.postgres import WAIT_SECONDS, PostgresSessions
        except ImportError as error:
            raise InvalidInput(
                f"the catalog {self._shown} needs psycopg ({error}): pip install 'ckptfmt[postgres]'"
            ) from error
        return PostgresSessions(
            self._url, mode=mode, wait_seconds=WAIT_SECONDS if wait_seconds is None else wait_seconds
        )

    def settle(self) -> None:
        """Nothing is left to be put right: every transaction sets what it needs."""

    @contextmanager
    def migrating(self) -> Iterator[tuple[Connection, Snapshot]]:
        with self.sessions("w").alembic(write=True) as connection:
            from ckptfmt.catalog.postgres import PostgresSession
            from ckptfmt.catalog.postgres_engine import driver_connection

            session = PostgresSession(driver_connection(connection))
            session.execute("SET LOCAL lock_timeout = '30s'")
            session.rows("SELECT pg_advisory_xact_lock(:key)", key=_MIGRATING)
            session.execute("SET LOCAL lock_timeout = '5s'")
            yield connection, session

    @contextmanager
    def inspecting(self) -> Iterator[Connection]:
        with self.sessions("r").alembic(write=False) as connection:
            yield connection

    def examine(self, snapshot: Snapshot) -> Iterator[Problem]:
        from ckptfmt.catalog.postgres_objects import examined

        yield from examined(snapshot, self.sessions("r"))

    def set_aside(self) -> str | None:
        with self.sessions("r").read() as snapshot:
            # The version alone would be taken for the schema, which nobody would make then.
            if not set(snapshot.table_names()) - {VERSION_TABLE} and stored_revision(snapshot, self._shown) is None:
                return None
        raise CatalogError(
            f"the catalog {self._shown} is damaged, and nothing is moved on a server: keep it (`pg_dump`), then make "
            "another database (`createdb`) and name that one with --catalog, or drop this one's tables "
            "(`DROP SCHEMA ... CASCADE`, `CREATE SCHEMA ...`) and repeat",
            kind="catalog_damaged",
        )

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """The lock is one transaction's, for a pooler gives the next one another session."""
        with translated(self._shown), self.sessions("r").held() as session:
            ((alone,),) = session.rows("SELECT pg_try_advisory_xact_lock(:key)", key=_REBUILDING)
            if not alone:
                raise Conflict(
                    f"another process is rebuilding the catalog {self._shown} now: wait for it and look at its result",
                    kind="rebuild_running",
                )
            yield
