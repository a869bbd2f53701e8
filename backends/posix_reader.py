"""Reads a range of one object: from the page cache if it is there, else past it.

Nothing is kept between calls: each opens and closes its own descriptor.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from typing import Final

from ckptfmt.backends.buffers import address_of
from ckptfmt.backends.posix_descriptors import opened
from ckptfmt.backends.posix_direct import DirectRules
from ckptfmt.backends.posix_errors import symlink_refused
from ckptfmt.backends.posix_names import Names
from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.errors import BackendError, Corrupt, FormatError, NotFound

OPEN_TO_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""No link is followed, and a pipe in the place of an object is not waited for: it is found to be no file."""
_CANT_TELL: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL, errno.EACCES})


class PosixReader:
    """Reads for one backend. Thread-safe; raises ``OSError`` for its owner to translate.

    A file whose handle the server forgot while it was read is opened anew, and read from the beginning of the range.
    """

    def __init__(self, rules: DirectRules, names: Names, syscalls: Syscalls) -> None:
        self._rules: Final = rules
        self._names: Final = names
        self._sys: Final = syscalls

    def read_into(self, path: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset``. ``Corrupt`` if the file ends before that."""
        self._names.again(path, lambda: self._read_into(path, offset, view), reads=True)

    def read_whole(self, path: str, limit: int) -> bytes:
        """Return all bytes of a small file. ``FormatError`` if there are more than ``limit``."""
        return self._names.again(path, lambda: self._read_whole(path, limit), reads=True)

    def _read_into(self, path: str, offset: int, view: memoryview) -> None:
        with opened(self._sys, path, OPEN_TO_READ, writing=False) as descriptor:
            facts = self._sys.fstat(descriptor)
            require_regular(facts, path)
            if facts.st_size < offset + len(view):
                raise _short(path, offset, len(view), max(0, facts.st_size - offset))
            done = self._read_direct(descriptor, facts.st_dev, path, offset, view)
            self._read_buffered(descriptor, path, offset, view, done)

    def _read_whole(self, path: str, limit: int) -> bytes:
        with opened(self._sys, path, OPEN_TO_READ, writing=False) as descriptor:
            facts = self._sys.fstat(descriptor)
            require_regular(facts, path)
            if facts.st_size > limit:
                raise FormatError(
                    f"read {path}: {facts.st_size} bytes, but at most {limit} are expected of such an object; "
                    "it was not written by this library, or is damaged"
                )
            data = bytearray(facts.st_size)
            self._read_buffered(descriptor, path, 0, memoryview(data), 0)
            return bytes(data)

    def _read_direct(self, descriptor: int, device: int, path: str, offset: int, view: memoryview) -> int:
        """Read the whole blocks of ``view`` past the page cache, if that is both possible and faster.

        Returns how many bytes were read; the rest is left to buffered reads.
        """
        rule = self._rules.rule(descriptor, device, path)
        if rule is None:
            return 0
        body = len(view) - len(view) % rule.block
        if not body or not rule.suits(offset, body, address_of(view)) or self._is_cached(descriptor, offset, view):
            return 0
        done = 0
        try:
            self._sys.set_direct(descriptor, True)
            while done < body and rule.suits(offset + done, body - done, address_of(view[done:])):
                count = self._sys.pread_into(descriptor, view[done:body], offset + done)
                if count == 0:
                    raise _short(path, offset, len(view), done)
                done += count
            self._sys.set_direct(descriptor, False)
        except OSError as error:
            if error.errno != errno.EINVAL or isinstance(error, BackendError):
                raise
            self._rules.refuse(device, path)
            self._sys.set_direct(descriptor, False)
        return done

    def _is_cached(self, descriptor: int, offset: int, view: memoryview) -> bool:
        """Whether at least half of the range is in the page cache.

        ``RWF_NOWAIT`` alone would not do: on a miss, current kernels start readahead before they
        answer ``EAGAIN``, so that a cold range is read twice. Where the cached pages can't be counted,
        it is tried with the first page only.
        """
        try:
            return self._sys.cached_pages(descriptor, offset, len(view)) * mmap.PAGESIZE * 2 >= len(view)
        except OSError as error:
            if error.errno not in _CANT_TELL:
                raise
        try:
            return self._sys.pread_cached(descriptor, view[: mmap.PAGESIZE], offset) > 0
        except OSError as error:
            if error.errno != errno.EAGAIN and error.errno not in _CANT_TELL:
                raise
            return False

    def _read_buffered(self, descriptor: int, path: str, offset: int, view: memoryview, done: int) -> None:
        while done < len(view):
            count = self._sys.pread_into(descriptor, view[done:], offset + done)
            if count == 0:
                raise _short(path, offset, len(view), done)
            done += count


def require_regular(facts: os.stat_result, path: str) -> None:
    """Raise unless ``facts`` are those of a regular file."""
    if stat.S_ISLNK(facts.st_mode):
        raise symlink_refused("read", path)
    if not stat.S_ISREG(facts.st_mode):
        raise NotFound(f"read {path}: not a file, so no such object; list the folder for the names that exist")


def _short(path: str, offset: int, expected: int, found: int) -> Corrupt:
    return Corrupt(
        f"read {path} at offset {offset}: expected {expected} bytes, found {found}; "
        "the object is truncated: verify the generation, and restore an older one or another copy",
        kind="truncated",
    )
