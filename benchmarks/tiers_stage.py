"""Saves and restores through a stage on a local disk, before S3, beside those of a repository on the same disk."""

from __future__ import annotations

import shutil
import time
from typing import Any, Final

import numpy as np

import ckptfmt
from benchmarks.contenders import RUN
from benchmarks.job import Job
from benchmarks.states import build
from benchmarks.tiers_transfer import options, url
from ckptfmt.measure import states
from ckptfmt.measure.raw_files import drop_cache

WAYS: Final = ("local", "stage")
_ELSEWHERE_BYTES: Final = 1 << 30
"""Of other memory that is written before each save, as training does: else what a commit that takes longer leaves in
the caches of a large processor is measured, too."""


def measure_stage(job: Job) -> dict[str, Any]:
    """``count`` saves, each waited for, and as many restores from a cold cache; the first ones have cold buffers.

    ``free`` is the time from the call to the moment at which the snapshot's memory is needed no longer: durable on the
    local disk, or staged there. ``lost``: a restore after the stage's files are gone.
    """
    state = build(job)
    found: dict[str, Any] = {"nbytes": states.state_bytes(state), "stall": [], "free": [], "committed": []}
    place = job.folder / job.contender
    staged = job.contender == "stage"
    opened = ckptfmt.open(url(job), stage=place, **options(job)) if staged else ckptfmt.open(place)
    with opened as repo:
        with repo.checkpointer(RUN) as checkpointer:
            checkpointer.prepare(state)
            time.sleep(0.5 + states.state_bytes(state) / 0.8e9)
            elsewhere = np.zeros(_ELSEWHERE_BYTES, np.uint8)
            for number in range(job.count):
                states.step(state, number)
                np.add(elsewhere, 1, out=elsewhere)
                for name, seconds in _saved(checkpointer, state, number, "staged" if staged else "durable").items():
                    found[name].append(seconds)
        digest = states.state_digest(state)  # what older saves left on the stage has been freed by now
        found["restore"] = [_restored(job, repo, state, digest) for _ in range(job.count)]
        if staged:
            shutil.rmtree(place)
            found["lost"] = _restored(job, repo, state, digest)
    return found


def _saved(checkpointer: Any, state: dict[str, Any], number: int, free: Any) -> dict[str, float]:
    began = time.perf_counter()
    pending = checkpointer.save(state, step=number)
    seconds = {"stall": time.perf_counter() - began}
    assert pending is not None
    pending.wait(free)
    seconds["free"] = time.perf_counter() - began
    pending.wait()
    seconds["committed"] = time.perf_counter() - began
    return seconds


def _restored(job: Job, repo: Any, state: dict[str, Any], digest: str) -> float:
    """Seconds. ``ValueError`` if it gave other bytes than were saved."""
    states.clear(state)
    drop_cache(job.folder)
    began = time.perf_counter()
    repo.latest(RUN).restore(state)
    seconds = time.perf_counter() - began
    if states.state_digest(state) != digest:
        raise ValueError(f"{job.contender}: the restore gave other bytes than were saved")
    return seconds
