"""The folders of a posix repository: paths of keys, and durable folders."""

from __future__ import annotations

import errno
import logging
import os
import stat
from typing import Final

from ckptfmt.backends.keys import checked_key, checked_prefix, temporary_name
from ckptfmt.backends.posix_descriptors import opened
from ckptfmt.backends.posix_errors import NO_SPACE, symlink_refused
from ckptfmt.backends.posix_names import Names
from ckptfmt.backends.posix_place import ABSENT
from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.errors import Conflict

_log = logging.getLogger("ckptfmt.backends.posix")

_NO_FOLDER_SYNC: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class Folders:
    """Maps keys to paths below ``root`` and makes changes of folders durable."""

    def __init__(self, root: str, names: Names, syscalls: Syscalls) -> None:
        self.root: Final = root
        self._names: Final = names
        self._sys: Final = syscalls
        self._told: set[str] = set()

    # -- paths ---------------------------------------------------------------------------------
    def object_path(self, key: str, operation: str) -> str:
        """Return the path of ``key``. ``AccessDenied`` if a folder on the way is a symbolic link."""
        return self._inside(checked_key(key), os.path.dirname(key), operation)

    def folder_path(self, prefix: str, operation: str) -> str:
        return self._inside(checked_prefix(prefix), prefix, operation)

    def _inside(self, key: str, folder: str, operation: str) -> str:
        path = self.root  # which may itself be reached through links: that is its owner's choice
        for name in folder.split("/") if folder else ():
            path = os.path.join(path, name)
            if os.path.islink(path):
                raise symlink_refused(operation, os.path.join(self.root, folder))
        return os.path.join(self.root, key) if key else self.root

    # -- folders -------------------------------------------------------------------------------
    def create_root(self) -> None:
        """Make the root and the folders above it that are absent, durably."""
        missing: list[str] = []
        path = self.root
        while not self.stands(path):
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            self._mkdir(folder)
            self.sync(os.path.dirname(folder))
        if not self.is_folder(self.root):
            raise Conflict(f"make repository root {self.root}: a file stands in its place; move it away")

    def prove_writable(self) -> None:
        """Make a file in the root and remove it. Without room for one this says nothing, and is no error."""
        probe = os.path.join(self.root, temporary_name())
        try:
            with opened(self._names, probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, writing=False):
                pass
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
        else:
            self._names.unlink(probe)

    def make(self, prefix: str) -> None:
        """Make ``prefix`` and its parents below the root, durably."""
        self.folder_path(prefix, "make folder")
        path = self.root
        for name in prefix.split("/") if prefix else ():
            parent, path = path, os.path.join(path, name)
            self._mkdir(path)
            # Also when it was there: whoever made it may have died before its own sync.
            self.sync(parent)

    def _mkdir(self, path: str) -> None:
        try:
            self._names.mkdir(path)
        except FileExistsError:
            if not self.is_folder(path):
                raise Conflict(f"make folder {path}: a file stands in its place; move it away") from None

    # os.path's questions answer no to every error: a disk that fails would be told as a file in the way.
    def stands(self, path: str) -> bool:
        """Whether there is something of that name, or a link to nowhere. ``OSError`` if that can't be told."""
        try:
            self._names.facts(path)
        except ABSENT:
            return False
        return True

    def is_folder(self, path: str) -> bool:
        """Whether ``path`` is a folder, or a link to one. Raises ``OSError`` if that can't be told."""
        try:
            return stat.S_ISDIR(self._names.facts(path + os.sep).st_mode)
        except ABSENT:
            return False

    def sync(self, path: str) -> None:
        """Make the entries of the folder ``path`` durable."""
        with opened(self._names, path, os.O_RDONLY | os.O_DIRECTORY, writing=True) as descriptor:
            try:
                self._sys.fsync(descriptor)
            except OSError as error:
                if error.errno not in _NO_FOLDER_SYNC:
                    raise
                self._tell_no_sync()

    def _tell_no_sync(self) -> None:
        self._tell_once(self.root, "this file system can't sync folders; new names are durable when it sees fit")

    def tell_symlink(self, path: str) -> None:
        """Say (once) that a listing leaves out a symbolic link."""
        self._tell_once(path, "a symbolic link below the repository's root is not followed, and not listed")

    def _tell_once(self, path: str, what: str) -> None:
        if path not in self._told:
            self._told.add(path)
            _log.warning("%s: %s", path, what)
