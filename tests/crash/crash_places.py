"""Places in which processes end: a store in memory with a catalog file beside it, and folders on a disk."""

from __future__ import annotations

import itertools
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ckptfmt.backends import memory
from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.testing.crash_life import Place

if TYPE_CHECKING:
    from postgres_rig import PostgresServer

_numbers = itertools.count(1)


class MemoryPlaces:
    """``Places`` in memory; the catalog is SQLite, as it is everywhere."""

    def __init__(self, folder: Path, empty_catalog: Path) -> None:
        self._folder = folder
        self._empty = empty_catalog

    def empty(self) -> Place:
        number = next(_numbers)
        catalog = self._folder / f"catalog-{number}.sqlite"
        shutil.copy(self._empty, catalog)
        return Place(f"memory://crash-{uuid.uuid4().hex}", f"sqlite:///{catalog}")

    def keep(self, place: Place) -> Callable[[], None]:
        store = memory._stores[_name(place)]
        objects = {key: bytes(data) for key, data in store.objects.items()}
        folders = frozenset(store.folders)
        catalog = _catalog(place)
        kept = catalog.read_bytes() if catalog.exists() else None

        def put_back() -> None:
            store.objects.clear()
            store.objects.update({key: bytearray(data) for key, data in objects.items()})
            store.folders.clear()
            store.folders.update(folders)
            catalog.with_name(f"{catalog.name}-journal").unlink(missing_ok=True)
            if kept is None:
                lose_catalog(place)
            else:
                catalog.write_bytes(kept)

        return put_back

    def forget(self, place: Place) -> None:
        MemoryBackend(_name(place)).forget()
        lose_catalog(place)


def lose_catalog(place: Place) -> None:
    """As somebody does who clears out a disk."""
    _catalog(place).unlink(missing_ok=True)


def _name(place: Place) -> str:
    return place.url.partition("://")[2]


def _catalog(place: Place) -> Path:
    assert place.catalog is not None
    return Path(place.catalog.removeprefix("sqlite:///"))


class FolderPlaces:
    """``Places`` on the disk under ``folder``, each with its embedded catalog."""

    def __init__(self, folder: Path, empty_repository: Path) -> None:
        self._folder = folder
        self._empty = empty_repository

    def empty(self) -> Place:
        root = self._folder / f"repository-{next(_numbers)}"
        shutil.copytree(self._empty, root)
        return Place(str(root))

    def keep(self, place: Place) -> Callable[[], None]:
        kept = self._folder / f"kept-{next(_numbers)}"
        shutil.copytree(place.url, kept)

        def put_back() -> None:
            shutil.rmtree(place.url)
            shutil.copytree(kept, place.url)

        return put_back

    def forget(self, place: Place) -> None:
        shutil.rmtree(place.url)


class PostgresPlaces:
    """``Places`` on the disk under ``folder``, each with a database of a PostgreSQL server as its catalog."""

    def __init__(self, folder: Path, server: PostgresServer, template: str) -> None:
        self._folder = folder
        self._server = server
        self._template = template

    def empty(self) -> Place:
        database = self._server.new_database(self._template)
        return Place(str(self._folder / f"repository-{next(_numbers)}"), self._server.url(database))

    def keep(self, place: Place) -> Callable[[], None]:
        kept = self._folder / f"kept-{next(_numbers)}"
        shutil.copytree(place.url, kept)
        database = _database(place)
        copy = self._server.new_database(database)

        def put_back() -> None:
            shutil.rmtree(place.url)
            shutil.copytree(kept, place.url)
            self._server.run(f"DROP DATABASE {database} WITH (FORCE)")
            self._server.run(f"CREATE DATABASE {database} TEMPLATE {copy}")

        return put_back

    def forget(self, place: Place) -> None:
        shutil.rmtree(place.url)
        self._server.run(f"DROP DATABASE {_database(place)} WITH (FORCE)")


def _database(place: Place) -> str:
    assert place.catalog is not None
    return place.catalog.rpartition("/")[2].partition("?")[0]
