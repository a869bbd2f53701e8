"""A catalog in a SQLite file: made, examined, put aside and locked as a file."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ckptfmt.catalog.database import Mode, Problem, own_tables
from ckptfmt.catalog.filesystems import sync
from ckptfmt.catalog.location import display, sqlite_path
from ckptfmt.catalog.snapshot import Snapshot, SqliteSession
from ckptfmt.catalog.sqlite import BUSY_SECONDS, SqliteSessions
from ckptfmt.catalog.triggers import trigger_sql
from ckptfmt.catalog.view_sql import view_sql
from ckptfmt.errors import CatalogError, Conflict

if TYPE_CHECKING:
    from sqlalchemy import Connection

_SIDECARS: Final = ("", "-journal", "-wal", "-shm")
"""What SQLite keeps beside a database. A journal that is left behind would be rolled back into the next one."""


class SqliteDatabase:
    """``ckptfmt.catalog.database.Database`` of a file."""

    dialect: Literal["sqlite"] = "sqlite"

    def __init__(self, url: str) -> None:
        self.path = sqlite_path(url)
        self._shown = display(url)

    def exists(self) -> bool:
        return self.path.exists()

    def sessions(self, mode: Mode, *, wait_seconds: float | None = None) -> SqliteSessions:
        return SqliteSessions(
            self.path,
            mode="ro" if mode == "r" else "rw",
            busy_seconds=BUSY_SECONDS if wait_seconds is None else wait_seconds,
        )

    def settle(self) -> None:
        self.sessions("w").choose_journal()

    @contextmanager
    def migrating(self) -> Iterator[tuple[Connection, Snapshot]]:
        from ckptfmt.catalog.sqlite_engine import driver_connection

        if not self.path.parent.is_dir():
            raise CatalogError(f"the folder of the catalog {self._shown} does not exist: create {self.path.parent}")
        sessions = SqliteSessions(self.path, mode="rwc")
        sessions.choose_journal()
        with sessions.alembic(write=True) as connection:
            yield connection, SqliteSession(driver_connection(connection))
        sync(self.path.parent)

    @contextmanager
    def inspecting(self) -> Iterator[Connection]:
        with self.sessions("r").alembic(write=False) as connection:
            yield connection

    def examine(self, snapshot: Snapshot) -> Iterator[Problem]:
        yield from _integrity(snapshot)
        yield from _objects(snapshot, "trigger", trigger_sql("sqlite"))
        yield from _objects(snapshot, "view", view_sql("sqlite"))

    def set_aside(self) -> str | None:
        """Give the database, with what SQLite keeps beside it, another name in its folder.

        Nothing is opened, and nothing is deleted.
        """
        number = 1
        while any(_sidecar(_aside(self.path, number), end).exists() for end in _SIDECARS):
            number += 1
        target = _aside(self.path, number)
        moved = False
        for end in _SIDECARS:  # the database first: without it a journal does nothing
            source = _sidecar(self.path, end)
            if source.is_symlink() or source.exists():
                os.rename(source, _sidecar(target, end))
                moved = True
        if moved:
            sync(self.path.parent)
        return target.name if moved else None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        folder = self.path.parent
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CatalogError(
                f"the folder of the catalog {self._shown} cannot be opened ({error.strerror}): create {folder}"
            ) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict(
                    f"another process is rebuilding the catalog {self._shown} now: wait for it and look at its result",
                    kind="rebuild_running",
                ) from None
            yield
        finally:
            os.close(descriptor)


def _integrity(snapshot: Snapshot) -> Iterator[Problem]:
    for (line,) in snapshot.rows("PRAGMA integrity_check"):
        if line != "ok":
            yield Problem(f"damage: {line}; rebuild it from storage with `ckptfmt db rebuild`")
    for table in sorted(own_tables() & set(snapshot.table_names())):
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


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.aside-{number}")


def _sidecar(path: Path, end: str) -> Path:
    return path.with_name(f"{path.name}{end}")
