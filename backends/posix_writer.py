"""Writes one large object: past the page cache where that works, from many threads, durable at the end.

The object stands under its final name from the start, but is longer than announced until ``finish``
cuts it to size: what a killed writer leaves never has the right length. Where others share the file system, ``finish``
also reads everything back from its server.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ckptfmt.backends.buffers import Coverage, address_of, flat_bytes
from ckptfmt.backends.posix_direct import BLOCK, DirectRule, DirectRules
from ckptfmt.backends.posix_errors import out_of_space, translate
from ckptfmt.backends.posix_folders import Folders
from ckptfmt.backends.posix_names import Names
from ckptfmt.backends.posix_place import Place
from ckptfmt.backends.posix_read_back import ReadBack, Sent
from ckptfmt.backends.syscalls import O_DIRECT, Syscalls
from ckptfmt.errors import BackendError, CkptError, InvalidInput
from ckptfmt.ports.backend import Buffer

_NO_RESERVATION: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})
"""fallocate's ways to say that this file system can't reserve; a sparse file of the same length does."""


@dataclass(frozen=True)
class WriterTools:
    """What the writers of one backend share. ``read_back`` None: not on this file system."""

    place: Place
    names: Names
    folders: Folders
    rules: DirectRules
    read_back: ReadBack | None
    syscalls: Syscalls


class PosixWriter:
    """An ``ObjectWriter`` on a file. Its descriptors are the only ones the backend keeps open."""

    def __init__(self, path: str, nbytes: int, tools: WriterTools) -> None:
        self._path: Final = path
        self._nbytes: Final = nbytes
        self._place: Final = tools.place
        self._names: Final = tools.names
        self._folders: Final = tools.folders
        self._rules: Final = tools.rules
        self._read_back: Final = tools.read_back
        self._sent: Final = Sent()
        self._sys: Final = tools.syscalls
        self._coverage: Final = Coverage(path, nbytes)
        self._turn: Final = threading.Condition()
        self._writing = 0
        self._state = "open"
        self._rule: DirectRule | None = None
        self._direct = -1
        self._buffered = -1
        self._device = 0

    # -- opening -------------------------------------------------------------------------------
    def open(self) -> None:
        """Make the file and reserve its space. On any error nothing is left behind."""
        free = self._place.room()
        if free is not None and free.nbytes < self._nbytes:
            raise out_of_space(f"write {self._path}: not enough space", errno.ENOSPC, self._nbytes, free)
        self._buffered = self._names.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW)
        try:
            self._reserve()
            self._open_direct()
        except BaseException as error:
            try:
                self.abort()
            except CkptError as second:
                error.add_note(f"and the file stayed behind: {second}")
            raise

    def _reserve(self) -> None:
        whole = (self._nbytes // BLOCK + 1) * BLOCK  # always longer than the object: see the module's docstring
        try:
            self._sys.fallocate(self._buffered, whole)
        except OSError as error:
            if error.errno not in _NO_RESERVATION:
                raise
            # The full length beforehand: direct writes that extend a file take turns.
            self._sys.ftruncate(self._buffered, whole)

    def _open_direct(self) -> None:
        self._device = self._sys.fstat(self._buffered).st_dev
        self._rule = self._rules.rule(self._buffered, self._device, self._path)
        if self._rule is None:
            return
        try:
            self._direct = self._names.open(self._path, os.O_WRONLY | O_DIRECT | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._refuse_direct()

    def _refuse_direct(self) -> None:
        self._rule = None  # the descriptor stays open until no thread can be using it
        self._rules.refuse(self._device, self._path)

    # -- writing -------------------------------------------------------------------------------
    def write_at(self, offset: int, data: Buffer) -> None:
        view = flat_bytes(data, f"write {self._path} at offset {offset}")
        self._coverage.check(offset, len(view))
        with self._turn:
            self._require_open("write")
            self._writing += 1
        try:
            with self._dead_after_error("write", offset):
                self._write(offset, view)
                if self._read_back is not None:
                    self._sent.note(offset, view)
            self._coverage.add(offset, len(view))
        finally:
            with self._turn:
                self._writing -= 1
                self._turn.notify_all()

    def _write(self, offset: int, view: memoryview) -> None:
        rule = self._rule
        if rule is None:
            return self._write_buffered(offset, view)
        tail = len(view) % rule.block if offset + len(view) == self._nbytes else 0
        body = len(view) - tail
        if offset % rule.block or body % rule.block:
            return self._write_buffered(offset, view)
        if body and rule.suits(offset, body, address_of(view)):
            self._write_direct(rule, offset, view[:body])
        elif body:
            self._write_buffered(offset, view[:body])
        if tail:
            self._write_tail(rule, offset + body, view[body:])
        return None

    def _write_direct(self, rule: DirectRule, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            rest = view[done:]
            if self._rule is None or not rule.suits(offset + done, len(rest), address_of(rest)):
                return self._write_buffered(offset + done, rest)
            try:
                done += self._wrote(self._sys.pwrite(self._direct, rest, offset + done), offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._refuse_direct()
        return None

    def _write_tail(self, rule: DirectRule, offset: int, view: memoryview) -> None:
        """Write the last, partial block padded with zeros, which ``finish`` cuts off."""
        if self._rule is None:
            return self._write_buffered(offset, view)
        page = mmap.mmap(-1, rule.block)  # never closed by hand: an error's traceback may still hold a view of it
        page[: len(view)] = view
        return self._write_direct(rule, offset, memoryview(page))

    def _write_buffered(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += self._wrote(self._sys.pwrite(self._buffered, view[done:], offset + done), offset + done)

    def _wrote(self, count: int, offset: int) -> int:
        if count <= 0:
            raise BackendError(
                f"write {self._path} at offset {offset}: the system took no bytes and gave no reason; "
                "check the file system that holds it"
            )
        return count

    # -- ending --------------------------------------------------------------------------------
    def finish(self) -> None:
        """Cut the object to its size and make it durable: file, then folder. A failed sync is never repeated.

        ``BackendError`` of the kind ``read_back`` if the server gives back other bytes than were written.
        """
        with self._turn:
            if self._state == "finished":
                return
            self._require_open("finish")
            self._turn.wait_for(lambda: self._writing == 0)
            self._require_open("finish")
            self._coverage.require_whole()
            self._state = "finishing"
        with self._dead_after_error("finish", None):
            self._sys.ftruncate(self._buffered, self._nbytes)
            self._sys.fsync(self._buffered)
            self._close()
            if self._read_back is not None:
                self._read_back.compare(f"finish {self._path}", self._path, self._nbytes, self._sent)
            self._folders.sync(os.path.dirname(self._path))
        with self._turn:
            self._state = "finished"
            self._turn.notify_all()

    def abort(self) -> None:
        """Give the object up and remove it. A finished object stays."""
        with self._turn:
            self._turn.wait_for(lambda: self._state != "finishing")
            if self._state in ("finished", "aborted"):
                return
            self._state = "aborted"
            # A descriptor closed under a running write could by then be another file's.
            self._turn.wait_for(lambda: self._writing == 0)
        with contextlib.suppress(OSError):
            self._close()
        try:
            self._names.unlink(self._path)
            self._folders.sync(os.path.dirname(self._path))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise translate(error, "abort", self._path) from error

    def _close(self) -> None:
        """Close both descriptors, each exactly once; the first error is raised after both are closed."""
        direct, self._direct = self._direct, -1
        buffered, self._buffered = self._buffered, -1
        try:
            if direct >= 0:
                self._sys.close(direct)
        finally:
            if buffered >= 0:
                self._sys.close(buffered)

    def __del__(self) -> None:
        # A writer dropped without finish or abort keeps its file, as a killed process would, but no descriptors.
        with contextlib.suppress(OSError):
            self._close()

    def _require_open(self, operation: str) -> None:
        if self._state != "open":
            raise InvalidInput(
                f"{operation} {self._path}: the writer is {self._state}; write the object again under a new name"
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
            if isinstance(error, CkptError) or not isinstance(error, OSError):
                raise
            raise translate(
                error,
                operation,
                self._path,
                offset=offset,
                needed=self._nbytes,
                free=self._place.room_or_none,
            ) from error
