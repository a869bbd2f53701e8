"""Objects in this process's memory, for tests and for trying things out.

A store lives as long as the process, under a name, so that two ``MemoryBackend("a")`` see the same
objects, as two processes see the same disk. An unfinished object stands under its key with a length
that is not the final one, as on a file system.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from ckptfmt.backends.buffers import Coverage, flat_bytes
from ckptfmt.backends.keys import checked_key, checked_prefix
from ckptfmt.errors import Conflict, Corrupt, FormatError, InvalidInput, NotFound, OutOfSpace
from ckptfmt.ports.backend import Buffer, ObjectInfo, Traits

_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")


class MemoryOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``storage_options`` of a ``memory://`` repository."""

    alignment: int = 4096
    """Bytes; what ``traits.alignment`` says, so that the engine takes the same paths as on a disk."""


@dataclass
class _Store:
    lock: threading.RLock = field(default_factory=threading.RLock)
    objects: dict[str, bytearray] = field(default_factory=dict)
    folders: set[str] = field(default_factory=lambda: {""})


_stores: Final[dict[str, _Store]] = {}
_stores_lock: Final = threading.Lock()


class MemoryBackend:
    """A ``Backend`` on the store called ``name``."""

    def __init__(self, name: str, options: MemoryOptions | None = None) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidInput(f"memory store {name!r}: use letters, digits, '.', '_' and '-'")
        alignment = (options or MemoryOptions()).alignment
        if alignment < 1:
            raise InvalidInput(f"memory store {name!r}: alignment must be at least 1 byte, not {alignment}")
        self._name: Final = name
        with _stores_lock:
            self._store: Final = _stores.setdefault(name, _Store())
        self._traits: Final = Traits(
            scheme="memory",
            durable="in this process's memory only: gone when it ends",
            survives_power_loss=False,
            local=False,
            alignment=alignment,
            folders=True,
        )

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def storage_options(self) -> Mapping[str, Any]:
        return {}

    @property
    def traits(self) -> Traits:
        return self._traits

    def forget(self) -> None:
        """Drop all objects and folders of this store."""
        with self._store.lock:
            self._store.objects.clear()
            self._store.folders = {""}

    # -- folders -------------------------------------------------------------------------------
    def create_root(self) -> None:
        """Nothing to do: a store is there as soon as it is named."""

    def make_folder(self, prefix: str) -> None:
        checked_prefix(prefix)
        with self._store.lock:
            path = ""
            for name in prefix.split("/") if prefix else ():
                path = f"{path}/{name}" if path else name
                if path in self._store.objects:
                    raise Conflict(f"make folder {self._where(path)}: an object stands in its place; move it away")
                self._store.folders.add(path)

    def has_folder(self, prefix: str) -> bool:
        checked_prefix(prefix)
        with self._store.lock:
            return prefix in self._store.folders

    def remove_folder(self, prefix: str) -> None:
        below = _below(checked_prefix(prefix))
        with self._store.lock:
            if prefix and not any(name.startswith(below) for name in (*self._store.objects, *self._store.folders)):
                self._store.folders.discard(prefix)

    # -- writing -------------------------------------------------------------------------------
    def create(self, key: str, data: Buffer) -> None:
        content = bytearray(flat_bytes(data, f"create {self._where(key)}"))
        with self._store.lock:
            if checked_key(key) in self._store.objects and self._store.objects[key] == content:
                return
            self._require_free(key, "create")
            self._store.objects[key] = content

    def open_writer(self, key: str, nbytes: int, *, write_bytes: int = 0) -> MemoryWriter:
        where = self._where(checked_key(key))
        if nbytes < 0:
            raise InvalidInput(f"write {where}: {nbytes} is no size of an object; give 0 or more bytes")
        with self._store.lock:
            self._require_free(key, "write")
            self._store.objects[key] = _room(where, nbytes)
        return MemoryWriter(self._store, key, where, nbytes)

    def _require_free(self, key: str, operation: str) -> None:
        folder = key.rpartition("/")[0]
        if folder not in self._store.folders:
            raise NotFound(f"{operation} {self._where(key)}: the folder {folder!r} is absent; make it first")
        if key in self._store.objects or key in self._store.folders:
            raise Conflict(
                f"{operation} {self._where(key)}: the name is taken; objects are never overwritten: choose another name"
            )

    def sync(self, key: str) -> None:
        """Nothing: what is seen is as durable as it gets."""
        checked_key(key)

    def delete(self, key: str) -> None:
        with self._store.lock:
            self._store.objects.pop(checked_key(key), None)

    def sweep_debris(
        self, prefix: str, *, dry_run: bool, deep: bool = True, only: Collection[str] | None = None
    ) -> list[ObjectInfo]:
        """Nothing to sweep: a create here leaves nothing behind."""
        checked_prefix(prefix)
        return []

    # -- reading -------------------------------------------------------------------------------
    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        where = self._where(checked_key(key))
        view = flat_bytes(buffer, f"read {where} at offset {offset}")
        if offset < 0 or buffer.readonly:
            raise InvalidInput(f"read {where} at offset {offset}: give an offset of at least 0 and a writable buffer")
        with self._store.lock:
            data = self._found(key, "read")
            if len(data) < offset + len(view):
                found = max(0, len(data) - offset)
                raise Corrupt(
                    f"read {where} at offset {offset}: expected {len(view)} bytes, found {found}; the object is "
                    "truncated: verify the generation, and restore an older one or another copy",
                    kind="truncated",
                )
            with memoryview(data) as source:
                view[:] = source[offset : offset + len(view)]

    def map_cached(self, key: str, offset: int, memory: memoryview) -> None:
        return None  # a copy out of a bytes object is as good

    def read(self, key: str, *, limit: int) -> bytes:
        where = self._where(checked_key(key))
        with self._store.lock:
            data = self._found(key, "read")
            if len(data) > limit:
                raise FormatError(
                    f"read {where}: {len(data)} bytes, but at most {limit} are expected of such an object; "
                    "it was not written by this library, or is damaged"
                )
            return bytes(data)

    def head(self, key: str) -> ObjectInfo:
        checked_key(key)
        with self._store.lock:
            return ObjectInfo(key, len(self._found(key, "look at")))

    def _found(self, key: str, operation: str) -> bytearray:
        try:
            return self._store.objects[key]
        except KeyError:
            raise NotFound(f"{operation} {self._where(key)}: no such object; list the folder for the names") from None

    def list_folders(self, prefix: str) -> list[str]:
        start = _below(checked_prefix(prefix))
        with self._store.lock:
            names = {folder[len(start) :] for folder in self._store.folders if folder.startswith(start)}
        return sorted(name for name in names if name and "/" not in name)

    def list(self, prefix: str) -> list[ObjectInfo]:
        start = _below(checked_prefix(prefix))
        with self._store.lock:
            found = [ObjectInfo(key, len(data)) for key, data in self._store.objects.items() if key.startswith(start)]
        return sorted(found, key=lambda info: info.key)

    # -- the place -----------------------------------------------------------------------------
    def space(self) -> int | None:
        return None

    def close(self) -> None:
        """Nothing to release: the store outlives its backends."""

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"


