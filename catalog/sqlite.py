"""Sessions with a SQLite database: who may lock what, and for how long.

- Every writing transaction is ``BEGIN IMMEDIATE``: plain ``BEGIN`` upgrades a read lock, and two of those
  deadlock into an immediate "database is locked".
- A connection belongs to one transaction at a time: nothing is shared between threads or across a fork.
- Journal ``DELETE`` with ``synchronous=EXTRA``: a commit survives a power cut. Write-ahead logging is used only
  where its rare reset race is fixed (https://sqlite.org/wal.html, "The WAL-Reset Bug").
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import quote

from ckptfmt.catalog.failures import is_busy, sqlite_code
from ckptfmt.catalog.snapshot import SqliteSession
from ckptfmt.catalog.spare import SpareConnection, never_close
from ckptfmt.errors import CatalogError

if TYPE_CHECKING:
    from sqlalchemy import Connection

BUSY_SECONDS: Final = 30.0
FileMode = Literal["ro", "rw", "rwc"]
# Of its own: the module's global generator belongs to the training, whose next number must not depend on us.
_JITTER: Final = random.SystemRandom()

_open_connections: set[sqlite3.Connection] = set()
_forked_while_open = False


def _after_fork_in_child() -> None:
    """Note a fork in the middle of a transaction of another thread.

    SQLite's own lock table was copied with it and is wrong here (https://sqlite.org/howtocorrupt.html, 2.6), so
    this process must not use SQLite. The copied connections must not be closed either, not even at exit: that
    would roll back the parent's transaction. Hence the reference that is never given back.
    """
    global _forked_while_open
    for connection in _open_connections:
        _forked_while_open = True
        never_close(connection)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def journal_mode(version: tuple[int, int, int]) -> Literal["wal", "delete"]:
    """Return the journal mode that is safe with this SQLite version."""
    fixed = version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51, 0) or (3, 44, 6) <= version < (3, 45, 0)
    return "wal" if fixed else "delete"


class SqliteSessions:
    """Transactions on one database file. Safe to use from any thread and in forked children."""

    def __init__(self, path: Path, *, mode: FileMode, busy_seconds: float = BUSY_SECONDS) -> None:
        self.path = path
        self.mode = mode
        self._busy_seconds = busy_seconds
        self._closed = False
        self._spare = SpareConnection(path)

    @contextmanager
    def read(self) -> Iterator[SqliteSession]:
        """A consistent snapshot; nothing is held after the block."""
        self._check_usable()
        with self._ended(self._snapshot_begun()) as connection:
            yield SqliteSession(connection)
            connection.execute("ROLLBACK")

    @contextmanager
    def write(self) -> Iterator[SqliteSession]:
        """The exclusive right to write, committed at the end of the block, rolled back on any exception."""
        if self.mode == "ro":
            raise CatalogError(f"the catalog {self.path} was opened for reading: open the repository with mode='w'")
        self._check_usable()
        with self._ended(self._begun("BEGIN IMMEDIATE")) as connection:
            yield SqliteSession(connection)
            connection.execute("COMMIT")

    @contextmanager
    def alembic(self, *, write: bool) -> Iterator[Connection]:
        """A transaction on a SQLAlchemy connection, which Alembic needs; committed at the end if it may ``write``."""
        from ckptfmt.catalog.sqlite_engine import sqlite_engine

        self._check_usable()
        begin = "BEGIN IMMEDIATE" if write else "BEGIN"
        opened: list[sqlite3.Connection] = []

        def connect() -> sqlite3.Connection:
            opened.append(self._connect())
            return opened[-1]

        engine = sqlite_engine(connect=connect, begin=lambda connection: self._begin(connection, begin))
        try:
            with engine.connect() as connection:
                connection.begin()
                yield connection
                if write:
                    connection.commit()
        finally:
            for each in opened:  # SQLAlchemy leaves one open if its first question meets a damaged file
                self._close(each)

    @contextmanager
    def _ended(self, connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
        """Keep the connection for the next transaction; after any exception close it, which rolls back."""
        try:
            yield connection
        except BaseException:
            self._close(connection)
            raise
        _open_connections.discard(connection)
        if self._closed or not self._spare.keep(connection):
            connection.close()

    def close(self) -> None:
        self._closed = True
        self._spare.close()

    def choose_journal(self) -> None:
        """Set the journal mode of a new database, or leave write-ahead logging where it is not safe here."""
        wanted = journal_mode(sqlite_version())
        connection = self._connect(self.mode)
        try:
            (current,) = connection.execute("PRAGMA journal_mode").fetchone()
            (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            if current == wanted or (current == "delete" and tables):
                return
            with suppress(sqlite3.OperationalError):
                (current,) = connection.execute(f"PRAGMA journal_mode={wanted}").fetchone()
            if current == "wal" and wanted == "delete":
                raise CatalogError(
                    f"the catalog {self.path} is in write-ahead mode, in use by another process, and SQLite "
                    f"{sqlite3.sqlite_version} here may corrupt it: close the other process, or install SQLite 3.51.3",
                    kind="catalog_busy",
                    transient=True,
                )
        finally:
            self._close(connection)

    def _check_usable(self) -> None:
        if self._closed:
            raise CatalogError(f"the catalog {self.path} was closed: open the repository again")
        if _forked_while_open:
            raise CatalogError(
                f"process {os.getpid()} was forked in the middle of a catalog transaction of its parent and cannot "
                f"use the catalog {self.path}: start it with the multiprocessing method 'spawn'",
                kind="fork_unsafe",
            )

    def _connect(self, mode: FileMode | None = None) -> sqlite3.Connection:
        uri = f"file:{quote(str(self.path))}?mode={mode or self.mode}"
        # isolation_level None: the driver begins nothing by itself.
        # One transaction after the other, perhaps of other threads: SQLite itself is built for that.
        connection = sqlite3.connect(
            uri, uri=True, timeout=self._busy_seconds, isolation_level=None, check_same_thread=False
        )
        _open_connections.add(connection)
        try:
            if (mode or self.mode) != "ro":
                connection.execute("PRAGMA foreign_keys=ON")
                connection.execute("PRAGMA synchronous=EXTRA")
            if self.mode == "ro":
                connection.execute("PRAGMA query_only=ON")
        except BaseException:
            self._close(connection)
            raise
        return connection

    @staticmethod
    def _close(connection: sqlite3.Connection) -> None:
        _open_connections.discard(connection)
        connection.close()

    def _snapshot_begun(self) -> sqlite3.Connection:
        """Connect and begin; a read-only opening that meets a dead writer's journal has it rolled back first."""
        try:
            return self._begun("BEGIN")
        except sqlite3.OperationalError as error:
            if self.mode != "ro" or sqlite_code(error) != sqlite3.SQLITE_READONLY:
                raise
        self._roll_back_dead_writer()
        return self._begun("BEGIN")

    def _begun(self, begin: str) -> sqlite3.Connection:
        connection = self._spare.take()
        if connection is None:
            connection = self._connect()
        else:
            _open_connections.add(connection)
        try:
            self._begin(connection, begin)
        except BaseException:
            self._close(connection)
            raise
        return connection

    def _begin(self, connection: sqlite3.Connection, begin: str) -> None:
        """Begin and take the snapshot; wait for the lock until the deadline.

        The wait is ours: SQLite's own grows to 100 ms a try, which leaves the lock idle between many writers.
        """
        deadline = time.monotonic() + self._busy_seconds
        connection.execute("PRAGMA busy_timeout=0")
        while True:
            try:
                connection.execute(begin)
                # Take the snapshot now, so that a lock is met here and nowhere else.
                connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
            except sqlite3.OperationalError as error:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if not is_busy(error):
                    raise
                if time.monotonic() >= deadline:
                    raise self._too_long() from error
                time.sleep(_JITTER.uniform(0.001, 0.01))
            else:
                # At COMMIT the wait is for readers, who are quick: SQLite's own will do.
                connection.execute(f"PRAGMA busy_timeout={int(self._busy_seconds * 1000)}")
                return

    def _roll_back_dead_writer(self) -> None:
        """Let SQLite undo the half-written transaction of a killed process; a read-only opening cannot."""
        connection = self._connect("rw")
        try:
            connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
        except sqlite3.OperationalError as error:
            if is_busy(error):
                raise
            raise CatalogError(
                f"a process was killed while it wrote the catalog {self.path}, and this process may not repair the "
                f"file ({error}): read it once as a user who may write to it and to its folder"
            ) from error
        finally:
            self._close(connection)

    def _too_long(self) -> CatalogError:
        holders = lock_holders(self.path)
        who = f"process {', '.join(map(str, holders))} of this host" if holders else "another process"
        return CatalogError(
            f"{who} kept the catalog {self.path} locked for {self._busy_seconds:g} s; nothing was changed: "
            "repeat the call, or look at what that process is doing",
            kind="catalog_busy",
            transient=True,
        )


def lock_holders(path: Path) -> tuple[int, ...]:
    """Return the pids that hold a lock on the file, as far as this host tells.

    Reads ``/proc/locks``: opening the database file itself would drop our own locks when it is closed again.
    """
    try:
        status = path.stat()
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return ()
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    pids = {int(fields[4]) for fields in map(str.split, lines) if len(fields) > 5 and fields[5] == wanted}
    return tuple(sorted(pids - {os.getpid()}))


def sqlite_version() -> tuple[int, int, int]:
    """Return the version of the SQLite library that Python uses."""
    major, minor, patch = sqlite3.sqlite_version_info
    return major, minor, patch
