"""What an object backend asks of the driver of one kind of store. Drivers raise ``Failure`` and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Meta:
    """One object. ``key`` is whole: the repository's prefix included."""

    key: str
    nbytes: int
    checksum: str | None = None
    """As the server tells it: base64 of a CRC-32; of the parts' CRC-32s with ``-<parts>`` behind it; None = none."""
    etag: str | None = None


@dataclass(frozen=True)
class Part:
    """A part that the server has: its number from 1 on, its ETag, and the CRC-32 of the bytes as they were sent."""

    number: int
    etag: str
    crc: int
    nbytes: int


@dataclass(frozen=True)
class Upload:
    """A multipart upload that is neither finished nor aborted."""

    key: str
    id: str
    age: float
    """Seconds, by the server's clock."""


class ObjectStore(Protocol):
    """A bucket. Keys are whole, and quoted nowhere. Every call sends one request (a listing: one per page)."""

    def put(self, key: str, data: memoryview, *, absent: bool, crc: int | None = None) -> str | None:
        """Store an object, with ``absent`` only if there is none of that key (``TAKEN``); its ETag.

        ``crc`` is sent along for the server to compare, if it does.
        """

    def get(self, key: str, limit: int) -> tuple[bytes, int]:
        """The object's bytes and their number; of one longer than ``limit`` no bytes."""

    def get_into(self, key: str, offset: int, view: memoryview) -> int:
        """Read bytes from ``offset`` on into ``view``, which is not empty; how many came, at least one.

        Fewer than asked: the object, or what one request gets, ends there.
        """

    def head(self, key: str) -> Meta: ...

    def delete(self, key: str) -> None:
        """Absent is success."""

    def list(self, prefix: str) -> Iterator[Meta]:
        """All objects whose keys begin with ``prefix``, in any order."""

    def list_folders(self, prefix: str) -> Iterator[str]:
        """What stands between ``prefix`` and the next ``/``, once each."""

    def close(self) -> None: ...


class MultipartStore(ObjectStore, Protocol):
    """A store whose multipart uploads are sent part by part."""

    @property
    def part_bytes(self) -> int:
        """Of all parts but the last, unless an object would have too many."""

    @property
    def parts_max(self) -> int: ...

    def begin(self, key: str) -> str:
        """Begin an upload; its id."""

    def put_part(self, key: str, upload: str, number: int, data: tuple[memoryview, ...], crc: int) -> Part:
        """Store a part: the pieces ``data``, one behind the other. ``crc`` is sent along for the server to compare."""

    def complete(self, key: str, upload: str, parts: Sequence[Part], *, absent: bool) -> str | None:
        """Publish the object; its ETag."""

    def checksum(self, parts: Sequence[Part]) -> str:
        """What ``Meta.checksum`` says of an object of these parts, if its bytes are those that were sent."""

    def abort(self, key: str, upload: str) -> None:
        """Give up an upload and its parts. One that is gone is success."""

    def uploads(self, prefix: str) -> Iterator[Upload]: ...

    def upload_bytes(self, upload: Upload) -> int:
        """What its parts hold."""
