"""The two states of the benchmarks."""

from __future__ import annotations

from typing import Any

from benchmarks.job import Job
from ckptfmt.measure.states import named_tensors, small_state, train_state


def build(job: Job, *, fill: bool = True) -> dict[str, Any]:
    """The job's state, filled with random numbers, or with zeros to load into."""
    if job.state == "train":
        return train_state(job.nbytes, fill=fill)
    return small_state(job.tensors, fill=fill)


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """Tensors under dotted names, as formats without nesting want them."""
    return dict(named_tensors(state))
