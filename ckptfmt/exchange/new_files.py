"""Files that are there whole or not at all, and never over another one."""

from __future__ import annotations

import errno
import os
import secrets
from io import RawIOBase
from pathlib import Path
from types import TracebackType
from typing import Final

from ckptfmt.backends.posix_errors import translated
from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.errors import Conflict

_NO_LINK: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class NewFiles:
    """Files of one folder, written under other names: ``publish`` makes all of them durable and then gives them their
    own, in the order in which they were made. A context manager: what was not published is removed.

    ``Conflict`` names a file that is there already, before anything is written and again when it is published.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: list[tuple[Path, Path, RawIOBase]] = []
        """Temporary path, final path, and the open file."""
        with translated("make the folder", str(folder)):
            folder.mkdir(parents=True, exist_ok=True)

    def require_free(self, name: str) -> None:
        """``Conflict`` if something is called so."""
        if os.path.lexists(self.folder / name):
            raise _taken(self.folder / name)

    def create(self, name: str) -> RawIOBase:
        """A new file, to be called ``name``."""
        self.require_free(name)
        place = self.folder / f".{name}.{secrets.token_hex(6)}.partial"
        with translated("create", str(place)):
            file = open(place, "xb", buffering=0)  # noqa: SIM115 (closed with the others)
        self._made.append((place, self.folder / name, file))
        return file

    def publish(self) -> None:
        """Everything was written: from now on the files are there, also after a power cut."""
        for place, _, file in self._made:
            with translated("sync", str(place)):
                os.fsync(file.fileno())
        published: list[Path] = []
        try:
            for place, final, _ in self._made:
                _link(place, final)
                published.append(final)
        except BaseException:
            for final in reversed(published):  # ours: they were linked a moment ago
                final.unlink()
            raise
        self._remove()
        with translated("sync", str(self.folder)):
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _remove(self) -> None:
        while self._made:
            place, _, file = self._made.pop()
            file.close()
            place.unlink(missing_ok=True)

    def __enter__(self) -> NewFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()


def _link(place: Path, final: Path) -> None:
    """Unlike a rename a link never takes the place of another file; without links there is a rename that does not."""
    try:
        with translated("create", str(final)):
            try:
                os.link(place, final)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                Syscalls().rename_noreplace(str(place), str(final))
    except Conflict as error:
        raise _taken(final) from error


def _taken(path: Path) -> Conflict:
    return Conflict(f"{path} is there already: remove it, or give another folder", kind="file_exists")
