"""The posix backend passes the shipped suite on NFS: on one mount, and where two clients take turns."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from nfs_servers import EXPORT

from ckptfmt.backends.posix import PosixBackend, PosixOptions
from ckptfmt.testing.backends import BackendConformance


class Alternating:
    """Two backends on one place that take turns."""

    def __init__(self, *backends: PosixBackend) -> None:
        self._turns = itertools.cycle(backends)
        self.url = backends[0].url

    def __getattr__(self, name: str) -> Any:
        return getattr(next(self._turns), name)


class OnNfs(BackendConformance):
    def at(self, backend: Any, key: str = "") -> Path:
        return EXPORT / Path(backend.url.removeprefix("file://")).name / key

    def raw_read(self, backend: Any, key: str) -> bytes:
        return self.at(backend, key).read_bytes()

    def raw_write(self, backend: Any, key: str, data: bytes) -> None:
        self.at(backend, key).write_bytes(data)

    def raw_delete(self, backend: Any, key: str) -> None:
        self.at(backend, key).unlink()

    def raw_list(self, backend: Any) -> list[str]:
        root = self.at(backend)
        return [os.path.relpath(os.path.join(at, name), root) for at, _, names in os.walk(root) for name in names]


class TestOneMount(OnNfs):
    @pytest.fixture(params=[None, True, False], ids=["auto", "direct", "buffered"])
    def backend(self, mounts: tuple[Path, Path], name: str, request: pytest.FixtureRequest) -> PosixBackend:
        backend = PosixBackend(mounts[0] / name, PosixOptions(direct=request.param))
        backend.create_root()
        return backend


class TestTwoMounts(OnNfs):
    @pytest.fixture
    def backend(self, mounts: tuple[Path, Path], name: str) -> Alternating:
        backend = Alternating(*(PosixBackend(mount / name) for mount in mounts))
        backend.create_root()
        return backend
