"""Which file systems may hold a SQLite catalog, and how they are told to keep what was written.

SQLite needs POSIX locks and a shared page cache that work; on network and cluster file systems they do not
always (https://sqlite.org/howtocorrupt.html, section 2), so everything not known to be local is refused.
"""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path
from typing import Final

from ckptfmt.errors import CatalogError

_log = logging.getLogger("ckptfmt")

LOCAL: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "apfs"})
VOLATILE: Final = frozenset({"tmpfs"})


def check_local(path: Path, kind: str) -> None:
    """Raise ``CatalogError`` unless ``kind``, the type of the file system that holds ``path``, is a local one."""
    if kind not in LOCAL:
        raise CatalogError(
            f"the SQLite catalog {path} would lie on a {kind} file system, where SQLite's locks cannot be trusted "
            f"(trusted: {', '.join(sorted(LOCAL))}): use a PostgreSQL catalog (catalog='postgresql://...' or "
            "CKPTFMT_CATALOG), or put it on a local disk (catalog='sqlite:///local/path')",
            kind="catalog_filesystem",
        )
    if kind in VOLATILE:
        _log.warning("the catalog %s lies on %s and will be lost at the next reboot", path, kind)


def filesystem_type(path: Path) -> str:
    """Return the type of the file system that holds ``path`` (or will, once it exists)."""
    target = os.path.realpath(path)
    table = Path("/proc/self/mountinfo")
    if table.exists():
        return from_mountinfo(table.read_text(encoding="utf-8", errors="surrogateescape"), target)
    listing = subprocess.run(["/sbin/mount"], capture_output=True, text=True, check=True).stdout
    return from_mount_listing(listing, target)


def from_mountinfo(table: str, target: str) -> str:
    """Find the type in the text of ``/proc/self/mountinfo`` (proc(5))."""
    best, kind = -1, "unknown"
    for line in table.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = _unescape(fields[4])
        # A later mount on the same point hides the earlier one, hence >=.
        if _holds(point, target) and len(point) >= best:
            best, kind = len(point), right.split(" ")[0]
    return kind


def from_mount_listing(listing: str, target: str) -> str:
    """Find the type in the output of macOS' ``mount``: ``device on /point (apfs, local, ...)``."""
    best, kind = -1, "unknown"
    for line in listing.splitlines():
        left, _, options = line.rpartition(" (")
        point = left.partition(" on ")[2]
        if point and _holds(point, target) and len(point) >= best:
            best, kind = len(point), options.rstrip(")").split(",")[0]
    return kind


def _holds(point: str, target: str) -> bool:
    return point == "/" or target == point or target.startswith(point.rstrip("/") + "/")


def _unescape(text: str) -> str:
    for octal, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(octal, char)
    return text


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
