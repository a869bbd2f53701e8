"""A training loop beside saves: time that its steps lose between the call of a save and its commit."""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

import torch

from benchmarks.contenders import SAVERS
from benchmarks.job import Job
from benchmarks.states import build
from ckptfmt.measure import states

STEP_SECONDS = 0.03


def measure_interference(job: Job) -> dict[str, Any]:
    """Steps of matrix products with a thread on each core; saves after a number of quiet steps.

    ``lost`` is, per save, the sum over its steps of (step - median quiet step); the step in which ``save`` is called
    counts with its stall. ``longest`` is the longest step outside that one, in median quiet steps.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    state = build(job)
    train = _training()
    found: dict[str, Any] = {"lost": [], "longest": [], "stall": [], "durable": [], "steps": []}
    with SAVERS[job.contender](job.folder, state) as save:
        for number in range(job.count):
            quiet = median(_timed(train) for _ in range(job.option("quiet_steps")))
            states.step(state, number)
            steps, stall, durable = _steps_beside(save, state, number, train)
            found["steps"].append(steps)
            found["stall"].append(stall)
            found["durable"].append(durable)
            found["lost"].append(sum(step - quiet for step in steps))
            found["longest"].append(max([step - (stall if at == 0 else 0) for at, step in enumerate(steps)]) / quiet)
    return found


def _steps_beside(save: Any, state: Any, number: int, train: Any) -> tuple[list[float], float, float]:
    from threading import Thread

    began = time.perf_counter()
    wait = save(state, number)
    stall = time.perf_counter() - began
    ended: list[float] = []

    def watch() -> None:
        wait()
        ended.append(time.perf_counter())

    watcher = Thread(target=watch)
    watcher.start()
    train()
    steps = [time.perf_counter() - began]  # the first step has the call in it
    while not ended:
        steps.append(_timed(train))
    watcher.join()
    return steps, stall, ended[0] - began


def _training() -> Any:
    """A step of about ``STEP_SECONDS``: products of square matrices."""
    side = 512
    left, right = torch.randn(side, side), torch.randn(side, side)
    out = torch.empty(side, side)
    for _ in range(20):
        torch.mm(left, right, out=out)
    one = min(_timed(lambda: torch.mm(left, right, out=out)) for _ in range(20))
    products = max(1, round(STEP_SECONDS / one))

    def train() -> None:
        for _ in range(products):
            torch.mm(left, right, out=out)

    return train


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
