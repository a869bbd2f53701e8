"""Writes one large object to an object store: parts go out of the callers' memory and threads, in any order.

Nothing stands under the key before ``finish``. Then it is published under the condition that the key be free, where the
server heeds one, and compared with what was sent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ckptfmt.backends.buffers import Coverage, copy_into, flat_bytes
from ckptfmt.backends.crc import crc32
from ckptfmt.backends.object_errors import UNKNOWN, Cause, Failure, translate
from ckptfmt.backends.object_gathering import Gathering
from ckptfmt.backends.object_probe import completes_conditionally
from ckptfmt.backends.object_publishing import Place, damaged, publish, remove_own
from ckptfmt.backends.object_store import Meta, MultipartStore, Part
from ckptfmt.errors import InvalidInput
from ckptfmt.ports.backend import Buffer

_MIB: Final = 1 << 20
_BACK_THREADS: Final = 4


class ObjectWriter:
    """An ``ObjectWriter`` of the port. An object of at most one part is one PUT."""

    def __init__(self, place: Place, store: MultipartStore, key: str, nbytes: int, write_bytes: int = 0) -> None:
        self._place: Final = place
        self._store: Final = store
        self._key: Final = key
        self._whole: Final = place.whole(key)
        self._where: Final = place.where(key)
        self._nbytes: Final = nbytes
        # AWS wants numbers without a gap: all parts but the last have one size, which is known from the start.
        self._part_bytes: Final = max(store.part_bytes, write_bytes, -(-nbytes // store.parts_max // _MIB) * _MIB)
        self._coverage: Final = Coverage(self._where, nbytes)
        self._gathering: Final = Gathering(self._part_length)
        self._turn: Final = threading.Condition()
        self._beginning: Final = threading.Lock()
        self._writing = 0
        self._state = "open"
        self._upload: str | None = None
        self._parts: dict[int, Part] = {}
        self._small: Final = bytearray(nbytes) if nbytes <= self._part_bytes else None

    def _part_length(self, index: int) -> int:
        return min(self._part_bytes, self._nbytes - index * self._part_bytes)

    # -- writing -------------------------------------------------------------------------------
    def write_at(self, offset: int, data: Buffer) -> None:
        view = flat_bytes(data, f"write {self._where} at offset {offset}")
        self._coverage.check(offset, len(view))
        with self._turn:
            self._require_open("write")
            self._writing += 1
        try:
            with self._dead_after_error("write", offset):
                self._write(offset, view)
            self._coverage.add(offset, len(view))
        finally:
            with self._turn:
                self._writing -= 1
                self._turn.notify_all()

    def _write(self, offset: int, view: memoryview) -> None:
        if self._small is not None:
            copy_into(memoryview(self._small)[offset : offset + len(view)], view)
            return
        # All pieces are handed in before a part is sent: who has the rest of one finds them there and copies nothing.
        with contextlib.ExitStack() as until_sent:
            ready: list[tuple[int, tuple[memoryview, ...]]] = []
            while len(view):
                index, at = divmod(offset, self._part_bytes)
                length = self._part_length(index)
                piece = view[: length - at]
                if len(piece) == length:
                    ready.append((index, (piece,)))
                else:
                    whole = until_sent.enter_context(self._gathering.added(index, at, piece))
                    if whole is not None:
                        ready.append((index, whole))
                offset += len(piece)
                view = view[len(piece) :]
            for index, pieces in ready:
                self._send(index, pieces)

    def _send(self, index: int, data: tuple[memoryview, ...]) -> None:
        upload = self._begun()
        crc = 0
        for piece in data:
            crc = crc32(piece, crc)
        part = self._place.patience.insist(
            lambda: self._store.put_part(self._whole, upload, index + 1, data, crc), wanted=self._is_open
        )
        with self._turn:
            self._parts[index] = part

    def _begun(self) -> str:
        with self._beginning:
            if self._upload is None:
                self._upload = self._place.patience.insist(lambda: self._store.begin(self._whole), wanted=self._is_open)
            return self._upload

    def _is_open(self) -> bool:
        return self._state in ("open", "finishing")

    # -- the end -------------------------------------------------------------------------------
    def finish(self) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._state != "finishing" and self._writing == 0)
            if self._state == "finished":
                return
            self._require_open("finish")
            self._coverage.require_whole()
            self._state = "finishing"
        with self._dead_after_error("finish", None):
            if self._small is not None:
                with memoryview(self._small) as data:
                    publish(self._place, self._key, data, wanted=self._is_open)
            else:
                self._complete()
        self._gathering.forget()
        with self._turn:
            self._state = "finished"
            self._turn.notify_all()

    def _complete(self) -> None:
        place, upload = self._place, self._begun()
        parts = [self._parts[index] for index in sorted(self._parts)]
        absent = completes_conditionally(self._store, place.url, place.root, place.patience)
        if not absent and place.is_taken(self._key):
            raise Failure(Cause.TAKEN, "the key is taken")
        try:
            etag = place.patience.insist(lambda: self._store.complete(self._whole, upload, parts, absent=absent))
        except Failure as failure:
            # Of a completion whose answer was lost the next one says that the key is taken, or the upload gone.
            if failure.cause in UNKNOWN | {Cause.TAKEN, Cause.NO_UPLOAD} and self._is_there():
                return
            raise
        meta = place.patience.insist(lambda: self._store.head(self._whole))
        if not self._is_whole(meta):
            if meta.etag is not None and etag is not None and meta.etag != etag:
                # The condition was met by two uploads at once: not every server compares and publishes in one.
                raise Failure(Cause.TAKEN, "another upload of the key was published at the same time")
            remove_own(place, self._key, etag)
            raise damaged(place, self._key)

    def _is_there(self) -> bool:
        """Whether the key holds these bytes, read back."""
        try:
            if self._place.patience.insist(lambda: self._store.head(self._whole)).nbytes != self._nbytes:
                return False
            return self._reads_back()
        except Failure as failure:
            if failure.cause in (Cause.ABSENT, Cause.RANGE):
                return False
            raise

    def _is_whole(self, meta: Meta) -> bool:
        """Whether what was published is what was sent, by the server's checksum of it where it is known to be one."""
        if meta.nbytes != self._nbytes:
            return False
        if meta.checksum is not None and self._place.manners().checked:
            parts = [self._parts[index] for index in sorted(self._parts)]
            if meta.checksum == self._store.checksum(parts):
                return True
        return self._reads_back()

    def _reads_back(self) -> bool:
        def is_equal(index: int) -> bool:
            view = memoryview(bytearray(self._part_length(index)))
            at = done = 0
            while done < len(view):
                at = index * self._part_bytes + done
                rest = view[done:]
                done += self._place.patience.insist(lambda: self._store.get_into(self._whole, at, rest))  # noqa: B023
            return crc32(view) == self._parts[index].crc

        with ThreadPoolExecutor(_BACK_THREADS, "ckptfmt-read-back") as pool:
            return all(pool.map(is_equal, sorted(self._parts)))

    def abort(self) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._state != "finishing")
            if self._state in ("finished", "aborted"):
                return
            self._state = "aborted"
            # A part that arrives after the abort would stay behind.
            self._turn.wait_for(lambda: self._writing == 0)
        self._gathering.forget()
        if self._upload is None:
            return
        upload = self._upload
        try:
            # What a completion has published whose answer was lost stays: it may be that of another copy of the pack.
            self._place.patience.insist(lambda: self._store.abort(self._whole, upload))
        except Failure as failure:
            raise translate(failure, "abort", self._where) from failure

    # -- states --------------------------------------------------------------------------------
    def _require_open(self, operation: str) -> None:
        if self._state != "open":
            raise InvalidInput(
                f"{operation} {self._where}: the writer is {self._state}; write the object again under a new name"
            )

    @contextlib.contextmanager
    def _dead_after_error(self, operation: str, offset: int | None) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            with self._turn:
                if self._state != "aborted":
                    self._state = "dead after an error"
                self._turn.notify_all()
            if isinstance(error, Failure):
                raise translate(error, operation, self._where, offset=offset) from error
            raise
