"""The ground under the backend conformance suite: raw access, and work that starts at once."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckptfmt.errors import CkptError
from ckptfmt.ports.backend import Backend

__all__ = ["BackendRig", "at_once", "pattern"]


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes in which every part differs from every other."""
    return random.Random(seed).randbytes(nbytes)


def at_once(tasks: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run all tasks in threads that start together; return each result, or the ``CkptError`` it raised."""
    work = list(tasks)
    gate = threading.Barrier(len(work))

    def run(task: Callable[[], Any]) -> Any:
        gate.wait()
        try:
            return task()
        except CkptError as error:
            return error

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(run, work))


class BackendRig(ABC):
    """What a conformance test needs of the place under test: a fixture ``backend`` and four raw methods."""

    @abstractmethod
    def raw_read(self, backend: Any, key: str) -> bytes: ...

    @abstractmethod
    def raw_write(self, backend: Any, key: str, data: bytes) -> None: ...

    @abstractmethod
    def raw_delete(self, backend: Any, key: str) -> None: ...

    @abstractmethod
    def raw_list(self, backend: Any) -> list[str]:
        """All that is stored, leftovers included, in any order; folders left out."""

    @pytest.fixture
    def place(self, backend: Backend) -> Backend:
        backend.make_folder("f")
        return backend

    def put(self, place: Backend, key: str, data: bytes) -> None:
        """Write an object by its writer, in one piece."""
        writer = place.open_writer(key, len(data))
        writer.write_at(0, data)
        writer.finish()
