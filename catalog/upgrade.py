"""Migration, inspection and backup of a catalog database: what ``ckptfmt db`` does.

Alembic is imported by the functions that need it, for it takes a quarter of a second.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from ckptfmt.catalog.database import Database, Problem, database_of, own_tables
from ckptfmt.catalog.failures import translated
from ckptfmt.catalog.filesystems import sync
from ckptfmt.catalog.location import display, is_postgres, sqlite_path
from ckptfmt.catalog.revision import HEAD, VERSION_TABLE, require_head, stored_revision
from ckptfmt.errors import CatalogError, InvalidInput, NotFound

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Connection


@dataclass(frozen=True)
class CatalogCheck:
    """What ``check`` found: no problem means that the database is sound and as this library expects it."""

    url: str
    revision: str | None
    problems: tuple[str, ...]


def current(url: str) -> str | None:
    """Return the schema revision of the database, None if it has no schema yet."""
    sessions = _existing(url).sessions("r")
    with translated(display(url)), sessions.read() as snapshot:
        return stored_revision(snapshot, display(url))


def upgrade(url: str) -> str:
    """Bring an existing catalog to the revision of this library, in one transaction; return the revision."""
    _existing(url)
    create_schema(url)
    return HEAD


def create_schema(url: str) -> None:
    """Migrate the database under a lock: of several processes one works and the others wait. A file is made if
    absent."""
    shown = display(url)
    with translated(shown), database_of(url).migrating() as (connection, snapshot):
        revision = stored_revision(snapshot, shown)
        if revision is not None and revision >= HEAD:
            require_head(revision, shown)
        else:
            _migrate(connection)


def check(url: str) -> CatalogCheck:
    """Compare the database with what this library expects, and tell also what kept it from being read; changes
    nothing."""
    problems: list[str] = []
    revision: str | None = None
    try:
        revision = current(url)
        problems.extend(problem.text for problem in examine(url))
    except CatalogError as error:
        problems.append(str(error))
    return CatalogCheck(url=display(url), revision=revision, problems=tuple(problems))


def examine(url: str) -> Iterator[Problem]:
    """Compare the database with what this library expects, one problem after the other. ``CatalogError`` where it
    cannot be read, or is of another schema."""
    shown = display(url)
    database = _existing(url)
    with translated(shown), database.sessions("r").read() as snapshot:
        require_head(stored_revision(snapshot, shown), shown)
        yield from database.examine(snapshot)
        for name in sorted(set(snapshot.table_names()) - own_tables() - {VERSION_TABLE}):
            yield Problem(f"the table {name} is none of ckptfmt's; drop it", foreign=True)
        yield from _drift(database)


def backup(url: str, target: str | Path) -> Path:
    """Copy the catalog into a new file, whole even while others write; return its path.

    The copy is checked and durable when this returns. Raises ``InvalidInput`` if ``target`` exists.
    """
    if is_postgres(url):
        raise InvalidInput(f"the catalog {display(url)} is not a file: back it up with pg_dump")
    _existing(url)
    target = Path(target).absolute()
    if target.exists():
        raise InvalidInput(f"the backup {target} exists: name a new file")
    # A name of its own until it is complete: a broken backup must not look like a good one.
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        with translated(display(url)):
            _copy(sqlite_path(url), partial)
        os.link(partial, target)
    except FileExistsError:
        raise InvalidInput(f"the backup {target} exists: name a new file") from None
    except OSError as error:
        raise CatalogError(f"the backup {target} could not be written ({error.strerror}): check its folder") from error
    finally:
        partial.unlink(missing_ok=True)
    sync(target.parent)
    return target


def alembic_config(connection: Connection | None = None) -> Config:
    """Return Alembic's configuration; nothing is read from a file."""
    from alembic.config import Config

    import ckptfmt.migrations

    config = Config()
    (folder,) = ckptfmt.migrations.__path__
    # A percent sign would be an interpolation.
    config.set_main_option("script_location", folder.replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _migrate(connection: Connection) -> None:
    from alembic import command

    command.upgrade(alembic_config(connection), "head")


def _existing(url: str) -> Database:
    database = database_of(url)
    if not database.exists():
        raise NotFound(f"there is no catalog {display(url)}: check the URL")
    return database


def _drift(database: Database) -> Iterator[Problem]:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from sqlalchemy.exc import NoSuchTableError

    from ckptfmt.catalog.schema import metadata

    options = {
        "version_table": VERSION_TABLE,
        "compare_type": True,
        "compare_server_default": True,
        "include_name": lambda name, kind, _: kind != "table" or name in metadata.tables,
    }
    with database.inspecting() as connection:
        try:
            changes = compare_metadata(MigrationContext.configure(connection, opts=options), metadata)
        except NoSuchTableError as error:  # one to which another one refers
            yield Problem(f"the schema drifted: the table {error} is missing; restore a backup")
            return
    for change in changes:
        if database.dialect != "sqlite" or not _is_identity(change):
            yield Problem(f"the schema drifted: {change}; restore a backup", foreign=_is_added(change))


def _is_added(change: Any) -> bool:
    """Whether the database has something that the schema has not. What was changed of ours is also to be added."""
    return isinstance(change, tuple) and str(change[0]).startswith("remove_")


def _is_identity(change: Any) -> bool:
    """SQLite has AUTOINCREMENT in place of identity columns, which Alembic takes for a difference."""
    from sqlalchemy import Identity

    return isinstance(change, list) and all(
        step[0] == "modify_default" and isinstance(step[-1], Identity) for step in change
    )


_BACKUP_PAGES: Final = 4096
"""Pages copied before other writers get a turn: a copy must not block commits for long."""


def _copy(source: Path, target: Path) -> None:
    uri = f"file:{quote(str(source))}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=30)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new, pages=_BACKUP_PAGES)
        (result,) = new.execute("PRAGMA integrity_check").fetchone()
        if result != "ok":
            raise CatalogError(f"the backup of {source} is damaged ({result}): run `ckptfmt db check`")
    sync(target)
