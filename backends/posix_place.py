"""Where a posix repository lies: on what kind of file system, and how much room that has."""

from __future__ import annotations

import os
from typing import Final

from ckptfmt.backends.posix_errors import Room
from ckptfmt.backends.syscalls import Syscalls

ABSENT: Final = (FileNotFoundError, NotADirectoryError)

# linux/magic.h, and for zfs, lustre, gpfs, bcachefs and f2fs what statfs(2) and those projects document
_FILE_SYSTEMS: Final = {
    0xEF53: "ext",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0x794C7630: "overlay",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x65735546: "fuse",
    0x0BD00BD0: "lustre",
    0x00C36400: "ceph",
    0x47504653: "gpfs",
    0x01021997: "9p",
    0x00C0FFEE: "hostfs",
}
_LOCAL: Final = frozenset({"ext", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "ramfs", "f2fs", "bcachefs"})
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})


class Place:
    """The file system that holds ``root``, or will."""

    def __init__(self, root: str, syscalls: Syscalls) -> None:
        self.root: Final = root
        self._sys: Final = syscalls
        self._remote: bool | None = None

    def file_system(self) -> str:
        """Return the file system's name, e.g. ``ext`` or ``nfs``, or its number in hex where it has none here."""
        number = self._sys.file_system_type(self._existing())
        if number is None:
            return "unknown"
        return _FILE_SYSTEMS.get(number, hex(number))

    def is_local(self) -> bool:
        return self.file_system() in _LOCAL

    def is_in_memory(self) -> bool:
        return self.file_system() in _IN_MEMORY

    def is_remote(self) -> bool:
        """Whether other machines may change what is there, unseen by this one's caches. Asked once."""
        if self._remote is None:
            remote = not self.is_local()
            if not self._stands(self.root):
                return remote  # something may yet be mounted there
            self._remote = remote
        return self._remote

    def room(self) -> Room | None:
        """Return what is left for a writer without privileges; None where the file system counts nothing."""
        found = self._sys.statvfs(self._existing())
        if not found.f_blocks:
            return None
        return Room(found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)

    def room_or_none(self) -> Room | None:
        """As ``room``, for error messages: an error here must not hide the one being told."""
        try:
            return self.room()
        except OSError:
            return None

    def _existing(self) -> str:
        path = self.root
        while not self._stands(path) and path != os.path.dirname(path):
            path = os.path.dirname(path)
        return path

    def _stands(self, path: str) -> bool:
        try:
            self._sys.lstat(path)
        except ABSENT:
            return False
        return True
