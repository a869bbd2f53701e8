"""Processes of this machine as /proc tells of them, and signals to them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def send(pid: int, number: int) -> None:
    """Send a signal, unless the process is gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def alive(pid: int) -> bool:
    return task_state(f"/proc/{pid}/stat") not in ("", "Z", "X")


def task_state(stat: str) -> str:
    """State letter of a process or thread, from its ``stat`` file; empty if there is none."""
    try:
        return Path(stat).read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
