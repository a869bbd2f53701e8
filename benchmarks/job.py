"""One measurement in a fresh process.

Processes are forked from a server that has imported the libraries and done nothing else: each has its own memory,
threads and first uses, and none pays for imports, which are measured by themselves (``starts.py``). A forked process
copies each page of its parent's that it touches, counts of references included; that is much beside a few
milliseconds, so what takes no longer is measured in an interpreter that made its own imports (``Job.interpreter``).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = (
    "benchmarks.interference",
    "benchmarks.limits",
    "benchmarks.loading",
    "benchmarks.memory",
    "benchmarks.saving",
    "ckptfmt.backends.posix",
    "ckptfmt.catalog.open",
    "ckptfmt.catalog.sql",
    "ckptfmt.catalog.sqlite_engine",
    "ckptfmt.catalog.upgrade",
    "ckptfmt.checkpointer",
    "ckptfmt.launching",
    "ckptfmt.oneshot",
    "ckptfmt.torch.family",
    "safetensors.torch",
    "sqlalchemy.dialects.sqlite",
    "torch.distributed.checkpoint",
)
LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class Job:
    """``measurement`` is ``module.function`` below ``benchmarks``; it gets the job and returns plain values."""

    measurement: str
    contender: str
    state: str
    """``train`` or ``small``."""
    nbytes: int
    """Of a train state."""
    tensors: int
    """Of a small state."""
    folder: Path
    count: int = 3
    """How often what is measured is done in this process."""
    options: tuple[tuple[str, Any], ...] = ()
    interpreter: bool = False
    """Not forked: an interpreter of its own, which imports before it is measured."""

    def option(self, name: str) -> Any:
        return dict(self.options)[name]


def run_job(job: Job, *, limit: float = LIMIT_SECONDS) -> dict[str, Any]:
    """Run it in a process of its own, for ``limit`` seconds at most; raises ``RuntimeError`` with that process's
    traceback if it fails."""
    mine, its = multiprocessing.Pipe(duplex=False)
    process = _process(job, its)
    process.start()
    its.close()
    try:
        if not mine.poll(limit):
            raise RuntimeError(f"{job.measurement} of {job.contender} took more than {limit:.0f} s")
        failed, result = mine.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{job.measurement} of {job.contender} died with code {process.exitcode}") from None
    finally:
        if mine.poll(0) or process.exitcode is None:
            process.join(10)
        if process.exitcode is None:
            process.kill()
            process.join()
        mine.close()
    if failed:
        raise RuntimeError(f"{job.measurement} of {job.contender} failed:\n{result}")
    return dict(result)


def _process(job: Job, out: Connection) -> BaseProcess:
    if job.interpreter:
        return multiprocessing.get_context("spawn").Process(target=_run, args=(job, out), daemon=False)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(list(PRELOADED))
    return server.Process(target=_run, args=(job, out), daemon=False)


def _run(job: Job, out: Connection) -> None:
    warnings.simplefilter("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in PRELOADED:
        importlib.import_module(name)
    module, _, function = job.measurement.partition(".")
    try:
        out.send((False, getattr(importlib.import_module(f"benchmarks.{module}"), function)(job)))
    except BaseException:
        out.send((True, traceback.format_exc()))
    finally:
        out.close()
