"""Shows a range of an object without a copy, where the page cache holds it and its pages can be kept there.

A page fault on a mapped file is a signal that nobody can catch if the bytes do not come. So a range is mapped only on
a local file system, with every page of it cached, and locked; pages are brought in by a call that can fail, before
anybody looks at them. What remains is a file that is cut short by another program while it is being looked at:
objects are never changed once written.
"""

from __future__ import annotations

import errno
import mmap
from typing import Final

from ckptfmt.backends.buffers import address_of
from ckptfmt.backends.posix_descriptors import opened
from ckptfmt.backends.posix_errors import translate
from ckptfmt.backends.posix_reader import OPEN_TO_READ, require_regular
from ckptfmt.backends.syscalls import Syscalls

_REFUSED: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.ENODEV})


class MappedRange:
    """A ``CachedRange`` at ``address``."""

    def __init__(self, path: str, offset: int, address: int, syscalls: Syscalls) -> None:
        self._path: Final = path
        self._offset: Final = offset
        self._address: Final = address
        self._sys: Final = syscalls

    def pin(self, start: int, stop: int) -> None:
        first = start - start % mmap.PAGESIZE
        try:
            self._sys.fault_in(self._address + first, stop - first)
        except OSError as error:
            raise translate(error, "read", self._path, offset=self._offset + start) from error


def map_cached(path: str, offset: int, memory: memoryview, syscalls: Syscalls) -> MappedRange | None:
    """Map the range of a file over ``memory``; None where that cannot be had. Raises ``OSError``."""
    address = address_of(memory)
    if not len(memory) or address % mmap.PAGESIZE or offset % mmap.PAGESIZE:
        return None
    with opened(syscalls, path, OPEN_TO_READ, writing=False) as descriptor:
        facts = syscalls.fstat(descriptor)
        require_regular(facts, path)
        pages = -(-len(memory) // mmap.PAGESIZE)
        if facts.st_size < offset + len(memory):
            return None  # reading it tells what is missing
        try:
            if syscalls.cached_pages(descriptor, offset, len(memory)) < pages:
                return None
            syscalls.map_locked(descriptor, offset, address, len(memory))
        except OSError as error:
            if error.errno in _REFUSED:
                return None
            raise
    return MappedRange(path, offset, address, syscalls)
