"""Gives an object its name on an fsspec file system: all of it or nothing, and only if the name is free.

fsspec's files publish what they hold when they are closed, also by an exception or the garbage collector. So no file
is opened under an object's own name where that can be avoided, and one that fails is abandoned, not closed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, Final, Protocol

from ckptfmt.backends.fsspec_errors import Taken, meaning
from ckptfmt.backends.fsspec_kinds import has_own_rename
from ckptfmt.backends.fsspec_place import Place
from ckptfmt.backends.keys import temporary_name
from ckptfmt.errors import BackendError, CkptError, Unavailable

log = logging.getLogger("ckptfmt.backends.fsspec")

PIECE_BYTES: Final = 8 << 20
_TRIES: Final = 5
_PAUSE_SECONDS: Final = 0.1


class Content(Protocol):
    """What an object shall hold."""

    @property
    def nbytes(self) -> int: ...

    def pieces(self) -> Iterator[bytes]:
        """All bytes in order, some at a time."""

    def whole(self) -> bytes: ...

    def upload(self, fs: Any, path: str, **options: Any) -> None:
        """Hand all bytes to the file system in one call."""


class InMemory:
    """A small object's bytes."""

    def __init__(self, data: bytes) -> None:
        self.nbytes: Final = len(data)
        self._data: Final = data

    def pieces(self) -> Iterator[bytes]:
        yield from (self._data[at : at + PIECE_BYTES] for at in range(0, self.nbytes, PIECE_BYTES))

    def whole(self) -> bytes:
        return self._data

    def upload(self, fs: Any, path: str, **options: Any) -> None:
        fs.pipe_file(path, self._data, mode="create")


