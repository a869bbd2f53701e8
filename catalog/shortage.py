"""What the system is short of when SQLite cannot write or open a file: it says "full", or less, and never how much."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FILES_AT_ONCE: Final = 4
"""Descriptors of one transaction: the database, its journal, their folder while it is synced, and one to spare."""
_TOO_MANY_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})


@dataclass(frozen=True)
class Shortage:
    """``kind`` of the error it makes, and what to do about it."""

    kind: str
    advice: str
    transient: bool = False


def no_room(folder: Path) -> Shortage:
    """For SQLITE_FULL: which is for the want of bytes alone."""
    facts = _statvfs(folder)
    free = "" if facts is None else f" ({facts.f_bavail * facts.f_frsize} bytes are free)"
    return Shortage("catalog_full", f"the disk is full: free space there{free}, for instance with `ckptfmt gc`")


def behind_a_refusal(database: Path) -> Shortage | None:
    """For SQLITE_CANTOPEN, of the database or of its journal: what keeps files from being opened there.

    None if nothing general does: then it is the file.
    """
    folder = database.parent
    if _few_descriptors():
        return Shortage(
            "catalog_files",
            "this process has too many files open: raise the limit of open files (`ulimit -n`), or close some",
            transient=True,
        )
    facts = _statvfs(folder)
    if facts is None:
        return None
    if facts.f_files and not facts.f_favail:  # some file systems count no files
        return Shortage(
            "catalog_full",
            "the disk has no inodes left, so no journal can be made: remove files there, for instance with "
            "`ckptfmt gc`",
        )
    if facts.f_blocks and not facts.f_bavail:
        return no_room(folder)
    if not _stands(database):
        return None
    if facts.f_flag & os.ST_RDONLY:
        return Shortage("catalog_read_only", "its file system is mounted read-only: remount it")
    if not os.access(folder, os.W_OK | os.X_OK):
        return Shortage(
            "catalog_read_only", f"permission to write to {folder} was denied: check the folder's owner and mode"
        )
    return None


def _few_descriptors() -> bool:
    """Whether a transaction's files cannot be open at once. The one that failed has given its own back by now."""
    held: list[int] = []
    try:
        for _ in range(_FILES_AT_ONCE):
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in _TOO_MANY_FILES
    finally:
        for descriptor in held:
            os.close(descriptor)
    return False


def _stands(path: Path) -> bool:
    """Whether there is something, as far as a failing disk tells."""
    try:
        return path.exists()
    except OSError:
        return True


def _statvfs(folder: Path) -> os.statvfs_result | None:
    try:
        return os.statvfs(folder)
    except OSError:
        return None
