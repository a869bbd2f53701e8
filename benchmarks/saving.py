"""Saves: how long training is blocked, how long until a copy is safe, and what that costs."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ckptfmt
from benchmarks import meter
from benchmarks.contenders import RUN, SAVERS, State
from benchmarks.job import Job
from benchmarks.states import build
from ckptfmt.measure import states


def measure_saves(job: Job) -> dict[str, Any]:
    """``count`` saves one after the other, each waited for; the first one has cold buffers."""
    state = build(job)
    found: dict[str, Any] = {"nbytes": states.state_bytes(state), "saves": []}
    with SAVERS[job.contender](job.folder, state) as save:
        for number in range(job.count):
            found["saves"].append(_one(save, state, number))
    return found


def measure_first(job: Job) -> dict[str, Any]:
    """The first save after ``prepare``, or after ``restore``, and the one that follows it, in ckptfmt."""
    state = build(job)
    with ckptfmt.open(job.folder / "repository") as repo, repo.checkpointer(RUN) as checkpointer:
        if job.option("after") == "restore":
            assert checkpointer.restore(state) is not None
        else:
            checkpointer.prepare(state)
        # Training goes on meanwhile: fresh pages come at more than 0.8 GB/s on any machine that was tried.
        time.sleep(0.5 + states.state_bytes(state) / 0.8e9)
        stalls = []
        for number in range(2):
            states.step(state, number)
            began = time.perf_counter()
            pending = checkpointer.save(state, step=number)
            stalls.append(time.perf_counter() - began)
            assert pending is not None
            pending.wait()
    return {"first": stalls[0], "second": stalls[1]}


def measure_back_to_back(job: Job) -> dict[str, Any]:
    """Saves that do not wait: what of the next call is the wait for the one before, and what is its own stall."""
    return _back_to_back(job, in_flight_max=1)


def measure_two_in_flight(job: Job) -> dict[str, Any]:
    """``measure_back_to_back`` with room for a second snapshot."""
    return _back_to_back(job, in_flight_max=2)


def _back_to_back(job: Job, *, in_flight_max: int) -> dict[str, Any]:
    state = build(job)
    busy, stalls = [], []
    opened = ckptfmt.open(job.folder / "repository")
    with opened as repo, repo.checkpointer(RUN, in_flight_max=in_flight_max) as checkpointer:
        for number in range(in_flight_max):  # buffers of their own
            first = checkpointer.save(state, step=number)
            assert first is not None
        checkpointer.wait()
        for number in range(in_flight_max, in_flight_max + job.count):
            states.step(state, number)
            pending = checkpointer.save(state, step=number)
            assert pending is not None
            busy.append(pending.busy_seconds)
            stalls.append(pending.stall_seconds)
    return {"busy": busy[1:], "stalls": stalls[1:]}


def measure_beside_busy(job: Job) -> dict[str, Any]:
    """``measure_saves`` while as many processes as there are CPUs do nothing but compute."""
    with busy_processes(os.cpu_count() or 1):
        return measure_saves(job)


def _one(save: Any, state: State, number: int) -> dict[str, float]:
    states.step(state, number)
    resident = meter.resident_bytes()
    meter.reset_peak()
    cpu = meter.cpu_seconds()
    began = time.perf_counter()
    wait = save(state, number)
    stalled = time.perf_counter()
    cpu_stalled = meter.cpu_seconds()
    measured = time.perf_counter() - stalled  # the meter's own time is nobody's
    wait()
    ended = time.perf_counter() - measured
    return {
        "stall": stalled - began,
        "durable": ended - began,
        "after_stall": ended - stalled,
        "cpu": meter.cpu_seconds() - cpu,
        "cpu_after_stall": meter.cpu_seconds() - cpu_stalled,
        "peak_growth": meter.peak_bytes() - resident,
    }


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that keep a CPU busy each."""
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in started:
        process.start()
    time.sleep(1.0)  # until their interpreters are up
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


def _spin() -> None:
    while True:
        sum(range(10_000))
