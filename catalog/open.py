"""Opening a catalog: the only door through which ``ckptfmt.connect`` comes.

Reading imports neither alembic nor SQLAlchemy: both take longer than anything that a reader asks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckptfmt.catalog.database import Database, Sessions, database_of
from ckptfmt.catalog.failures import translated
from ckptfmt.catalog.filesystems import check_local, filesystem_type
from ckptfmt.catalog.location import display, sqlite_path
from ckptfmt.catalog.queries import identity
from ckptfmt.catalog.reader import ReadOnlyCatalog
from ckptfmt.catalog.revision import require_head, stored_revision
from ckptfmt.errors import NotFound

if TYPE_CHECKING:
    from ckptfmt.ports.catalog import Catalog


def open_catalog(
    url: str,
    *,
    repository: str,
    display_url: str,
    mode: Literal["r", "w"],
    create: bool,
    busy_seconds: float | None = None,
    filesystem: Callable[[Path], str] = filesystem_type,
) -> Catalog:
    """Open the catalog at ``url`` for the repository with the uuid ``repository``.

    ``mode="r"`` opens the database read-only and changes nothing. ``create`` (with ``mode="w"``) makes the schema where
    there is none (and a SQLite file; a server's database is its operator's to make), and registers the repository as
    being at ``display_url``. ``busy_seconds`` is how long a call waits for others, or for a server that does not
    answer. ``filesystem`` tells the type of the file system that holds a SQLite file.

    Raises ``NotFound`` where there is no database or it does not know the repository, ``CatalogError`` for a
    database of something else, an older or newer schema, or a file system that SQLite cannot trust, and
    ``InvalidInput`` for a URL that names no catalog.
    """
    database = database_of(url)
    shown = display(url)
    if mode == "w" and database.dialect == "sqlite":
        check_local(sqlite_path(url), filesystem(sqlite_path(url)))
    if not database.exists() and not (mode == "w" and create):
        raise NotFound(
            f"there is no catalog {shown}: check the URL, or create the repository by opening it for writing"
        )
    sessions = database.sessions(mode, wait_seconds=busy_seconds)
    with ExitStack() as opened:
        opened.callback(sessions.close)
        with translated(shown):
            if mode == "w":
                _prepare(database, sessions, url, create=create)
            known = _known(sessions, repository, shown)
            if known is None and mode == "w" and create:
                from ckptfmt.catalog.registration import register

                with sessions.write() as session:
                    register(session, repository, display_url)
                known = _known(sessions, repository, shown)
        if known is None:
            raise NotFound(
                f"the catalog {shown} does not know the repository {repository}: name the catalog that governs it "
                "(catalog=... or CKPTFMT_CATALOG)"
            )
        opened.pop_all()
    if mode == "r":
        return ReadOnlyCatalog(sessions, url=shown, repository=repository, repository_id=known)
    from ckptfmt.catalog.sql import SqlCatalog

    return SqlCatalog(sessions, url=shown, repository=repository, repository_id=known)


def _known(sessions: Sessions, repository: str, shown: str) -> int | None:
    """Id of the repository, from a catalog whose schema is this library's."""
    with sessions.read() as snapshot:
        require_head(stored_revision(snapshot, shown), shown)
        found = identity.repository(snapshot, repository)
        return None if found is None else found[0]


def _prepare(database: Database, sessions: Sessions, url: str, *, create: bool) -> None:
    """Create the schema of an empty database, or put right what has to be before anything is written."""
    if create:
        revision = None
        if database.exists():
            with sessions.read() as snapshot:
                revision = stored_revision(snapshot, display(url))
        if revision is None:
            from ckptfmt.catalog.upgrade import create_schema

            create_schema(url)
            return
    database.settle()
