"""A repository to damage, and a backend that remembers which bytes a reader asked for."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from quick_catalogs import quick_catalogs

import ckptfmt
from ckptfmt import connect
from ckptfmt.engine import read
from ckptfmt.engine.keep import gc
from ckptfmt.format import checksum

CHUNK_BYTES = 16 << 10
"""So small that a few pages have a first, a middle and a last chunk."""
CHUNKS = (CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES // 2)
"""Of tensor ``big``."""
NAMES = ("big", "small", "last")


@cache
def state(step: int) -> dict[str, Any]:
    """A state of one shape for all steps, so that packs have one length. To be read only."""
    rng = np.random.default_rng(step)
    return {
        "big": rng.integers(1, 255, sum(CHUNKS), np.uint8),
        "small": rng.random(6000),
        "last": rng.integers(1, 127, 10_007, np.int8),
        "epoch": step,
    }


def blank() -> dict[str, Any]:
    return {
        "big": np.zeros(sum(CHUNKS), np.uint8),
        "small": np.zeros(6000),
        "last": np.zeros(10_007, np.int8),
        "epoch": 0,
    }


@dataclass
class Seen:
    """What was asked of storage: (operation, key, first byte, end)."""

    calls: list[tuple[str, str, int, int]] = field(default_factory=list)
    catalog_opened: bool = False
    shown: int = 0
    """Ranges that were shown out of the page cache."""


class Recorder:
    """A backend that tells ``seen`` of every read, and shows cached pages only if asked to."""

    def __init__(self, backend: Any, seen: Seen, cached: bool) -> None:
        self._backend, self._seen, self._cached = backend, seen, cached

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._seen.calls.append(("read", key, offset, offset + len(buffer)))
        self._backend.read_into(key, offset, buffer)

    def map_cached(self, key: str, offset: int, memory: memoryview) -> Any:
        if not self._cached:
            return None
        self._seen.calls.append(("read", key, offset, offset + len(memory)))
        found = self._backend.map_cached(key, offset, memory)
        self._seen.shown += found is not None
        return found

    def read(self, key: str, *, limit: int) -> bytes:
        self._seen.calls.append(("read", key, 0, sys.maxsize))
        found: bytes = self._backend.read(key, limit=limit)
        return found

    def head(self, key: str) -> Any:
        self._seen.calls.append(("head", key, 0, 0))
        return self._backend.head(key)

    def list(self, prefix: str) -> Any:
        self._seen.calls.append(("list", prefix, 0, 0))
        return self._backend.list(prefix)


_watching: list[Seen] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "sqlite3.connect" and _watching:
        _watching[-1].catalog_opened = True


sys.addaudithook(_audit)


class Bench:
    """Run ``main`` with two committed generations, and run ``old`` with two retired ones whose bytes still lie there.

    ``reset`` puts everything back as it was saved.
    """

    def __init__(self, place: Path) -> None:
        self.root = place / "repo"
        self._connect = connect.backend_for
        self.key: dict[int, str] = {}
        with _small_chunks(), quick_catalogs(), ckptfmt.open(self.root) as repository:
            for run, steps in (("old", (1, 2, 3)), ("main", (4, 5))):
                with repository.checkpointer(run) as checkpointer:
                    for step in steps:
                        pending = checkpointer.save(state(step), step=step)
                        assert pending is not None
                        assert pending.result().id == step
                        self.key[step] = pending.key
        connection = connect.open_site(self.root, mode="w", catalog=None, storage_options=None)
        for number in (1, 2):
            gc.retire(connection.site, number)
        connection.close()
        self.other = place / "other"
        ckptfmt.open(self.other).close()
        self._pristine = {
            made: {path.relative_to(made): path.read_bytes() for path in made.rglob("*") if path.is_file()}
            for made in (self.root, self.other)
        }

    def reset(self) -> None:
        """Put back what differs. Making all of it anew takes ten times as long."""
        for made in (self.root, self.other):
            now = {path.relative_to(made): path.read_bytes() for path in made.rglob("*") if path.is_file()}
            for path in now.keys() - self._pristine[made].keys():
                (made / path).unlink()
            for path, data in self._pristine[made].items():
                if now.get(path) != data:
                    (made / path).write_bytes(data)

    def folder(self, number: int) -> Path:
        (found,) = self.root.glob(f"runs/*/{self.key[number]}")
        return found

    def one(self, number: int, pattern: str) -> Path:
        (found,) = self.folder(number).glob(pattern)
        return found

    def object_key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def sql(self, *statements: str) -> None:
        """Run statements as somebody who drops every trigger first."""
        with closing(sqlite3.connect(self.root / "catalog.sqlite")) as connection, connection:
            connection.execute("PRAGMA synchronous=OFF")
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
            for (name,) in names:
                connection.execute(f'DROP TRIGGER "{name}"')
            for statement in statements:
                assert connection.execute(statement).rowcount == 1

    @contextmanager
    def watched(self, *, cached: bool = False) -> Iterator[Seen]:
        """Everything that opens a repository inside goes through a ``Recorder``."""
        seen = Seen()
        original, threshold = connect.backend_for, read._SHOWN_BYTES_MIN

        def recording(*args: Any, **kwargs: Any) -> Any:
            return Recorder(original(*args, **kwargs), seen, cached)

        connect.backend_for = recording
        read._SHOWN_BYTES_MIN = 0
        _watching.append(seen)
        try:
            with quick_catalogs():
                yield seen
        finally:
            _watching.pop()
            connect.backend_for, read._SHOWN_BYTES_MIN = original, threshold


@contextmanager
def _small_chunks() -> Iterator[None]:
    usual = checksum.CHUNK_BYTES
    checksum.CHUNK_BYTES = CHUNK_BYTES  # type: ignore[misc]
    try:
        yield
    finally:
        checksum.CHUNK_BYTES = usual  # type: ignore[misc]
