"""Threads that give way: what they copy is in no hurry, and training and its data loading are."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
import threading
from typing import Final

log = logging.getLogger("ckptfmt")

NICENESS: Final = 10
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_WHO_PROCESS: Final = 1
_BEST_EFFORT_LOWEST: Final = (2 << 13) | 7
"""Not the idle class: on a busy disk that would never get its turn, and a save has a deadline."""


def give_way() -> None:
    """Lower the priority of the calling thread, for CPU and disk, as far as the system lets it. It stays low."""
    if not sys.platform.startswith("linux"):  # elsewhere both are of the whole process
        return
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    except OSError as error:
        log.debug("a thread that copies keeps its CPU priority: %s", error)
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _WHO_PROCESS, 0, _BEST_EFFORT_LOWEST) != 0:
        log.debug("a thread that copies keeps its I/O priority: %s", os.strerror(ctypes.get_errno()))