class InFile:
    """The bytes of an open local file, which may have no name any more."""

    def __init__(self, file: BinaryIO, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self._file: Final = file

    def pieces(self) -> Iterator[bytes]:
        for at in range(0, self.nbytes, PIECE_BYTES):
            piece = os.pread(self._file.fileno(), min(PIECE_BYTES, self.nbytes - at), at)
            if len(piece) != min(PIECE_BYTES, self.nbytes - at):
                raise BackendError("the spool file is shorter than what was written into it; look at its disk")
            yield piece

    def whole(self) -> bytes:
        return b"".join(self.pieces())

    def upload(self, fs: Any, path: str, **options: Any) -> None:
        fs.put_file(f"/proc/self/fd/{self._file.fileno()}", path, mode="create", **options)


class Publisher(Protocol):
    def publish(self, place: Place, key: str, content: Content, *, read_back: bool) -> None:
        """Let ``key`` hold ``content``. ``Taken`` if it holds anything already.

        With ``read_back`` every byte is compared with what the place then returns, else the length is.
        """


class ByCondition:
    """The store itself refuses a taken name, in the request that would make the object."""

    def publish(self, place: Place, key: str, content: Content, *, read_back: bool) -> None:
        self._upload(place, key, content)
        try:
            require_stored(place, key, content, read_back=read_back)
        except BackendError as error:
            # Where only the question failed the object stays: somebody who created the same bytes may count on it.
            if error.kind == "read_back":
                with contextlib.suppress(CkptError):
                    place.remove(key)
            raise

    def _upload(self, place: Place, key: str, content: Content) -> None:
        for attempt in range(_TRIES):
            try:
                with place.calls("write", key) as fs:
                    try:
                        content.upload(fs, place.path(key), **place.kind.upload)
                    except Exception as error:
                        if meaning(error) == "taken":
                            raise Taken from error
                        raise
                return
            except Unavailable as error:
                # Also what a store says of two requests that meet (409): the next answer is who won.
                if attempt == _TRIES - 1 or not error.transient:
                    raise
                time.sleep(_PAUSE_SECONDS * 2**attempt * (0.5 + random.random()))


class ByLink:
    """Written and checked under a temporary name, which a hard link then makes the object's."""

    def __init__(self) -> None:
        self._syncs: bool | None = None  # until it was tried out

    def publish(self, place: Place, key: str, content: Content, *, read_back: bool) -> None:
        temporary = beside(key)
        try:
            stream(place, temporary, content)
            self._sync(place, temporary)
            require_stored(place, temporary, content, read_back=read_back)
            self._link(place, temporary, key)
        finally:
            with contextlib.suppress(CkptError):  # debris, which sweep_debris finds
                place.remove(temporary)

    def _sync(self, place: Place, key: str) -> None:
        if place.kind.sync is None or self._syncs is False:
            return
        with place.calls("sync", key) as fs:
            try:
                place.kind.sync(fs, place.path(key))
            except Exception as error:
                # A server that lacks the word may say so in its own words; one that had it before has failed.
                if meaning(error) != "unsupported" and (self._syncs or meaning(error) != "unknown"):
                    raise
                self._syncs = False
                log.warning(
                    "%s: this server cannot sync a file (fsync@openssh.com): a power cut there may lose what was saved",
                    place.url,
                )
            else:
                self._syncs = True

    def _link(self, place: Place, source: str, key: str) -> None:
        assert place.kind.link is not None
        with place.calls("write", key) as fs:
            try:
                place.kind.link(fs, place.path(source), place.path(key))
            except Exception as error:
                # SFTP before version 6 says no more than "Failure".
                if meaning(error) == "taken" or (meaning(error) == "unknown" and place.look(key) is not None):
                    raise Taken from error
                raise


_memory: Final = threading.Lock()


class ByLock:
    """fsspec's memory: nobody else can see it, so a lock of this process is condition enough."""

    def publish(self, place: Place, key: str, content: Content, *, read_back: bool) -> None:
        with _memory:
            if place.look(key, "write") is not None:
                raise Taken
            data = content.whole()
            with place.calls("write", key) as fs:
                fs.pipe_file(place.path(key), data)


class ByLooking:
    """Looks whether the name is free, then writes: right only if no other process writes it at the same time."""

    def __init__(self) -> None:
        self._turn: Final = threading.Condition()
        self._under_way: Final[set[tuple[str, str]]] = set()

    def publish(self, place: Place, key: str, content: Content, *, read_back: bool) -> None:
        with self._alone(place, key):
            self._require_free(place, key)
            place.make_folders(key.rpartition("/")[0])
            with place.calls("write", key) as fs:
                renames = has_own_rename(fs)
            if not renames:  # then most likely an object store, where an object appears when it is complete
                stream(place, key, content)
                require_stored(place, key, content, read_back=read_back)
                return
            temporary = beside(key)
            try:
                stream(place, temporary, content)
                require_stored(place, temporary, content, read_back=read_back)
                self._require_free(place, key)
                with place.calls("write", key) as fs:
                    fs.mv(place.path(temporary), place.path(key))
            finally:
                with contextlib.suppress(CkptError):
                    place.remove(temporary)

    @contextlib.contextmanager
    def _alone(self, place: Place, key: str) -> Iterator[None]:
        """Threads of this process, at least, take turns at a name."""
        mine = (place.url, key)
        with self._turn:
            self._turn.wait_for(lambda: mine not in self._under_way)
            self._under_way.add(mine)
        try:
            yield
        finally:
            with self._turn:
                self._under_way.discard(mine)
                self._turn.notify_all()

    def _require_free(self, place: Place, key: str) -> None:
        if place.look(key, "write") is not None:
            raise Taken


def beside(key: str) -> str:
    """A temporary name in the folder of ``key``."""
    folder, slash, _ = key.rpartition("/")
    return f"{folder}{slash}{temporary_name()}"


def stream(place: Place, key: str, content: Content) -> None:
    """Write ``content`` to a file of a name that is free. On any error nothing stays of it."""
    with place.calls("write", key) as fs:
        file = fs.open(place.path(key), "wb")
    try:
        at = 0
        for piece in content.pieces():
            with place.calls("write", key, offset=at):
                file.write(piece)
            at += len(piece)
        with place.calls("write", key):
            file.close()
    except BaseException:
        _abandon(file)
        with contextlib.suppress(CkptError):
            place.remove(key)
        raise


def _abandon(file: Any) -> None:
    """Let go of a file whose ``close`` and ``__del__`` would publish what was written so far."""
    from fsspec.spec import AbstractBufferedFile

    with contextlib.suppress(Exception):
        if isinstance(file, AbstractBufferedFile):
            file.closed = True
            file.discard()
        else:
            file.close()


def require_stored(place: Place, key: str, content: Content, *, read_back: bool) -> None:
    """Raise ``BackendError`` unless the place holds ``content``: few file systems tell a checksum to be trusted."""
    found = place.require_file(key, "check")
    if found == content.nbytes and (not read_back or is_equal(place, key, content)):
        return
    raise BackendError(
        f"write {place.where(key)}: what was read back differs from what was written ({content.nbytes} bytes, "
        f"found {found}); write it again under another name, and look at the server",
        kind="read_back",
    )


def is_equal(place: Place, key: str, content: Content) -> bool:
    """Whether the object at ``key`` holds exactly ``content``. ``NotFound`` if there is none."""
    if place.require_file(key, "compare") != content.nbytes:
        return False
    buffer = memoryview(bytearray(min(PIECE_BYTES, content.nbytes)))
    at = 0
    for piece in content.pieces():
        view = buffer[: len(piece)]
        if place.read_into(key, at, view) != len(piece) or view != piece:
            return False
        at += len(piece)
    return True
