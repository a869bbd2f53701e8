"""One database that holds a catalog, of whatever kind: where sessions with it come from, and how it is looked after."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ckptfmt.catalog.location import is_postgres
from ckptfmt.catalog.snapshot import Session, Snapshot

if TYPE_CHECKING:
    from sqlalchemy import Connection

Mode = Literal["r", "w"]


@dataclass(frozen=True)
class Problem:
    """One thing in a database that is not as this library expects it."""

    text: str
    foreign: bool = False
    """Somebody's own object beside ours: nothing is damaged by it."""


class Sessions(Protocol):
    """Transactions on one database. Safe to use from any thread and in forked children."""

    def read(self) -> AbstractContextManager[Snapshot]:
        """A consistent snapshot; nothing is held after the block."""

    def write(self) -> AbstractContextManager[Session]:
        """A transaction that is committed at the end of the block, and undone by any exception."""

    def close(self) -> None: ...


class Database(Protocol):
    """Where a catalog URL leads to. Nothing is opened before a method needs it."""

    @property
    def dialect(self) -> Literal["sqlite", "postgresql"]: ...

    def exists(self) -> bool:
        """Whether there is something to be opened. A server is not asked: opening tells."""

    def sessions(self, mode: Mode, *, wait_seconds: float | None = None) -> Sessions:
        """``wait_seconds``: how long to wait for others, or for the server, before it is an error."""

    def settle(self) -> None:
        """What has to be put right before anything is written to a database that has its schema."""

    def migrating(self) -> AbstractContextManager[tuple[Connection, Snapshot]]:
        """The only transaction that may change the schema now, committed at the end of the block."""

    def inspecting(self) -> AbstractContextManager[Connection]:
        """A transaction for Alembic's questions."""

    def examine(self, snapshot: Snapshot) -> Iterator[Problem]:
        """What is wrong with the data, and with triggers and views, as only this kind of database can tell."""

    def set_aside(self) -> str | None:
        """Keep what is there under another name and leave the place empty; the name, None if there was nothing."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Be the only one that rebuilds the catalog. Whoever dies lets go.

        ``Conflict`` of the kind ``rebuild_running`` while somebody else is at it.
        """


def database_of(url: str) -> Database:
    """The database that a catalog URL names; ``InvalidInput`` if it names none."""
    if is_postgres(url):
        from ckptfmt.catalog.postgres_database import PostgresDatabase

        return PostgresDatabase(url)
    from ckptfmt.catalog.sqlite_database import SqliteDatabase

    return SqliteDatabase(url)


def own_tables() -> Set[str]:
    """Names of the tables of the schema. Loads SQLAlchemy."""
    from ckptfmt.catalog.schema import metadata

    return metadata.tables.keys()
