"""Compares what a server has with what was written to it, before anybody calls it durable.

An acknowledged write has been lost on its way before: by a server that restarted, by a cache in between. On a network
file system the bytes are read once more, through a descriptor of their own and past this machine's page cache.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import Final

from ckptfmt.backends.posix_descriptors import opened
from ckptfmt.backends.posix_direct import BLOCK
from ckptfmt.backends.posix_names import Names
from ckptfmt.backends.syscalls import O_DIRECT, Syscalls
from ckptfmt.errors import BackendError
from ckptfmt.format import checksum

_WINDOW: Final = 8 << 20
"""Bytes that are read at a time: enough for a client to have several requests under way."""


class Sent:
    """Digests of what was written, in pieces that lie in one window each. Thread-safe."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, bytes]] = []

    def note(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            at = offset + done
            piece = data[done : done + _WINDOW - at % _WINDOW]
            self._pieces.append((at, len(piece), checksum.digest(piece)))
            done += len(piece)

    def windows(self) -> dict[int, list[tuple[int, int, bytes]]]:
        """The pieces (offset, bytes, digest) of each window, by the window's offset."""
        found: dict[int, list[tuple[int, int, bytes]]] = {}
        for piece in sorted(self._pieces):
            found.setdefault(piece[0] - piece[0] % _WINDOW, []).append(piece)
        return found


class ReadBack:
    """Reads back for one backend. ``direct`` False: not by direct I/O, but after the cache has let go of the file."""

    def __init__(self, names: Names, syscalls: Syscalls, *, direct: bool) -> None:
        self._names: Final = names
        self._sys: Final = syscalls
        self._direct: Final = direct and O_DIRECT != 0

    def compare(self, what: str, path: str, nbytes: int, sent: Sent) -> None:
        """Raise ``BackendError`` of the kind ``read_back``, about ``what``, unless ``path`` holds what was sent."""
        flags = os.O_RDONLY | os.O_NOFOLLOW
        if self._direct:
            try:
                return self._compare(what, path, nbytes, sent, flags | O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL or isinstance(error, BackendError):
                    raise
        return self._compare(what, path, nbytes, sent, flags)

    def _compare(self, what: str, path: str, nbytes: int, sent: Sent, flags: int) -> None:
        page = memoryview(mmap.mmap(-1, min(_WINDOW, -(-max(nbytes, 1) // BLOCK) * BLOCK)))
        with opened(self._names, path, flags, writing=False) as descriptor:
            if not flags & O_DIRECT:
                self._sys.drop_cache(descriptor)
            length = self._sys.fstat(descriptor).st_size
            if length != nbytes:
                raise _differs(f"{what}: it has {length} bytes on the server, not the {nbytes}")
            for start, pieces in sent.windows().items():
                found = self._fill(descriptor, page, start, min(_WINDOW, nbytes - start))
                for offset, count, digest in pieces:
                    at = offset - start
                    if at + count > found or checksum.digest(page[at : at + count]) != digest:
                        raise _differs(f"{what} at offset {offset}: the server gives other bytes back than the {count}")

    def _fill(self, descriptor: int, page: memoryview, start: int, wanted: int) -> int:
        """Read a window, in whole blocks as direct I/O wants it; returns how many bytes of it there are."""
        whole = -(-wanted // BLOCK) * BLOCK
        done = 0
        while done < wanted:
            count = self._sys.pread_into(descriptor, page[done:whole], start + done)
            if count == 0:
                break
            done += count
        return done


def _differs(what: str) -> BackendError:
    return BackendError(
        f"{what} that it has acknowledged; write the object again under a new name, and look at the server's log and "
        "disks",
        errno=errno.EIO,
        kind="read_back",
        transient=True,
    )
