"""Real file systems in a file, mounted through a loop device, whose power can be cut.

``FS_IOC_SHUTDOWN`` (``_IOR('X', 125, __u32)``; ext4, XFS, f2fs) stops a file system at once: what has not reached the
image is gone, as after a power cut. Works without pytest, since the enumerator runs in processes of its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final, Literal

Kind = Literal["ext4", "ext4-writeback", "xfs"]
KINDS: Final[tuple[Kind, ...]] = ("ext4", "ext4-writeback", "xfs")
"""``ext4-writeback`` may write a file's length before its data; ``ext4`` (ordered) does not."""

Cut = Literal["nothing", "names", "all", "torn"]
CUTS: Final[tuple[Cut, ...]] = ("nothing", "names", "all", "torn")
"""What the disk got of all that was not synced: nothing; the journal (names and lengths, not data); everything so far;
everything so far and half of the next write."""

_SHUTDOWN: Final = 0x8004587D
_LOG_FLUSH, _NO_LOG_FLUSH = 1, 2
_MIB: Final = 1 << 20
_FORMAT: Final[dict[Kind, tuple[str, ...]]] = {
    "ext4": ("mkfs.ext4", "-q", "-b", "4096", "-J", "size=4", "-E", "nodiscard"),
    "ext4-writeback": ("mkfs.ext4", "-q", "-b", "4096", "-J", "size=4", "-E", "nodiscard"),
    # The size that rigs need is below what XFS supports for daily use; its log and recovery are the same.
    "xfs": ("mkfs.xfs", "-q", "-f", "--unsupported"),
}
_OPTIONS: Final[dict[Kind, str]] = {
    "ext4": "loop,commit=300",
    "ext4-writeback": "loop,commit=300,data=writeback",
    "xfs": "loop",
}
_libc = ctypes.CDLL(None, use_errno=True)


def hide_mounts() -> None:
    """Let nobody else see what this process mounts from now on: with it, however it ends, the mounts are gone too.

    Children inherit the view. ``RigError`` if that can't be had.
    """
    new_view, recursive, private = 0x20000, 0x4000, 1 << 18  # CLONE_NEWNS, MS_REC, MS_PRIVATE
    if _libc.unshare(new_view) != 0 or _libc.mount(None, b"/", None, recursive | private, None) != 0:
        raise RigError(f"no view of mounts of its own: {os.strerror(ctypes.get_errno())}")


class Disk:
    """One image and the folder where it is mounted. ``work`` is a folder for both, best on a tmpfs."""

    def __init__(
        self, work: Path, kind: Kind = "ext4", *, mebibytes: int = 32, extra: tuple[str, ...] = (), options: str = ""
    ) -> None:
        self.kind: Final = kind
        self.image: Final = work / f"{kind}.image"
        self.place: Final = work / f"{kind}.disk"
        self._options = _OPTIONS[kind] + (f",{options}" if options else "")
        self.place.mkdir()
        with self.image.open("wb") as file:
            file.truncate(mebibytes * _MIB)
        _run(*_FORMAT[kind], *extra, self.image)

    def mount(self) -> None:
        _run("mount", "-o", self._options, self.image, self.place)

    def unmount(self) -> None:
        _run("umount", self.place)

    def remount(self, options: str) -> None:
        _run("mount", "-o", f"remount,{options}", self.place)

    def is_mounted(self) -> bool:
        return os.path.ismount(self.place)

    def release(self) -> None:
        """Unmount whatever state it is in, for the end of a test that failed."""
        if self.is_mounted():
            subprocess.run(["umount", "-l", str(self.place)], check=False, capture_output=True)

    def keep(self, name: str) -> Path:
        """Put a copy of the (unmounted) image aside."""
        kept = self.image.with_suffix(f".{name}")
        _copy(self.image, kept)
        return kept

    def put_back(self, kept: Path) -> None:
        _copy(kept, self.image)

    def cut_power(self) -> None:
        """Drop everything that has not reached the disk, then mount it again."""
        with Switch(self.place) as switch:
            switch.cut("nothing")
        self.unmount()
        self.mount()


class Switch:
    """Cuts the power of a mounted disk, also from inside a system call's hook: its descriptor is opened before."""

    def __init__(self, place: Path) -> None:
        self._descriptor = os.open(place, os.O_RDONLY)

    def cut(self, kind: Cut) -> None:
        if kind in ("all", "torn"):
            _libc.syncfs(self._descriptor)
        mode = _LOG_FLUSH if kind == "names" else _NO_LOG_FLUSH
        fcntl.ioctl(self._descriptor, _SHUTDOWN, struct.pack("I", mode))

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemoryFolder:
    """A folder whose files live in memory: the images of a rig, so that cases are cheap."""

    def __init__(self, path: Path, *, mebibytes: int = 1024) -> None:
        self.path: Final = path
        path.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", path)

    def release(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)


def _copy(source: Path, target: Path) -> None:
    """Copy an image; holes stay holes."""
    if shutil.disk_usage(target.parent).free < source.stat().st_blocks * 512:
        raise OSError(f"no room for {target}")
    _run("cp", "--sparse=always", source, target)


def _run(*command: object) -> None:
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    except FileNotFoundError:
        raise RigError(f"{command[0]} is not installed") from None
    if done.returncode != 0:
        raise RigError(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.stdout.strip()}")


class RigError(Exception):
    """The machine can't do what the rig needs."""
