"""Writes a large object to a store whose driver takes it only whole and in order: through a temporary file."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import zlib
from collections.abc import Iterator
from typing import Final, Protocol, cast

from ckptfmt.backends.buffers import Coverage, flat_bytes
from ckptfmt.backends.object_errors import Cause, Failure, translate
from ckptfmt.backends.object_publishing import Place, damaged, publish, remove_own
from ckptfmt.backends.object_store import ObjectStore
from ckptfmt.errors import InvalidInput, OutOfSpace
from ckptfmt.ports.backend import Buffer

_ONE_PUT_MAX: Final = 64 << 20
_PIECE: Final = 8 << 20


class FileStore(ObjectStore, Protocol):
    """A store that sends a file by a multipart upload of its own."""

    def put_file(self, key: str, descriptor: int, nbytes: int) -> str | None: ...


class SpoolWriter:
    """An ``ObjectWriter`` of the port. The file has no name, and is gone with the process."""

    def __init__(self, place: Place, key: str, nbytes: int) -> None:
        self._place: Final = place
        self._key: Final = key
        self._where: Final = place.where(key)
        self._nbytes: Final = nbytes
        self._coverage: Final = Coverage(self._where, nbytes)
        self._turn: Final = threading.Condition()
        self._writing = 0
        self._state = "open"
        self._file: Final = tempfile.TemporaryFile(prefix="ckptfmt-spool-")  # noqa: SIM115 - closed at the end
        room = os.fstatvfs(self._file.fileno())
        if room.f_bavail * room.f_frsize < nbytes:
            self._file.close()
            raise self._no_room(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _no_room(self, error: OSError) -> OutOfSpace:
        return OutOfSpace(
            f"write {self._where}: its {self._nbytes} bytes pass through a file in {tempfile.gettempdir()}: "
            f"{error.strerror}; set TMPDIR to a place with room",
            needed=self._nbytes,
            errno=error.errno,
        )

    def write_at(self, offset: int, data: Buffer) -> None:
        view = flat_bytes(data, f"write {self._where} at offset {offset}")
        self._coverage.check(offset, len(view))
        with self._turn:
            self._require_open("write")
            self._writing += 1
        try:
            at, rest = offset, view
            while len(rest):
                count = os.pwrite(self._file.fileno(), rest, at)
                at, rest = at + count, rest[count:]
            self._coverage.add(offset, len(view))
        except OSError as error:
            self._state = "dead after an error"
            raise self._no_room(error) from error
        finally:
            with self._turn:
                self._writing -= 1
                self._turn.notify_all()

    def finish(self) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._state != "finishing" and self._writing == 0)
            if self._state == "finished":
                return
            self._require_open("finish")
            self._coverage.require_whole()
            self._state = "finishing"
        state = "dead after an error"
        try:
            if self._nbytes <= _ONE_PUT_MAX:
                publish(self._place, self._key, memoryview(os.pread(self._file.fileno(), self._nbytes, 0)))
            else:
                self._upload()
            state = "finished"
        except Failure as failure:
            raise translate(failure, "finish", self._where) from failure
        finally:
            with self._turn:
                self._state = state
                self._turn.notify_all()
            if state == "finished":
                self._file.close()

    def _upload(self) -> None:
        """The driver's upload overwrites; the name of a pack is its writer's alone, so that nobody else's is there."""
        place, store = self._place, cast(FileStore, self._place.store)
        if place.is_taken(self._key):
            raise Failure(Cause.TAKEN, "the key is taken")
        whole = place.whole(self._key)
        etag = place.patience.insist(lambda: store.put_file(whole, self._file.fileno(), self._nbytes))
        if place.patience.insist(lambda: store.head(whole)).nbytes != self._nbytes or not self._reads_back():
            remove_own(place, self._key, etag)
            raise damaged(place, self._key)

    def _reads_back(self) -> bool:
        return all(
            zlib.crc32(self._stored(at, length)) == zlib.crc32(os.pread(self._file.fileno(), length, at))
            for at, length in self._pieces()
        )

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for at in range(0, self._nbytes, _PIECE):
            yield at, min(_PIECE, self._nbytes - at)

    def _stored(self, at: int, length: int) -> memoryview:
        view, done = memoryview(bytearray(length)), 0
        whole = self._place.whole(self._key)
        while done < length:
            rest, here = view[done:], at + done
            done += self._place.patience.insist(lambda: self._place.store.get_into(whole, here, rest))  # noqa: B023
        return view

    def abort(self) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._state != "finishing" and self._writing == 0)
            if self._state in ("finished", "aborted"):
                return
            self._state = "aborted"
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def _require_open(self, operation: str) -> None:
        if self._state != "open":
            raise InvalidInput(
                f"{operation} {self._where}: the writer is {self._state}; write the object again under a new name"
            )
