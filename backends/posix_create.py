"""Creates one small object: all of it, durably, or nothing, and never over another.

The usual way is a temporary name, file sync (and reading back, where others share the file system), ``link`` to the
final name, ``unlink``, folder sync. Where the file system has no hard links, ``renameat2(RENAME_NOREPLACE)`` takes
link's place; where it has neither, the object is written in place under a file lock, and what a killed writer left is
completed if it is a beginning of the same bytes. Only that last way lets a reader see an unfinished object, and takes a
finished one that is a beginning of the new bytes for an unfinished one.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Final

from ckptfmt.backends.keys import temporary_name
from ckptfmt.backends.posix_descriptors import opened
from ckptfmt.backends.posix_errors import NO_SPACE
from ckptfmt.backends.posix_folders import Folders
from ckptfmt.backends.posix_names import Names
from ckptfmt.backends.posix_read_back import ReadBack, Sent
from ckptfmt.backends.posix_reader import require_regular
from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.errors import BackendError, Conflict

_NO_LINK: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
"""link(2): EPERM is "the file system does not support hard links". Both names are in one folder, so that EXDEV says the
same: of a file system made of several."""
_NO_EXCLUSIVE_RENAME: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV})
"""The temporary file was made in the same folder just now, so that none of them is for want of permission."""


class Creation:
    """Creates objects for one backend. Raises ``OSError`` for its owner to translate."""

    def __init__(self, folders: Folders, names: Names, read_back: ReadBack | None, syscalls: Syscalls) -> None:
        self._folders: Final = folders
        self._names: Final = names
        self._read_back: Final = read_back
        self._sys: Final = syscalls

    def create(self, path: str, data: memoryview) -> None:
        """Make ``path`` hold exactly ``data``; ``Conflict`` if it holds something else.

        Where there is no room to find out whether a beginning of ``data`` is all of another object or what a killed
        writer left, the error is that there is no room.
        """
        folder = os.path.dirname(path)
        temporary = os.path.join(folder, temporary_name())
        try:
            self._write_new(temporary, data, path)
        except OSError as error:
            if error.errno not in NO_SPACE or not self._folders.stands(path):
                raise
            # An object that is there needs no room: without this nobody could free any, since verdicts come first.
            if self._is_beginning(path, data):
                raise
            self._require_equal(path, data)
            return self._folders.sync(folder)
        try:
            published = self._publish(temporary, path)
        except FileExistsError:
            self._names.unlink(temporary)
            self._require_equal(path, data)
            published = True
        except BaseException:
            self._drop(temporary)
            raise
        if not published:
            self._names.unlink(temporary)
            self._write_in_place(path, data)
        return self._folders.sync(folder)

    def _publish(self, temporary: str, path: str) -> bool:
        """Give the finished file its name. False if the file system can't do that without overwriting."""
        try:
            self._names.link(temporary, path)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
        else:
            self._names.unlink(temporary)
            return True
        try:
            self._sys.rename_noreplace(temporary, path)
        except OSError as error:
            if error.errno not in _NO_EXCLUSIVE_RENAME:
                raise
            return False
        return True

    def _write_new(self, path: str, data: memoryview, final: str) -> None:
        try:
            with opened(
                self._names, path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, writing=True
            ) as descriptor:
                self._write(descriptor, path, data, 0)
                self._sys.fsync(descriptor)
            if self._read_back is not None:
                sent = Sent()
                sent.note(0, data)
                self._read_back.compare(f"create {final}", path, len(data), sent)
        except BaseException:
            self._drop(path)
            raise

    def _write(self, descriptor: int, path: str, data: memoryview, done: int) -> None:
        while done < len(data):
            count = self._sys.pwrite(descriptor, data[done:], done)
            if count <= 0:
                raise BackendError(
                    f"create {path} at offset {done}: the system took no bytes and gave no reason; "
                    "check the file system that holds it"
                )
            done += count

    def _write_in_place(self, path: str, data: memoryview) -> None:
        with opened(self._names, path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, writing=True) as descriptor:
            # Held until closed, so that a beginning seen under it is a dead writer's and not a live one's.
            self._sys.lock(descriptor)
            found = self._beginning(descriptor, len(data) + 1)
            if found != data[: len(found)]:
                raise _occupied(path)
            self._write(descriptor, path, data, len(found))
            self._sys.fsync(descriptor)

    def _is_beginning(self, path: str, data: memoryview) -> bool:
        """Whether ``path`` holds less than ``data``, and nothing else."""
        require_regular(self._names.facts(path), path)
        with opened(self._names, path, os.O_RDONLY | os.O_NOFOLLOW, writing=True) as descriptor:
            found = self._beginning(descriptor, len(data))
            return len(found) < len(data) and found == data[: len(found)]

    def _require_equal(self, path: str, data: memoryview) -> None:
        require_regular(self._names.facts(path), path)
        with opened(self._names, path, os.O_RDONLY | os.O_NOFOLLOW, writing=True) as descriptor:
            if self._beginning(descriptor, len(data) + 1) != data:
                raise _occupied(path)
            # Whoever wrote it may have died before its own sync.
            self._sys.fsync(descriptor)

    def _beginning(self, descriptor: int, limit: int) -> bytearray:
        """Return the first bytes of an open file, at most ``limit``."""
        found = bytearray(limit)
        done = 0
        with memoryview(found) as view:
            while done < limit:
                count = self._sys.pread_into(descriptor, view[done:], done)
                if count == 0:
                    break
                done += count
        del found[done:]
        return found

    def _drop(self, path: str) -> None:
        # The first error is the one to tell; what stays behind is debris that `sweep_debris` finds.
        with contextlib.suppress(OSError):
            self._names.unlink(path)


def _occupied(path: str) -> Conflict:
    return Conflict(
        f"create {path}: the name is taken by other bytes; objects are never overwritten: choose another name"
    )
