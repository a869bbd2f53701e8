"""Peak memory of ckptfmt's ways to save and restore, beyond what was resident before."""

from __future__ import annotations

import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch

import ckptfmt
from benchmarks import meter
from benchmarks.contenders import RUN
from benchmarks.job import Job
from benchmarks.states import build
from ckptfmt.engine.plan import HOST_BYTES_MIN
from ckptfmt.measure import states

SYNC = "exp_avg_sq.*"
"""What the partial mode writes while training is blocked."""


def measure_memory(job: Job) -> dict[str, Any]:
    """``way``: ``save``, ``staged`` (half the state as ``host_bytes_max``, or the least that is allowed), ``partial``
    (the second moment of Adam written while blocked), ``restore`` or ``restore, atomic=False``."""
    way = job.option("way")
    _warm_up(job)
    state = build(job)
    nbytes = states.state_bytes(state)
    if way.startswith("restore"):
        return {"nbytes": nbytes, "peak": _peak(lambda: _restore(job, state, atomic=way == "restore"))}
    options: dict[str, Any] = {"host_bytes_max": max(nbytes // 2, HOST_BYTES_MIN)} if way == "staged" else {}
    with ckptfmt.open(job.folder / "repository") as repo, repo.checkpointer(RUN, **options) as checkpointer:
        sync = {"sync": SYNC} if way == "partial" else {}

        def save() -> tuple[float, float]:
            began = time.perf_counter()
            pending = checkpointer.save(state, step=0, **sync)
            stall = time.perf_counter() - began
            assert pending is not None
            pending.wait()
            return stall, time.perf_counter() - began

        peak = _peak(save)
        states.step(state, 1)
        stall, durable = save()
    part = sum(tensor.nbytes for name, tensor in states.named_tensors(state) if fnmatchcase(name, SYNC))
    return {"nbytes": nbytes, "sync_share": part / nbytes, "peak": peak, "stall": stall, "durable": durable}


def _restore(job: Job, state: dict[str, Any], *, atomic: bool) -> None:
    ckptfmt.restore(state, job.folder / "repository", run=RUN, atomic=atomic)


def _warm_up(job: Job) -> None:
    """Let code and pools come in that any first save or restore brings."""
    tiny = {"w": torch.ones(1 << 20)}
    ckptfmt.save(tiny, job.folder / "warm", run=RUN)
    ckptfmt.restore(tiny, job.folder / "warm", run=RUN)


def _peak(work: Callable[[], object]) -> int:
    """Bytes that became resident at most while ``work`` ran."""
    resident = meter.resident_bytes()
    meter.reset_peak()
    work()
    return meter.peak_bytes() - resident
