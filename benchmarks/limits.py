"""What memory and disk allow, in the same run: copies, writes and reads without any format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.job import Job
from benchmarks.states import build
from ckptfmt.engine.arena import map_memory
from ckptfmt.measure import states
from ckptfmt.measure.raw_files import Timed, drop_cache, fill_cache, raw_read, raw_write, whole_blocks
from ckptfmt.measure.raw_memory import CopyLimit

THREADS = (1, 2, 4)


def measure_writing(job: Job) -> dict[str, Any]:
    """Copies of the state into reused memory, and writes of that memory into fresh files, plain and hashed."""
    state = build(job)
    limit = CopyLimit(state)
    copies = limit.times(job.count)
    memory = limit.memory[: whole_blocks(states.state_bytes(state))]
    plain: dict[str, list[Timed]] = {str(threads): [] for threads in THREADS}
    hashed: list[Timed] = []
    for number in range(job.count):
        for threads in THREADS:
            path = job.folder / f"{number}-{threads}"
            plain[str(threads)].append(raw_write(path, memory, threads=threads))
            path.unlink()
        path = job.folder / f"{number}-hashed"
        hashed.append(raw_write(path, memory, threads=2, hashed=True))
        path.unlink()
    return {
        "nbytes": states.state_bytes(state),
        "direct": hashed[0].direct,
        "copy": copies,
        "write": {threads: [one.seconds for one in timed] for threads, timed in plain.items()},
        "write_cpu": {threads: [one.cpu_seconds for one in timed] for threads, timed in plain.items()},
        "hashed_cpu": [one.cpu_seconds for one in hashed],
    }


def prepare_file(job: Job) -> dict[str, Any]:
    """The file that ``measure_reading`` reads: as long as the state."""
    state = build(job)
    limit = CopyLimit(state)
    limit.times(0)
    memory = limit.memory[: whole_blocks(states.state_bytes(state))]
    raw_write(job.folder / "raw", memory, threads=2)
    return {"nbytes": len(memory)}


def measure_reading(job: Job) -> dict[str, Any]:
    """Cold and warm reads into reused memory, the copies that a restore adds to a warm one, and the same reads into
    memory that the system has still to hand out, as a load afresh needs it."""
    state = build(job)
    limit = CopyLimit(state)
    copies = limit.times(job.count)
    path = job.folder / "raw"
    memory = limit.memory[: whole_blocks(states.state_bytes(state))]
    cold: dict[str, list[float]] = {}
    warm: dict[str, list[float]] = {}
    fresh: dict[str, list[float]] = {}
    for _ in range(job.count):
        for threads in THREADS:
            cold.setdefault(f"{threads} direct", []).append(_cold(path, memory, threads, direct=True))
        cold.setdefault("2 buffered", []).append(_cold(path, memory, 2, direct=False))
        fill_cache(path.parent)
        warm.setdefault("2", []).append(raw_read(path, memory, threads=2, direct=False).seconds)
        fresh.setdefault("warm", []).append(_fresh(path, len(memory)))
        fresh.setdefault("cold", []).append(_cold(path, map_memory(len(memory))[: len(memory)], 4, direct=True))
    return {"cold": cold, "warm": warm, "fresh": fresh, "copy": copies}


def _fresh(path: Path, nbytes: int) -> float:
    return raw_read(path, map_memory(nbytes)[:nbytes], threads=4, direct=False).seconds


def _cold(path: Path, memory: memoryview, threads: int, *, direct: bool) -> float:
    drop_cache(path.parent)
    return raw_read(path, memory, threads=threads, direct=direct).seconds
