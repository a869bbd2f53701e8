"""What the engine asks of a place that holds objects (spec/format-v1.md, "What storage must offer").

A key is a relative path of plain ASCII components joined by ``/`` (``format.layout.validate_key``).
Objects are written once and never changed. Every method raises only the ``BackendError`` family,
``NotFound`` for an absent key, ``Conflict`` for an occupied one and ``InvalidInput`` for a bad key;
messages name the object's full URL or path and, for reads and writes, the offset.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Traits:
    """Facts about a backend, as values rather than type checks."""

    scheme: str
    """URL scheme: ``file``, ``memory``, ..."""
    durable: str
    """What a return from ``finish`` or ``create`` promises, in one sentence for people."""
    survives_power_loss: bool
    local: bool
    """True where the place is a local file system on which an embedded catalog may live."""
    alignment: int
    """Offsets, lengths and addresses that are multiples of this many bytes take the fast path. 1 = no matter."""
    folders: bool
    """True where a folder must exist before objects are written into it."""
    distant: bool = False
    """True where every request waits for a round trip: readers keep many in flight, and read through what lies between
    two ranges sooner than ask twice."""
    write_bytes: int = 0
    """Writes of so many bytes, at multiples of them, are passed on from where they lie, each in one request; or of
    more, of which ``open_writer`` is told. 0 = no matter."""


@dataclass(frozen=True)
class ObjectInfo:
    key: str
    nbytes: int


class ObjectWriter(Protocol):
    """One object being written. Until ``finish`` returns ``head`` does not show it as complete: it is absent, or of
    another length."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at ``offset``. Safe to call from several threads on disjoint ranges.

        ``data`` may be reused as soon as the call returns. ``InvalidInput`` outside of the announced size.
        """

    def finish(self) -> None:
        """Make the object durable by the backend's promise. After any error the object is dead: ``abort`` it.

        ``InvalidInput`` unless every byte was written exactly once. Again after success: nothing happens.
        """

    def abort(self) -> None:
        """Give the object up and remove what was written; a finished object stays.

        Idempotent; never raises on absent files.
        """


class CachedRange(Protocol):
    """Bytes of an object that the host has in memory, shown by somebody's memory until that is unmapped."""

    def pin(self, start: int, stop: int) -> None:
        """Bring bytes ``start`` to ``stop`` of the range in, to stay. To be called before they are looked at.

        Raises as ``Backend.read_into`` does. Safe to call from several threads.
        """


class Backend(Protocol):
    """A place that holds objects."""

    @property
    def url(self) -> str: ...

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """What leads here again beside ``url``, from another process, too. Neither holds a secret."""

    @property
    def traits(self) -> Traits: ...

    def create(self, key: str, data: Buffer) -> None:
        """Create a small object atomically and durably: on return ``key`` holds exactly these bytes.

        If the key is taken the contents are compared: equal is success, else ``Conflict``. Nobody
        ever sees a part of the object. The folder must exist (``traits.folders``).
        """

    def make_folder(self, prefix: str) -> None:
        """Create the folder ``prefix`` and its parents, durably. Idempotent. Nothing to do for object stores."""

    def has_folder(self, prefix: str) -> bool:
        """Whether ``make_folder(prefix)`` was done and still holds. Always true for object stores."""

    def remove_folder(self, prefix: str) -> None:
        """Remove the folder ``prefix`` if it is empty. One that is not, or is absent, is left as it is. Nothing to do
        for object stores. Where folders gather by the thousand this keeps listings short; it may be undone by a crash.
        """

    def open_writer(self, key: str, nbytes: int, *, write_bytes: int = 0) -> ObjectWriter:
        """Begin a large object of exactly ``nbytes`` bytes; space is reserved where that is possible. It may be written
        in any pieces, but most of them will have ``write_bytes``, unless that is 0, and begin at multiples of it.

        Raises ``Conflict`` if the key is taken, ``OutOfSpace`` with needed and free bytes,
        ``NotFound`` if the folder is absent. The writer never makes a folder.
        """

    def sync(self, key: str) -> None:
        """Make an object durable that was found there: whoever wrote it may have died before its own sync.

        ``NotFound`` if it is gone. Nothing to do where no object is seen before it is durable.
        """

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``. A short object is ``Corrupt``, an absent one ``NotFound``.

        A partial fill is never reported as success.
        """

    def map_cached(self, key: str, offset: int, memory: memoryview) -> CachedRange | None:
        """Let ``memory`` show the object's bytes from ``offset`` on, without a copy and never to be written to.

        Only where the host has all of them in memory and can keep them there, so that what was compared with its
        digest is what is used afterwards. Else None, ``memory`` is as before, and the caller reads. ``memory`` is
        private, page-aligned and the caller's own; what it held is lost.
        """

    def read(self, key: str, *, limit: int) -> bytes:
        """Return a whole small object; one longer than ``limit`` bytes is ``FormatError``."""

    def head(self, key: str) -> ObjectInfo: ...

    def list_folders(self, prefix: str) -> list[str]:
        """Names (not keys) of the folders directly under ``prefix``, sorted."""

    def delete(self, key: str) -> None:
        """Remove an object, durably. Absent is success."""

    def sweep_debris(
        self, prefix: str, *, dry_run: bool, deep: bool = True, only: Collection[str] | None = None
    ) -> list[ObjectInfo]:
        """Remove (or with ``dry_run`` list) leftovers of unfinished creates under ``prefix``.

        Without ``deep`` those directly in that folder; with ``only`` none but these keys. The caller vouches that no
        writer of them is alive.
        """

    def space(self) -> int | None:
        """Free bytes for a writer without privileges, or None where the place does not tell."""

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects under the folder ``prefix`` ('' = everything), at any depth, sorted by key.

        ``a/b`` lists ``a/b/c`` but not ``a/bc``. Temporary names of creates under way and the
        embedded catalog's files are never listed.
        """

    def close(self) -> None: ...
