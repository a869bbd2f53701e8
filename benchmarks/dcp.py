"""torch.distributed.checkpoint over generations beside its own storage, and beside ckptfmt without it.

    python -m benchmarks.dcp [--folder DIR] [--bytes N | --tensors N] [--rounds N] [--stalls]

One train state (a transformer, its AdamW state) loaded by ``dcp.load`` in place, through ``FileSystemReader`` and
through ``GenerationReader``, from a cold and a warm page cache; and for how long ``dcp.async_save`` blocks (in a
thread, with each writer's own staging), beside ``Checkpointer.save``, and beside what it blocks when nothing is staged,
which is DCP's own share. ``--stalls`` measures only these. In turns; the ratios that count are medians over
the rounds, as others may be using the machine. Every load is compared with what was saved.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager

import ckptfmt
from benchmarks.columns import aligned
from benchmarks.pairs import interval, ratios
from ckptfmt.measure.raw_files import drop_cache, fill_cache
from ckptfmt.measure.states import clear, small_state, state_bytes, state_digest, step, train_state
from ckptfmt.torch.dcp import GenerationReader, GenerationWriter

LOAD_AT_LEAST = 1.5
STALL_AT_MOST = 1.0

Figures = dict[str, list[float]]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def loads(folder: Path, state: dict[str, Any], rounds: int) -> Figures:
    """Seconds of each reader, cold and warm, reader by reader in every round."""
    with GenerationWriter(folder / "ours") as writer:
        dcp.save(state, storage_writer=writer)
    dcp.save(state, storage_writer=FileSystemWriter(folder / "torchs"))
    wanted = state_digest(state)
    readers: dict[str, Callable[[], Any]] = {
        "FileSystemReader": lambda: FileSystemReader(folder / "torchs"),
        "GenerationReader": lambda: GenerationReader(folder / "ours"),
        "GenerationReader, atomic=False": lambda: GenerationReader(folder / "ours", atomic=False),
    }
    found: Figures = {}
    for _ in range(rounds):
        for cache, prepare in (("cold", drop_cache), ("warm", fill_cache)):
            for name, reader in readers.items():
                clear(state)
                prepare(folder)
                seconds, _ = timed(lambda reader=reader: dcp.load(state, storage_reader=reader()))  # type: ignore[misc]
                found.setdefault(f"{name}, {cache}", []).append(seconds)
                if state_digest(state) != wanted:
                    raise ValueError(f"{name}, {cache}: the load gave other bytes than were saved")
    return found


class NothingStaged(AsyncStager):
    """The save reads the live state, so what ``async_save`` blocks with it is DCP's own."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict


def stalls(folder: Path, state: dict[str, Any], rounds: int) -> Figures:
    """Seconds for which each way blocks, way by way in every round; the first save of each does not count."""
    found: Figures = {}
    with (
        GenerationWriter(folder / "async") as writer,
        GenerationWriter(folder / "unstaged") as other,
        ckptfmt.open(folder / "own") as repository,
        repository.checkpointer("own") as checkpointer,
    ):

        def own(number: int) -> Callable[[], Any]:
            pending = checkpointer.save(state, step=number)
            assert pending is not None
            return pending.wait

        def ours(number: int) -> Callable[[], Any]:
            return waiting(dcp.async_save(state, storage_writer=writer, checkpoint_id=number))

        def nothing(number: int) -> Callable[[], Any]:
            stager = NothingStaged()
            return waiting(dcp.async_save(state, storage_writer=other, checkpoint_id=number, async_stager=stager))

        def torchs(number: int) -> Callable[[], Any]:
            place = FileSystemWriter(folder / f"torchs-{number}")
            return waiting(dcp.async_save(state, storage_writer=place))

        ways = {
            "Checkpointer.save": own,
            "async_save, GenerationWriter": ours,
            "async_save, nothing staged": nothing,
            "async_save, FileSystemWriter": torchs,
        }
        for number in range(rounds + 1):
            for name, way in _turned(list(ways.items()), number):
                step(state, number)
                seconds, wait = timed(partial(way, number))
                whole, _ = timed(wait)
                if number:
                    found.setdefault(name, []).append(seconds)
                    found.setdefault(f"{name}: until committed", []).append(seconds + whole)
            shutil.rmtree(folder / f"torchs-{number}")
    return found


def _turned(ways: list[Any], number: int) -> list[Any]:
    """Each round begins with another way: what one leaves behind, the next one pays for."""
    start = number % len(ways)
    return ways[start:] + ways[:start]


def waiting(future: Any) -> Callable[[], Any]:
    return getattr(future, "upload_completion", future).result  # type: ignore[no-any-return]


def table(found: Figures, base: str) -> str:
    unit = min(found[base])
    rows = [("", "best", "median", "worst", "of the first")]
    for name, seconds in found.items():
        figures = (f"{figure(seconds) * 1e3:.0f} ms" for figure in (min, median, max))
        rows.append((name, *figures, f"{min(seconds) / unit:.2f}"))
    return "\n".join(aligned(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--bytes", type=int, default=1 << 30, dest="nbytes")
    parser.add_argument("--tensors", type=int, help="a state of so many small tensors instead")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stalls", action="store_true", help="measure only for how long saves block")
    parser.add_argument("--json", type=Path, help="write every figure there")
    told = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is")
    state = small_state(told.tensors) if told.tensors else train_state(told.nbytes)
    print(f"{state_bytes(state):,} bytes, {os.cpu_count()} processors")
    folder = Path(tempfile.mkdtemp(prefix="ckptfmt-dcp-", dir=told.folder))
    try:
        read = {} if told.stalls else loads(folder, state, told.rounds)
        blocked = stalls(folder, state, told.rounds)
    finally:
        shutil.rmtree(folder)
    if read:
        print(table(read, "FileSystemReader, cold"))
    print(table(blocked, "Checkpointer.save"))
    for cache in ("cold", "warm") if read else ():
        ratio = median(ratios(read[f"FileSystemReader, {cache}"], read[f"GenerationReader, {cache}"]))
        print(f"load, {cache}: {ratio:.2f} times FileSystemReader's speed (goal: at least {LOAD_AT_LEAST})")
    for name in ("async_save, nothing staged", "async_save, FileSystemWriter", "async_save, GenerationWriter"):
        stall = interval(ratios(blocked[name], blocked["Checkpointer.save"]))
        goal = f" (goal: at most {STALL_AT_MOST})" if name.endswith("GenerationWriter") else ""
        print(f"stall of {name}: {stall.median:.2f} [{stall.low:.2f}, {stall.high:.2f}] of Checkpointer.save's{goal}")
    if told.json is not None:
        told.json.write_text(json.dumps({"loads": read, "stalls": blocked}, indent=2))


if __name__ == "__main__":
    main()