class MemoryWriter:
    """An ``ObjectWriter`` into a store."""

    def __init__(self, store: _Store, key: str, where: str, nbytes: int) -> None:
        self._store: Final = store
        self._key: Final = key
        self._where: Final = where
        self._nbytes: Final = nbytes
        self._data: Final = store.objects[key]
        self._coverage: Final = Coverage(where, nbytes)
        self._state = "open"

    def write_at(self, offset: int, data: Buffer) -> None:
        view = flat_bytes(data, f"write {self._where} at offset {offset}")
        self._coverage.check(offset, len(view))
        with self._store.lock:
            self._require_open("write")
            self._data[offset : offset + len(view)] = view
        self._coverage.add(offset, len(view))

    def finish(self) -> None:
        with self._store.lock:
            if self._state == "finished":
                return
            self._require_open("finish")
            self._coverage.require_whole()
            if self._store.objects.get(self._key) is not self._data:
                self._state = "dead after an error"
                raise NotFound(f"finish {self._where}: the object was deleted meanwhile; write it under a new name")
            del self._data[self._nbytes :]
            self._state = "finished"

    def abort(self) -> None:
        with self._store.lock:
            if self._state in ("finished", "aborted"):
                return
            self._state = "aborted"
            if self._store.objects.get(self._key) is self._data:
                del self._store.objects[self._key]

    def _require_open(self, operation: str) -> None:
        if self._state != "open":
            raise InvalidInput(
                f"{operation} {self._where}: the writer is {self._state}; write the object again under a new name"
            )


def _room(where: str, nbytes: int) -> bytearray:
    """Return room for an unfinished object: one byte too long, so that its length is never the final one."""
    try:
        return bytearray(nbytes + 1)
    except (MemoryError, OverflowError) as error:
        raise OutOfSpace(
            f"write {where}: needed {nbytes} bytes of memory, which this process can't have", needed=nbytes
        ) from error


def _below(prefix: str) -> str:
    return f"{prefix}/" if prefix else ""
