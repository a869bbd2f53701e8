"""Migration, inspection and backup of a catalog database: what ``ckptfmt db`` does.

Alembic is imported by the functions that need it, for it takes a quarter of a second.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Set
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from ckptfmt.catalog.failures import translated
from ckptfmt.catalog.location import display, is_sqlite, sqlite_path
from ckptfmt.catalog.revision import HEAD, VERSION_TABLE, require_head, stored_revision
from ckptfmt.catalog.snapshot import Snapshot, SqliteSession
from ckptfmt.catalog.sqlite import SqliteSessions
from ckptfmt.catalog.triggers import trigger_sql
from ckptfmt.catalog.view_sql import view_sql
from ckptfmt.errors import CatalogError, InvalidInput, NotFound

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Connection


@dataclass(frozen=True)
class Problem:
    """One thing in a database that is not as this library expects it."""

    text: str
    foreign: bool = False
    """Somebody's own object beside ours: nothing is damaged by it."""


@dataclass(frozen=True)
class CatalogCheck:
    """What ``check`` found: no problem means that the database is sound and as this library expects it."""

    url: str
    revision: str | None
    problems: tuple[str, ...]


def current(url: str) -> str | None:
    """Return the schema revision of the database, None if it has no schema yet."""
    sessions = _existing(url, "ro")
    with translated(display(url)), sessions.read() as snapshot:
        return stored_revision(snapshot, display(url))


def upgrade(url: str) -> str:
    """Bring an existing catalog to the revision of this library, in one transaction; return the revision."""
    _existing(url, "rw")
    create_schema(url)
    return HEAD


def create_schema(url: str) -> None:
    """Migrate the database, made if absent, under a lock: of several processes one works and the others wait."""
    shown = display(url)
    path = sqlite_path(url)
    if not path.parent.is_dir():
        raise CatalogError(f"the folder of the catalog {shown} does not exist: create {path.parent}")
    from ckptfmt.catalog.sqlite_engine import driver_connection

    sessions = SqliteSessions(path, mode="rwc")
    with translated(shown):
        sessions.choose_journal()
        with sessions.alembic(write=True) as connection:
            revision = stored_revision(SqliteSession(driver_connection(connection)), shown)
            if revision is not None and revision >= HEAD:
                require_head(revision, shown)
                return
            _migrate(connection)
    sync_folder(path.parent)


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
    sessions = _existing(url, "ro")
    with translated(shown), sessions.read() as snapshot:
        require_head(stored_revision(snapshot, shown), shown)
        yield from _integrity(snapshot)
        yield from _objects(snapshot, "trigger", trigger_sql("sqlite"))
        yield from _objects(snapshot, "view", view_sql("sqlite"))
        for name in sorted(set(snapshot.table_names()) - _tables() - {VERSION_TABLE}):
            yield Problem(f"the table {name} is none of ckptfmt's; drop it", foreign=True)
        yield from _drift(sessions)


def backup(url: str, target: str | Path) -> Path:
    """Copy the catalog into a new file, whole even while others write; return its path.

    The copy is checked and durable when this returns. Raises ``InvalidInput`` if ``target`` exists.
    """
    if not is_sqlite(url):
        raise InvalidInput(f"the catalog {display(url)} is not a file: back it up with pg_dump")
    path = _existing(url, "ro").path
    target = Path(target).absolute()
    if target.exists():
        raise InvalidInput(f"the backup {target} exists: name a new file")
    # A name of its own until it is complete: a broken backup must not look like a good one.
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        with translated(display(url)):
            _copy(path, partial)
        os.link(partial, target)
    except FileExistsError:
        raise InvalidInput(f"the backup {target} exists: name a new file") from None
    except OSError as error:
        raise CatalogError(f"the backup {target} could not be written ({error.strerror}): check its folder") from error
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(target.parent)
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


def _existing(url: str, mode: Any) -> SqliteSessions:
    path = sqlite_path(url)
    if not path.exists():
        raise NotFound(f"there is no catalog {display(url)}: check the URL")
    return SqliteSessions(path, mode=mode)


def _integrity(snapshot: Snapshot) -> Iterator[Problem]:
    for (line,) in snapshot.rows("PRAGMA integrity_check"):
        if line != "ok":
            yield Problem(f"damage: {line}; rebuild it from storage with `ckptfmt db rebuild`")
    for table in sorted(_tables() & set(snapshot.table_names())):
        for _, row, parent, _ in snapshot.rows(f"PRAGMA foreign_key_check({table})"):
            yield Problem(f"row {row} of table {table} refers to a missing row of {parent}; restore a backup")


def _objects(snapshot: Snapshot, kind: str, wanted: dict[str, str]) -> Iterator[Problem]:
    found: dict[str, str] = dict(snapshot.rows("SELECT name, sql FROM sqlite_master WHERE type = :kind", kind=kind))
    for name in wanted:
        if name not in found:
            yield Problem(f"the {kind} {name} is missing; restore a backup")
    for name, sql in found.items():
        if name not in wanted:
            yield Problem(f"the {kind} {name} is none of ckptfmt's; drop it", foreign=True)
        elif sql != wanted[name]:
            yield Problem(f"the {kind} {name} was changed; restore a backup")


def _tables() -> Set[str]:
    from ckptfmt.catalog.schema import metadata

    return metadata.tables.keys()


def _drift(sessions: SqliteSessions) -> Iterator[Problem]:
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
    with sessions.alembic(write=False) as connection:
        try:
            changes = compare_metadata(MigrationContext.configure(connection, opts=options), metadata)
        except NoSuchTableError as error:  # one to which another one refers
            yield Problem(f"the schema drifted: the table {error} is missing; restore a backup")
            return
    for change in changes:
        if not _is_identity(change):
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
    _sync_file(target)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make names in the folder durable."""
    _sync_file(folder)
