"""Opening a catalog: the only door through which ``ckptfmt.connect`` comes. Never imports alembic to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from sqlalchemy import insert, select, update

from ckptfmt.catalog.clock import database_now
from ckptfmt.catalog.failures import translated
from ckptfmt.catalog.filesystems import check_local, filesystem_type
from ckptfmt.catalog.location import display, sqlite_path
from ckptfmt.catalog.revision import require_head, stored_revision
from ckptfmt.catalog.schema import repositories
from ckptfmt.catalog.sql import SqlCatalog
from ckptfmt.catalog.sqlite import BUSY_SECONDS, SqliteSessions
from ckptfmt.errors import NotFound


def open_catalog(
    url: str,
    *,
    repository: str,
    display_url: str,
    mode: Literal["r", "w"],
    create: bool,
    busy_seconds: float = BUSY_SECONDS,
    filesystem: Callable[[Path], str] = filesystem_type,
) -> SqlCatalog:
    """Open the catalog at ``url`` for the repository with the uuid ``repository``.

    ``mode="r"`` opens the database read-only and changes nothing. ``create`` (with ``mode="w"``) makes the
    database and its schema where there is none, and registers the repository under ``display_url`` (for
    display only). ``filesystem`` tells the type of the file system that holds a SQLite file.

    Raises ``NotFound`` where there is no database or it does not know the repository, ``CatalogError`` for a
    database of something else, an older or newer schema, or a file system that SQLite cannot trust, and
    ``InvalidInput`` for a URL that names no catalog.
    """
    path = sqlite_path(url)
    shown = display(url)
    if mode == "w":
        check_local(path, filesystem(path))
    if not path.exists() and not (mode == "w" and create):
        raise NotFound(
            f"there is no catalog {shown}: check the URL, or create the repository by opening it for writing"
        )
    sessions = SqliteSessions(path, mode="ro" if mode == "r" else "rw", busy_seconds=busy_seconds)
    with translated(shown):
        if mode == "w":
            _prepare(sessions, url, create=create)
        with sessions.read() as connection:
            revision = stored_revision(connection, shown)
        require_head(revision, shown)
        if mode == "w":
            _register(sessions, repository, display_url, create=create)
    return SqlCatalog(sessions, url=shown, repository=repository, read_only=mode == "r")


def _prepare(sessions: SqliteSessions, url: str, *, create: bool) -> None:
    """Create the schema of an empty database, and settle the journal mode."""
    if create:
        exists = sessions.path.exists()
        revision = None
        if exists:
            with sessions.read() as connection:
                revision = stored_revision(connection, display(url))
        if revision is None:
            from ckptfmt.catalog.upgrade import create_schema

            create_schema(url)
            return
    sessions.choose_journal()


def _register(sessions: SqliteSessions, repository: str, display_url: str, *, create: bool) -> None:
    known = select(repositories.c.url).where(repositories.c.uuid == repository)
    with sessions.read() as connection:
        url = connection.execute(known).scalar_one_or_none()
    if url == display_url or (url is None and not create):
        return
    with sessions.write() as connection:
        if connection.execute(known).scalar_one_or_none() is None:
            values = {"uuid": repository, "url": display_url, "created_at": database_now()}
            connection.execute(insert(repositories).values(values))
        else:
            # A repository that moved: the URL is for display only.
            connection.execute(update(repositories).where(repositories.c.uuid == repository).values(url=display_url))
