"""Whether copies of memory are faster past the caches, tried in processes of their own: glibc reads its settings when a
process starts.

It copies past them only from a good part of the shared cache on (its manual, "Hardware Capability Tunables":
``x86_non_temporal_threshold``). On a host with a very large cache, or in a virtual machine that is told of all of its
host's, that is more than the pieces in which anybody copies: each page of a snapshot is then read into the caches only
to be overwritten.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Final

from ckptfmt.doctor.report import Finding
from ckptfmt.engine.arena import available_memory
from ckptfmt.engine.reports import human_bytes

VARIABLE: Final = "GLIBC_TUNABLES"
TUNABLE: Final = "glibc.cpu.x86_non_temporal_threshold"
SETTING: Final = f"{TUNABLE}=0x400000"
_NAME: Final = "memory copies"
_CONSEQUENCE: Final = "the stall of a save is such a copy of what is saved"
_BYTES: Final = 128 << 20
_COPIES: Final = 5
_TURNS: Final = 3
_WORTH: Final = 1.15
"""So many times as fast, and it is worth telling."""
_LIMIT_SECONDS: Final = 60

Timed = Callable[[Mapping[str, str]], float]
"""Seconds of a copy of ``_BYTES`` in a process with that environment; ``OSError`` or ``SubprocessError``."""


def copies(timed: Timed | None = None, environment: Mapping[str, str] = os.environ) -> Finding:
    """How fast a save copies here, and whether one setting of glibc makes it faster."""
    absent = _why_not() if timed is None else None
    if absent is not None:
        return _untried(absent)
    timed, tuned = timed or _timed, dict(environment) | {VARIABLE: tuned_value(environment.get(VARIABLE, ""))}
    try:
        turns = [(timed(environment), timed(tuned)) for _ in range(_TURNS)]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return _untried(f"a process that copies failed: {error}")
    now, then = (_BYTES / statistics.median(seconds) for seconds in zip(*turns, strict=True))
    facts = {"bytes_per_second": now, "tuned_bytes_per_second": then, "setting": SETTING}
    found = f"{human_bytes(now)}/s; past the caches {human_bytes(then)}/s"
    if then < now * _WORTH:
        return Finding(_NAME, "good", found, _CONSEQUENCE, None, facts)
    fix = (
        f"export {VARIABLE}={tuned[VARIABLE]} before Python starts; it holds for every copy of 4 MiB and more in the "
        "process: compare the stalls and the steps of your job"
    )
    return Finding(_NAME, "slow", found, _CONSEQUENCE, fix, facts)


def tuned_value(value: str) -> str:
    """The variable's value with our setting: others in it stay, one of the same tunable goes."""
    others = [one for one in value.split(":") if one and one.partition("=")[0] != TUNABLE]
    return ":".join([*others, SETTING])


def _untried(why: str) -> Finding:
    facts = {"bytes_per_second": None, "tuned_bytes_per_second": None, "setting": SETTING}
    return Finding(_NAME, "note", f"not tried: {why}", _CONSEQUENCE, None, facts)


def _why_not() -> str | None:
    """Why there is nothing to be tried; None if there is."""
    free = available_memory()
    if free is not None and free < 8 * _BYTES:
        return f"only {human_bytes(free)} of memory available"
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION")
    except ValueError:
        library = None
    if not library or platform.machine() not in ("x86_64", "AMD64"):
        return "the setting that could make copies faster is of glibc on x86-64"
    return None


def _timed(environment: Mapping[str, str]) -> float:
    command = [sys.executable, "-m", "ckptfmt.doctor.copying", str(_BYTES), str(_COPIES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip().rpartition("\n")[2] or f"it ended with status {done.returncode}")
    return float(done.stdout)
