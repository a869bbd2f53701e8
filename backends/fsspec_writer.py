"""Writes one large object: into a local spool file from many threads, and at the end to where it belongs.

Hardly any file system of fsspec writes at an offset, and none that publishes at close may hold an unfinished object.
So the object waits on a local disk, in a file without a name, which goes with the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

from ckptfmt.backends.buffers import Coverage, flat_bytes
from ckptfmt.backends.fsspec_publish import Content, InFile
from ckptfmt.backends.posix_errors import NO_SPACE, translate
from ckptfmt.errors import BackendError, InvalidInput, OutOfSpace
from ckptfmt.ports.backend import Buffer

_NO_RESERVATION: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_LARGEST: Final = 2**63 - 1


class SpoolWriter:
    """An ``ObjectWriter``. ``publish`` gets the whole object when ``finish`` is called."""

    def __init__(self, where: str, nbytes: int, folder: str, publish: Callable[[Content], None]) -> None:
        if not 0 <= nbytes <= _LARGEST:
            raise InvalidInput(f"write {where}: {nbytes} is no size of an object; give 0 to {_LARGEST} bytes")
        self._where: Final = where
        self._nbytes: Final = nbytes
        self._folder: Final = folder
        self._publish: Final = publish
        self._coverage: Final = Coverage(where, nbytes)
        self._turn: Final = threading.Condition()
        self._writing = 0
        self._state = "open"
        self._file: Final = self._open()

    def _open(self) -> BinaryIO:
        with self._spooling("spool"):
            file = tempfile.TemporaryFile(dir=self._folder, prefix="ckptfmt-spool-")  # noqa: SIM115
            try:
                if shutil.disk_usage(self._folder).free < self._nbytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if self._nbytes:
                    os.posix_fallocate(file.fileno(), 0, self._nbytes)
            except OSError as error:
                if error.errno not in _NO_RESERVATION:
                    file.close()
                    raise
            return file

    def write_at(self, offset: int, data: Buffer) -> None:
        view = flat_bytes(data, f"write {self._where} at offset {offset}")
        self._coverage.check(offset, len(view))
        with self._turn:
            self._require_open("write")
            self._writing += 1
        try:
            with self._dead_after_error(), self._spooling("spool", offset):
                done = 0
                while done < len(view):
                    done += os.pwrite(self._file.fileno(), view[done:], offset + done)
            self._coverage.add(offset, len(view))
        finally:
            with self._turn:
                self._writing -= 1
                self._turn.notify_all()

    def finish(self) -> None:
        """Publish the object. ``Conflict`` if its name was taken in the meantime."""
        with self._turn:
            if self._state == "finished":
                return
            self._require_open("finish")
            self._turn.wait_for(lambda: self._writing == 0)
            self._require_open("finish")
            self._coverage.require_whole()
            self._state = "finishing"
        with self._dead_after_error():
            self._publish(InFile(self._file, self._nbytes))
        self._end("finished")

    def abort(self) -> None:
        """Give the object up. Nothing of it was ever seen; a finished object stays."""
        with self._turn:
            self._turn.wait_for(lambda: self._state != "finishing" and self._writing == 0)
            if self._state == "finished":
                return
        self._end("aborted")

    def _end(self, state: str) -> None:
        with self._turn:
            self._state = state
            self._file.close()
            self._turn.notify_all()

    def __del__(self) -> None:
        # A writer dropped without finish or abort publishes nothing: the spool goes, and nothing else was made.
        file = getattr(self, "_file", None)
        if file is not None:
            file.close()

    def _require_open(self, operation: str) -> None:
        if self._state != "open":
            raise InvalidInput(
                f"{operation} {self._where}: the writer is {self._state}; write the object again under a new name"
            )

    @contextlib.contextmanager
    def _dead_after_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with self._turn:
                if self._state != "aborted":
                    self._state = "dead after an error"
                self._turn.notify_all()
            raise

    @contextlib.contextmanager
    def _spooling(self, operation: str, offset: int | None = None) -> Iterator[None]:
        try:
            yield
        except BackendError:
            raise
        except OSError as error:
            where = f"{self._where} in the folder {self._folder}"
            if error.errno not in NO_SPACE:
                raise translate(error, operation, where, offset=offset) from error
            free = shutil.disk_usage(self._folder).free
            raise OutOfSpace(
                f"{operation} {where}: not enough space there to hold the object until it is whole (needed "
                f'{self._nbytes} bytes, free {free} bytes); name a larger disk with storage_options={{"spool": ...}}',
                needed=self._nbytes,
                free=free,
                errno=error.errno,
            ) from error
