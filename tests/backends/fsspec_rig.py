"""Servers of this host for fsspec file systems: SFTP in a thread, HTTP; what s3fs takes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile
from s3_rig import KEY, SECRET

USER, PASSWORD = "trainer", "not-secret"
_SECONDS = 30


class SftpServer:
    """asyncssh's own server, which has the extensions of OpenSSH; with ``extensions=False`` not those that we use."""

    def __init__(self, folder: Path, *, extensions: bool = True) -> None:
        asyncssh = wheel_module("asyncssh")
        self.folder = folder
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(asyncssh, extensions), name="sftp-server")
        self._thread.start()
        assert self._started.wait(_SECONDS)

    def _serve(self, asyncssh: Any, extensions: bool) -> None:
        connections: list[Any] = []
        synced: list[object] = []
        self._connections, self.synced = connections, synced

        class Login(asyncssh.SSHServer):  # type: ignore[misc,name-defined]
            def connection_made(self, conn: Any) -> None:
                connections.append(conn)

            def password_auth_supported(self) -> bool:
                return True

            def validate_password(self, username: str, password: str) -> bool:
                return (username, password) == (USER, PASSWORD)

        class Files(asyncssh.SFTPServer):  # type: ignore[misc,name-defined]
            def link(self, oldpath: bytes, newpath: bytes) -> Any:
                if not extensions:
                    raise asyncssh.SFTPOpUnsupported("no links here")
                return super().link(oldpath, newpath)

            def fsync(self, file_obj: object) -> Any:
                if not extensions:
                    raise asyncssh.SFTPOpUnsupported("no fsync here")
                synced.append(file_obj)
                return super().fsync(file_obj)

        async def start() -> None:
            self._acceptor = await asyncssh.listen(
                "127.0.0.1",
                0,
                server_factory=Login,
                server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
                sftp_factory=lambda channel: Files(channel, chroot=str(self.folder).encode()),
                keepalive_interval=0,
            )
            self.port = self._acceptor.get_port()
            self._started.set()

        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(start())
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def stop(self) -> None:
        async def close() -> None:
            self._acceptor.close()
            await self._acceptor.wait_closed()
            for connection in self._connections:
                connection.abort()
                await connection.wait_closed()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(close(), self._loop).result(_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SECONDS)
        assert not self._thread.is_alive()

    def cut(self) -> None:
        """Drop all connections, without a word to the other side."""

        async def abort() -> None:
            for connection in self._connections:
                connection.abort()

        asyncio.run_coroutine_threadsafe(abort(), self._loop).result(_SECONDS)

    @property
    def options(self) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": self.port, "username": USER, "password": PASSWORD}


@contextlib.contextmanager
def sftp_server(folder: Path, *, extensions: bool = True) -> Iterator[SftpServer]:
    server = SftpServer(folder, extensions=extensions)
    try:
        yield server
    finally:
        server.stop()


class PlainFiles(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """The least that fsspec asks of a file system, by a class that nobody knows; with a rename of its own, which
    overwrites."""

    protocol = "plain"
    root_marker = "/"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.below = fsspec.filesystem("file", skip_instance_cache=True)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self.below.ls(path, detail=detail)

    def info(self, path: str, **options: Any) -> Any:
        return self.below.info(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.below.makedirs(path, exist_ok=exist_ok)

    def _rm(self, path: str) -> None:
        self.below.rm_file(path)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return self.below.open(path, mode)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        os.replace(path1, path2)


def wheel_module(name: str) -> Any:
    """A module of a wheel of the test extra: in CI it has to be there."""
    if os.environ.get("CI") == "true":
        return importlib.import_module(name)
    return pytest.importorskip(name, reason="pip install -e '.[test]' installs it")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tool(name: str) -> str:
    """A program that a wheel of the test extra has put beside Python."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        if os.environ.get("CI") == "true":
            raise FileNotFoundError(f"{path}: the test extra installs it")
        pytest.skip(f"{name} is not installed; pip install -e '.[test]'")
    return str(path)


@contextlib.contextmanager
def running(command: list[str], folder: Path, ready: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    """A server as a child in its own process group, from its first good answer on."""
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        patience = time.monotonic() + _SECONDS
        while not ready():
            assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
            assert time.monotonic() < patience, (folder / "server.log").read_text()[-2000:]
            time.sleep(0.05)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def s3_options(endpoint: str) -> dict[str, Any]:
    """What s3fs takes."""
    wheel_module("s3fs")
    return {
        "key": KEY,
        "secret": SECRET,
        "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"},
        "config_kwargs": {"retries": {"max_attempts": 1}, "s3": {"addressing_style": "path"}},
    }


@contextlib.contextmanager
def web_server(folder: Path, log_folder: Path) -> Iterator[str]:
    """rclone's web server, with listings and ranges, over ``folder``; its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return True
        return False

    command = [tool("rclone"), "serve", "http", str(folder), "--addr", f"127.0.0.1:{port}", "--config", os.devnull]
    with running([*command, "--dir-cache-time", "0s"], log_folder, ready):
        yield url


class StreamStore(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """An object store of which nothing is known. Its files have no fileno, seek, tell or rename; they publish what they
    hold when they are closed, also by the garbage collector."""

    protocol = "stream"
    worlds: ClassVar[dict[str, dict[str, bytes]]] = {}
    """What is stored, by a name that all who want to see the same give as ``world=``."""
    blocks_fail_from: int | None = None

    def __init__(self, world: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.objects: dict[str, bytes] = self.worlds.setdefault(world, {}) if world else {}

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "type": "file", "size": len(self.objects[path])}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[dict[str, Any]]:
        start, found = f"{path.rstrip('/')}/", {}
        for name in [name for name in self.objects if name.startswith(start)]:
            child, below, _ = name.removeprefix(start).partition("/")
            found[child] = {"name": start + child, "type": "directory", "size": 0} if below else self.info(name)
        return list(found.values())

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.info(path)
        return self.objects[path][start:end]

    def _rm(self, path: str) -> None:
        if self.blocks_fail_from is not None:
            raise ConnectionResetError("cut")
        del self.objects[path]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        assert mode == "wb"
        return _StreamFile(self, path, mode, block_size=1 << 20)


class _StreamFile(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self.sent: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> None:
        if self.fs.blocks_fail_from is not None and len(self.sent) >= self.fs.blocks_fail_from and not final:
            raise ConnectionResetError("cut")
        self.sent.append(self.buffer.getvalue())
        if final and self.autocommit:
            self.fs.objects[self.path] = b"".join(self.sent)

    def seek(self, *arguments: Any) -> int:
        raise OSError("no seek")

    def tell(self) -> int:
        raise OSError("no tell")

    def fileno(self) -> int:
        raise OSError("no fileno")
