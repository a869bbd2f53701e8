"""The fsspec backend passes the shipped conformance suite on every file system that runs here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec_rig import PlainFiles, SftpServer, sftp_server, wheel_module

from ckptfmt.backends.fsspec_backend import FsspecBackend, FsspecOptions
from ckptfmt.backends.fsspec_opening import open_file_system
from ckptfmt.connect import backend_for
from ckptfmt.ports.backend import Backend
from ckptfmt.testing.backends import BackendConformance


class OnDisk(BackendConformance):
    """Raw access for servers that serve a folder of this host: the fixture leaves it in ``self.root``."""

    root: Path

    def raw_read(self, backend: Backend, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def raw_write(self, backend: Backend, key: str, data: bytes) -> None:
        path = self.root / key
        if not backend.traits.folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_delete(self, backend: Backend, key: str) -> None:
        (self.root / key).unlink()

    def raw_list(self, backend: Backend) -> list[str]:
        return [
            os.path.relpath(os.path.join(at, name), self.root) for at, _, names in os.walk(self.root) for name in names
        ]


class TestFsspecMemory(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        self.start = f"/{tmp_path.name}/root"
        yield backend_for(f"fsspec+memory:/{self.start}", create=True)
        fs = MemoryFileSystem()
        fs.rm(f"/{tmp_path.name}", recursive=True)

    def raw_read(self, backend: Backend, key: str) -> bytes:
        return MemoryFileSystem.store[f"{self.start}/{key}"].getvalue()  # type: ignore[no-any-return]

    def raw_write(self, backend: Backend, key: str, data: bytes) -> None:
        MemoryFileSystem().pipe_file(f"{self.start}/{key}", data)

    def raw_delete(self, backend: Backend, key: str) -> None:
        del MemoryFileSystem.store[f"{self.start}/{key}"]

    def raw_list(self, backend: Backend) -> list[str]:
        start = f"{self.start}/"
        return [path.removeprefix(start) for path in MemoryFileSystem.store if path.startswith(start)]


class TestFsspecLocal(OnDisk):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        self.root = tmp_path / "root"
        return backend_for(f"fsspec+file://{self.root}", create=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftpServer]:
    with sftp_server(tmp_path_factory.mktemp("sftp")) as server:
        yield server


@pytest.fixture(scope="module")
def ssh(server: SftpServer) -> Any:
    """One connection for all: to make one takes longer than most tests."""
    return open_file_system("ssh://127.0.0.1/any", server.options)[0]


class TestSshfs(OnDisk):
    races = 3  # each create asks six times

    @pytest.fixture
    def backend(self, server: SftpServer, ssh: Any, tmp_path: Path) -> Backend:
        self.root = server.folder / tmp_path.name
        backend = FsspecBackend(ssh, f"/{tmp_path.name}", f"ssh://127.0.0.1/{tmp_path.name}")
        backend.create_root()
        return backend


@pytest.mark.slow  # each answer waits for the one before
class TestParamiko(OnDisk):
    @pytest.fixture
    def backend(self, server: SftpServer, tmp_path: Path) -> Iterator[Backend]:
        sftp = wheel_module("fsspec.implementations.sftp")
        self.root = server.folder / tmp_path.name
        fs = sftp.SFTPFileSystem(**server.options, skip_instance_cache=True)
        backend = FsspecBackend(fs, f"/{tmp_path.name}", f"sftp://127.0.0.1/{tmp_path.name}")
        backend.create_root()
        yield backend
        fs.client.close()


class TestLookingFirst(OnDisk):
    """What a user gets who vouches for being alone, on a file system of which nothing is known."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        self.root = tmp_path / "root"
        self.root.mkdir()
        fs = PlainFiles(skip_instance_cache=True)
        backend = FsspecBackend(fs, str(self.root), f"plain://{self.root}", FsspecOptions(single_writer=True))
        backend.create_root()
        return backend
