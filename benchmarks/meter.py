"""CPU seconds and resident memory of this process and the ones it started."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
GIB = 1 << 30


def cpu_seconds() -> float:
    """User and system time of this process, its finished children, and those that still run."""
    times = os.times()
    children = times.children_user + times.children_system
    return time.process_time() + children + sum(_cpu_of(pid) for pid in _children(os.getpid()))


def resident_bytes() -> int:
    return _status("VmRSS")


def reset_peak() -> None:
    """Start ``peak_bytes`` anew (proc_pid_clear_refs(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Most memory that was resident since ``reset_peak``."""
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _stat(pid: int) -> list[str]:
    """Fields of proc_pid_stat(5) from the third one on; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _children(parent: int) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if (fields := _stat(pid)) and int(fields[1]) == parent]


def _cpu_of(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0
