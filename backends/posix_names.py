"""What names lead to, as the server of a network file system has it now.

A client of NFS believes for up to a minute what it once saw: that a name is absent, how long a file is, what a folder
holds. Reading a file is safe, since opening it asks the server; a name that was found absent is not asked for again.
So on file systems that other machines share, an absence, an occupied name, a length and a listing are taken from the
server: a forced look at the folder makes the client compare what it has with it. A handle that the server no longer
knows (``ESTALE``) is looked up anew. Both end after a few times; nothing here waits for a file to appear.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Final, TypeVar

from ckptfmt.backends.posix_place import ABSENT, Place
from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.errors import CkptError

T = TypeVar("T")
_TRIES: Final = 4


class Names:
    """The calls that take paths. Thread-safe; raises ``OSError`` for its owner to translate."""

    def __init__(self, place: Place, syscalls: Syscalls) -> None:
        self._place: Final = place
        self._sys: Final = syscalls

    def again(self, path: str, call: Callable[[], T], *, reads: bool = False) -> T:
        """Return what ``call`` makes of ``path``, after asking the server where the client's cache may be wrong.

        ``call`` may be repeated: it has done nothing if it says that ``path`` is absent, occupied or stale. With
        ``reads`` it does nothing in any case: a client that lost its server may say ``EIO`` where it means ``ESTALE``.
        """
        asked = False
        for left in reversed(range(_TRIES)):
            try:
                return call()
            except ABSENT:
                if asked or not left or not self._place.is_remote():
                    raise
            except FileExistsError:
                if asked or not left or not self._place.is_remote() or self._stands_there(path):
                    raise
            except OSError as error:
                lost = reads and error.errno == errno.EIO and not asked and self._place.is_remote()
                if not (lost or error.errno == errno.ESTALE) or not left or isinstance(error, CkptError):
                    raise
            self._ask(os.path.dirname(path))
            asked = True
        raise AssertionError("the last try neither returned nor raised")

    # -- the calls -----------------------------------------------------------------------------
    def open(self, path: str, flags: int) -> int:
        return self.again(path, lambda: self._sys.open(path, flags))

    def close(self, descriptor: int) -> None:
        self._sys.close(descriptor)

    def facts(self, path: str) -> os.stat_result:
        """What ``lstat`` tells; on a network file system type, owner and length only, as the server has them."""
        look = self._lstat_there if self._place.is_remote() else self._sys.lstat
        return self.again(path, lambda: look(path))

    def entries(self, folder: str) -> list[os.DirEntry[str]]:
        def read() -> list[os.DirEntry[str]]:
            if self._place.is_remote():
                self._sys.lstat_fresh(folder)
            return self._sys.scandir(folder)

        return self.again(folder, read)

    def mkdir(self, path: str) -> None:
        self.again(path, lambda: self._sys.mkdir(path))

    def link(self, source: str, target: str) -> None:
        self.again(target, lambda: self._sys.link(source, target))

    def unlink(self, path: str) -> None:
        self.again(path, lambda: self._sys.unlink(path))

    # -- asking the server ---------------------------------------------------------------------
    def _lstat_there(self, path: str) -> os.stat_result:
        found = self._sys.lstat_fresh(path)
        if found.st_nlink:
            return found
        # The client still has a handle of what another one removed: only the folder tells what has the name now.
        self._sys.lstat_fresh(os.path.dirname(path))
        return self._sys.lstat_fresh(path)

    def _stands_there(self, path: str) -> bool:
        """Whether the server has something of that name, which the client has in mind."""
        try:
            self._lstat_there(path)
        except ABSENT:
            return False
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return False
        return True

    def _ask(self, folder: str) -> None:
        """Make the client compare its idea of ``folder`` with the server's; if it knows of none, from the top down."""
        if self._stands_there(folder):
            return
        path = os.sep
        for name in folder.split(os.sep):
            path = os.path.join(path, name)
            if not self._stands_there(path):
                return
