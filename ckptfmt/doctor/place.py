"""Where the place lies: may it be written to, which file system, how much is free, may a catalog live there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.catalog.filesystems import LOCAL, VOLATILE, filesystem_type
from ckptfmt.catalog.sqlite import journal_mode, sqlite_version
from ckptfmt.doctor.report import Finding
from ckptfmt.engine.reports import human_bytes

_ROOM: Final = 1 << 30
_INODES: Final = 10_000


def writable(wanted: Path, folder: Path, problem: OSError | None) -> Finding:
    """Whether a folder could be made in ``folder``; ``wanted`` is what was asked about."""
    where = "the folder is there" if folder == wanted else f"not there yet; tried in {folder}"
    facts = {"exists": folder == wanted, "writable": problem is None}
    if problem is None:
        return Finding("folder", "good", where, "a repository can be made and written here", None, facts)
    reason = os.strerror(problem.errno) if problem.errno else str(problem)
    fix = f"choose another folder, or let this user write to {folder} (it may be mounted read-only)"
    return Finding("folder", "bad", f"{where}; cannot write: {reason}", "nothing can be saved here", fix, facts)


def file_system(folder: Path) -> Finding:
    """Its type, and whether SQLite's locks can be trusted on it."""
    kind = filesystem_type(folder)
    facts = {"type": kind, "local": kind in LOCAL, "volatile": kind in VOLATILE}
    if kind in VOLATILE:
        consequence = "everything saved here is lost at the next reboot"
        return Finding("file system", "slow", f"{kind}, in memory", consequence, "choose a folder on a disk", facts)
    if kind in LOCAL:
        consequence = "local: the catalog lies beside the data, in catalog.sqlite"
        return Finding("file system", "good", kind, consequence, None, facts)
    consequence = "not known to be local: SQLite's locks cannot be trusted, so the catalog may not lie here"
    fix = (
        "name a catalog elsewhere: export CKPTFMT_CATALOG=postgresql://user@host/database, or for one host "
        "sqlite:////local/path/catalog.sqlite"
    )
    return Finding("file system", "slow", kind, consequence, fix, facts)


def space(folder: Path, syscalls: Syscalls) -> Finding:
    """Free bytes and inodes for a user without privileges."""
    facts = syscalls.statvfs(str(folder))
    free, inodes = facts.f_bavail * facts.f_frsize, facts.f_favail
    counted = {"bytes": free, "inodes": inodes if facts.f_files else None}
    found = f"{human_bytes(free)} free"
    if facts.f_files and inodes < _INODES:
        consequence = "each save makes some ten files: names run out before the space does"
        return Finding("free space", "slow", f"{found}, {inodes} inodes", consequence, "remove small files", counted)
    if facts.f_blocks and free < _ROOM:
        consequence = "a save that does not fit fails before it writes; the generations that are there stay"
        return Finding("free space", "slow", found, consequence, "free space, or see `ckptfmt gc`", counted)
    consequence = "a save that does not fit fails before it writes; what is there stays"
    return Finding("free space", "good", found, consequence, None, counted)


def sqlite() -> Finding:
    """The SQLite that Python brings, and the journal that a new catalog gets with it."""
    version = sqlite_version()
    mode = journal_mode(version)
    text = ".".join(map(str, version))
    facts = {"version": text, "journal_mode": mode}
    if mode == "wal":
        consequence = "new catalogs use a write-ahead log: readers never wait for a writer"
        return Finding("SQLite", "good", f"{text}, journal {mode}", consequence, None, facts)
    consequence = "its write-ahead log has a rare bug, so catalogs use a rollback journal: safe, some ms slower"
    fix = "a Python with SQLite 3.51.3 or newer, if commits of many jobs at once are slow"
    return Finding("SQLite", "note", f"{text}, journal {mode}", consequence, fix, facts)
