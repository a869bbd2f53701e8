"""A file system that shows another folder and fails on command (FUSE).

    python rig_faulty_mount.py FOLDER MOUNTPOINT RULES LOG

RULES is a JSON list, read again whenever it changes. A rule is an object: calls of ``op`` whose path contains ``match``
fail with ``errno``, from the ``nth`` on and at most ``times``.
``after`` lets that many bytes of writes through before the first failure, the last write short. ``longest`` cuts every
write to so many bytes. ``sleep`` (seconds) only delays. A file whose ``fsync`` failed has lost what was written, as on
Linux, where the dirty pages are dropped and the next ``fsync`` of the same file succeeds. LOG gets one line a call.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections import Counter
from typing import Any

import mfusepy
from rig_processes import die_with_parent


class FaultyMount(mfusepy.Operations):
    use_ns = True

    def __init__(self, folder: str, rules: str, log: str) -> None:
        self._folder = folder
        self._rules_path = rules
        self._seen: tuple[int, int] = (0, 0)
        self._rules: list[dict[str, Any]] = []
        self._met: Counter[int] = Counter()
        self._fired: Counter[int] = Counter()
        self._bytes = 0
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    # -- faults ---------------------------------------------------------------------------------
    def _current(self) -> list[dict[str, Any]]:
        facts = os.stat(self._rules_path)
        if (facts.st_mtime_ns, facts.st_ino) != self._seen:
            self._seen = (facts.st_mtime_ns, facts.st_ino)
            with open(self._rules_path, encoding="utf-8") as file:
                self._rules = json.load(file)
            self._met.clear()
            self._fired.clear()
            self._bytes = 0
        return self._rules

    def _arrive(self, op: str, path: str) -> None:
        for number, rule in enumerate(self._current()):
            if rule["op"] != op or rule.get("match", "") not in path or "after" in rule:
                continue
            self._met[number] += 1
            if self._met[number] < rule.get("nth", 1) or self._fired[number] >= rule.get("times", 1 << 62):
                continue
            self._fired[number] += 1
            time.sleep(rule.get("sleep", 0))
            if "errno" in rule:
                self._tell(op, path, rule["errno"])
                raise mfusepy.FuseOSError(rule["errno"])
        self._tell(op, path, 0)

    def _tell(self, op: str, path: str, code: int) -> None:
        os.write(self._log, f"{op} {path} {code}\n".encode())

    def _allowed(self, path: str, nbytes: int) -> int:
        """How many bytes of a write are taken; raises once there are none."""
        for rule in self._current():
            if rule["op"] != "write" or rule.get("match", "") not in path:
                continue
            nbytes = min(nbytes, rule.get("longest", nbytes))
            if "after" in rule:
                left = rule["after"] - self._bytes
                if left <= 0 and nbytes:
                    self._tell("write", path, rule["errno"])
                    raise mfusepy.FuseOSError(rule["errno"])
                nbytes = min(nbytes, left)
        self._bytes += nbytes
        return nbytes

    def _real(self, path: str) -> str:
        return self._folder + path

    # -- looking --------------------------------------------------------------------------------
    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        facts = os.fstat(fh) if fh is not None else os.lstat(self._real(path))
        names = ("mode", "ino", "nlink", "uid", "gid", "size", "blocks")
        times = {f"st_{name}time": getattr(facts, f"st_{name}time_ns") for name in "acm"}
        return {f"st_{name}": getattr(facts, f"st_{name}") for name in names} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        self._arrive("readdir", path)
        return [".", "..", *os.listdir(self._real(path))]

    def statfs(self, path: str) -> dict[str, int]:
        facts = os.statvfs(self._folder)
        return {name: getattr(facts, name) for name in dir(facts) if name.startswith("f_") and name != "f_fsid"}

    def open(self, path: str, flags: int) -> int:
        self._arrive("open", path)
        return os.open(self._real(path), flags & ~os.O_DIRECT)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._arrive("read", path)
        return os.pread(fh, size, offset)

    # -- changing -------------------------------------------------------------------------------
    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._arrive("create", path)
        return os.open(self._real(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._arrive("write", path)
        return os.pwrite(fh, data[: self._allowed(path, len(data))], offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._arrive("truncate", path)
        os.truncate(self._real(path) if fh is None else fh, length)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._arrive("mkdir", path)
        os.mkdir(self._real(path), mode)
        return 0

    def link(self, target: str, source: str) -> int:
        self._arrive("link", target)
        os.link(self._real(source), self._real(target), follow_symlinks=False)
        return 0

    def unlink(self, path: str) -> int:
        self._arrive("unlink", path)
        os.unlink(self._real(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        raise mfusepy.FuseOSError(errno.EINVAL)  # what the flag asks for is not passed on here

    # -- durability -----------------------------------------------------------------------------
    def fsync(self, path: str, datasync: int, fh: int) -> int:
        try:
            self._arrive("fsync", path)
        except OSError:
            size = os.fstat(fh).st_size
            os.ftruncate(fh, 0)  # gone, and nobody will be told again
            os.ftruncate(fh, size)
            raise
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._arrive("fsyncdir", path)
        return 0

    def flush(self, path: str, fh: int) -> int:
        """What close(2) reports."""
        self._arrive("close", path)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


if __name__ == "__main__":
    die_with_parent()
    folder, point, rules, log = sys.argv[1:]
    mfusepy.FUSE(
        FaultyMount(folder, rules, log),
        point,
        foreground=True,
        nothreads=True,
        direct_io=True,  # else the kernel makes EIO of a short write
        attr_timeout=0,
        entry_timeout=0,
        fsname="ckptfmt-faulty",
        default_permissions=True,
    )
