"""Places in which processes end: a store in memory with a catalog file beside it, and folders on a disk."""

from __future__ import annotations

import itertools
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptfmt.backends import memory
from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.testing.crash_life import Place
from ckptfmt.tiering import TierOrder

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

    def tiered(self, *, replicas: int = 0, durable_on: int = 1) -> TieredPlaces:
        """The same with a stage, and so many replicas."""
        return TieredPlaces(self, replicas, durable_on)

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


class TieredPlaces:
    """``MemoryPlaces`` with tiers beside the durable one, in memory too."""

    def __init__(self, places: MemoryPlaces, replicas: int, durable_on: int) -> None:
        self._places = places
        self._replicas = replicas
        self._durable_on = durable_on

    def empty(self) -> Place:
        place = self._places.empty()
        replicas = tuple(f"{place.url}-replica{number}" for number in range(self._replicas))
        return replace(place, tiers=TierOrder(f"{place.url}-stage", replicas, self._durable_on))

    def keep(self, place: Place) -> Callable[[], None]:
        put_back = self._places.keep(place)
        stores = [memory._stores[url.partition("://")[2]] for url in _tier_urls(place)]
        kept = [({key: bytes(data) for key, data in store.objects.items()}, set(store.folders)) for store in stores]

        def put_all_back() -> None:
            put_back()
            for store, (objects, folders) in zip(stores, kept, strict=True):
                store.objects.clear()
                store.objects.update({key: bytearray(data) for key, data in objects.items()})
                store.folders.clear()
                store.folders.update(folders)

        return put_all_back

    def forget(self, place: Place) -> None:
        for url in _tier_urls(place):
            MemoryBackend(url.partition("://")[2]).forget()
        self._places.forget(place)


def _tier_urls(place: Place) -> list[str]:
    return [str(place.tiers.stage), *map(str, place.tiers.replicas)]


def lose_stage(place: Place) -> None:
    """As with its node."""
    MemoryBackend(str(place.tiers.stage).partition("://")[2]).forget()


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
