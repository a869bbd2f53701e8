"""One contender in a fresh process: ``python benchmarks/contender.py NAME FOLDER MEGABYTES SAVES``.

Saves the same state SAVES times and prints one JSON line: per save the stall (seconds for which the caller is
blocked) and the commit time (seconds from the call until a restart would find a complete copy on storage).
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

WIDTH = 1024
Save = Callable[[dict[str, Any], int], Callable[[], None]]
"""Begins a save of a state under a number and returns what waits for its end."""


def make_state(megabytes: int) -> dict[str, Any]:
    """Blocks as in a transformer with Adam's two moments: float32 tensors of 4, 16 and 0.004 MB."""
    torch.manual_seed(0)
    state: dict[str, Any] = {"step": 0}
    left, block = megabytes * 1_000_000, 0
    while left > 0:
        for part in ("weight", "exp_avg", "exp_avg_sq"):
            state[f"blocks.{block}.attention.{part}"] = torch.randn(WIDTH, WIDTH)
            state[f"blocks.{block}.feed.{part}"] = torch.randn(4 * WIDTH, WIDTH)
            state[f"blocks.{block}.norm.{part}"] = torch.randn(WIDTH)
            left -= 4 * (5 * WIDTH * WIDTH + WIDTH)
        block += 1
    return state


@contextmanager
def by_ckptfmt(folder: Path) -> Iterator[Save]:
    import ckptfmt

    with ckptfmt.open(folder / "repository") as repo, repo.checkpointer("bench") as checkpointer:

        def save(state: dict[str, Any], number: int) -> Callable[[], None]:
            pending = checkpointer.save(state, step=number)
            assert pending is not None
            return lambda: pending.wait()

        yield save


@contextmanager
def by_torch_save(folder: Path) -> Iterator[Save]:
    def save(state: dict[str, Any], number: int) -> Callable[[], None]:
        temporary = folder / f"{number}.tmp"
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(folder / f"{number}.pt")
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        return lambda: None

    yield save


@contextmanager
def by_dcp_async(folder: Path) -> Iterator[Save]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")
    # async_save asks for a process group even where there is one process.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def save(state: dict[str, Any], number: int) -> Callable[[], None]:
            # Its writer fsyncs each file by default (sync_files=True).
            future = dcp.async_save(state, checkpoint_id=folder / str(number))
            return lambda: future.result()

        yield save
    finally:
        dist.destroy_process_group()


CONTENDERS = {"ckptfmt": by_ckptfmt, "torch.save + fsync": by_torch_save, "DCP async_save": by_dcp_async}


def main() -> None:
    name, folder, megabytes, saves = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    state = make_state(megabytes)
    stalls, commits = [], []
    with CONTENDERS[name](folder) as save:
        for number in range(saves):
            state["step"] = number
            began = time.perf_counter()
            wait = save(state, number)
            stalls.append(time.perf_counter() - began)
            wait()
            commits.append(time.perf_counter() - began)
    nbytes = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    print(json.dumps({"stalls": stalls, "commits": commits, "nbytes": nbytes}))


if __name__ == "__main__":
    main()
