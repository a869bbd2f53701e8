"""Both backends, and a backend behind the fault wrapper, pass the shipped conformance suite."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.backends.posix import PosixBackend, PosixOptions
from ckptfmt.ports.backend import Backend
from ckptfmt.testing.backends import BackendConformance
from ckptfmt.testing.faults import FaultyBackend


def _root(backend: Backend) -> Path:
    return Path(unquote(urlparse(backend.url).path))


class TestPosix(BackendConformance):
    @pytest.fixture(params=[None, False], ids=["auto", "buffered"])
    def backend(self, tmp_path: Path, request: pytest.FixtureRequest) -> Backend:
        backend = PosixBackend(tmp_path / "a root", PosixOptions(direct=request.param))
        backend.create_root()
        return backend

    def raw_read(self, backend: Backend, key: str) -> bytes:
        return (_root(backend) / key).read_bytes()

    def raw_write(self, backend: Backend, key: str, data: bytes) -> None:
        (_root(backend) / key).write_bytes(data)

    def raw_delete(self, backend: Backend, key: str) -> None:
        (_root(backend) / key).unlink()

    def raw_list(self, backend: Backend) -> list[str]:
        root = _root(backend)
        return [os.path.relpath(os.path.join(at, name), root) for at, _, names in os.walk(root) for name in names]


class TestMemory(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Any:
        backend = MemoryBackend(tmp_path.name)
        yield backend
        backend.forget()

    def raw_read(self, backend: Any, key: str) -> bytes:
        return bytes(backend._store.objects[key])

    def raw_write(self, backend: Any, key: str, data: bytes) -> None:
        backend._store.objects[key] = bytearray(data)

    def raw_delete(self, backend: Any, key: str) -> None:
        del backend._store.objects[key]

    def raw_list(self, backend: Any) -> list[str]:
        return list(backend._store.objects)


class TestMemoryBehindFaults(TestMemory):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Any:
        inner = MemoryBackend(tmp_path.name)
        yield FaultyBackend(inner, quota=2**30)
        inner.forget()

    def raw_read(self, backend: Any, key: str) -> bytes:
        return super().raw_read(backend._inner, key)

    def raw_write(self, backend: Any, key: str, data: bytes) -> None:
        super().raw_write(backend._inner, key, data)

    def raw_delete(self, backend: Any, key: str) -> None:
        super().raw_delete(backend._inner, key)

    def raw_list(self, backend: Any) -> list[str]:
        return super().raw_list(backend._inner)
