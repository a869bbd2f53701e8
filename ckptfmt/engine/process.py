"""Who this process is, and whether another process of this host is still there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ckptfmt.ports.records import LaunchRecord


def host_name() -> str:
    return socket.gethostname()


def boot_id() -> str:
    """An id that changes at every boot; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_started(pid: int) -> str:
    """When the process began, in clock ticks since boot; empty if it is not there. Tells a reused pid apart."""
    try:
        # The name in parentheses may hold spaces: count fields from the closing one. Field 22 is starttime.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[19] if fields[0] not in ("Z", "X") else ""


def is_gone(launch: LaunchRecord) -> bool:
    """Whether the holder ran on this host and its process is certainly no more.

    False for any doubt: another host, another container's pid namespace, no /proc.
    """
    own_boot = boot_id()
    if launch.host != host_name() or not own_boot or not launch.boot_id:
        return False
    if launch.boot_id != own_boot:
        return True
    if not launch.pid_started or not pid_started(os.getpid()):
        return False
    return pid_started(launch.pid) != launch.pid_started


def is_here(launch: LaunchRecord) -> bool:
    """Whether the holder's process certainly runs on this host. False for any doubt, as in ``is_gone``."""
    own_boot = boot_id()
    if launch.host != host_name() or not own_boot or launch.boot_id != own_boot or not launch.pid_started:
        return False
    return pid_started(launch.pid) == launch.pid_started
