"""Descriptors that are closed once, whatever happens, and errors of close that hide no other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ckptfmt.backends.posix_names import Names
from ckptfmt.backends.syscalls import Syscalls


@contextlib.contextmanager
def opened(calls: Syscalls | Names, path: str, flags: int, *, writing: bool) -> Iterator[int]:
    """A descriptor for the block. The block's error comes first: that of close, after it, is only its echo.

    With ``writing``, close is the last chance of a file system to report that bytes are lost, so its error counts.
    After a read it says nothing of the bytes, which are compared with their lengths and digests anyway.
    """
    descriptor = calls.open(path, flags)
    try:
        yield descriptor
    except BaseException:
        with contextlib.suppress(OSError):
            calls.close(descriptor)
        raise
    try:
        calls.close(descriptor)
    except OSError:
        if writing:
            raise
