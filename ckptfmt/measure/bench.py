"""``ckptfmt bench``: saves and restores of one state by ckptfmt and by torch.save, in turns, beside raw limits."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import ckptfmt
from ckptfmt.catalog.filesystems import LOCAL, filesystem_type
from ckptfmt.engine.arena import available_memory
from ckptfmt.errors import CkptError, Corrupt, OutOfSpace
from ckptfmt.measure import states
from ckptfmt.measure.raw_files import drop_cache, fill_cache, raw_read, raw_write, sync_folder, whole_blocks
from ckptfmt.measure.raw_memory import CopyLimit
from ckptfmt.measure.report import BenchReport, BenchTimings

PREFIX: Final = "ckptfmt-bench-"
RUN: Final = "bench"
RESTORES: Final = 2
_MARGIN: Final = 256 << 20
_RAW_THREADS: Final = 2

Echo = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """What to measure: ``folder`` exists and is where the bench makes its own."""

    url: str
    folder: Path
    nbytes: int
    saves: int


class _Clock:
    """Times of one contender as they come in."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stalls: list[float] = []
        self.commits: list[float] = []
        self.cold: list[float] = []
        self.warm: list[float] = []

    def timings(self) -> BenchTimings:
        return BenchTimings(self.name, tuple(self.stalls), tuple(self.commits), tuple(self.cold), tuple(self.warm))


def run_bench(order: Order, *, echo: Echo) -> BenchReport:
    """Measure, compare every restore with what was saved, and remove everything that was written.

    Raises ``OutOfSpace`` before anything is written if disk or host memory is short, ``Corrupt`` if a restore gave
    other bytes.
    """
    _require_room(order)
    left_over = tuple(sorted(str(path) for path in order.folder.glob(f"{PREFIX}*")))
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=order.folder) as made:
        bench = _Bench(order, Path(made), echo)
        bench.measure_saves()
        bench.measure_restores()
        echo("")
    state = bench.state
    return BenchReport(
        report="bench",
        url=order.url,
        folder=str(order.folder),
        file_system=filesystem_type(order.folder),
        nbytes=states.state_bytes(state),
        tensors=len(list(states.named_tensors(state))),
        cpus=len(os.sched_getaffinity(0)),
        direct=bench.direct,
        limits=bench.limits.timings(),
        contenders=(bench.ours.timings(), bench.theirs.timings()),
        left_over=left_over,
    )


def _require_room(order: Order) -> None:
    """The disk holds every generation, one torch.save file and one raw file; memory the state, and once more of it."""
    place = os.statvfs(order.folder)
    needed, free = (order.saves + 2) * order.nbytes + _MARGIN, place.f_bavail * place.f_frsize
    if place.f_blocks and free < needed:
        raise OutOfSpace(
            f"{order.folder}: the bench writes up to {needed} bytes but only {free} are free; nothing was written; "
            "give fewer --bytes or --saves",
            needed=needed,
            free=free,
        )
    needed_memory, memory = 3 * order.nbytes + _MARGIN, available_memory()
    if memory is not None and memory < needed_memory:
        raise OutOfSpace(
            f"the bench needs {needed_memory} bytes of host memory (three times the state) but only {memory} are "
            f"available; nothing was written; give --bytes {max(0, (memory - _MARGIN) // 3)} or fewer",
            needed=needed_memory,
            free=memory,
            kind="host_memory",
        )


class _Bench:
    """One state, saved and restored by both, and moved raw, in one folder."""

    def __init__(self, order: Order, folder: Path, echo: Echo) -> None:
        self._order = order
        self._folder = folder
        self._echo = echo
        echo("making a state of random numbers")
        self.state = states.train_state(order.nbytes)
        self._raw_bytes = whole_blocks(states.state_bytes(self.state))
        self.direct = False
        self.limits, self.ours, self.theirs = _Clock("raw limits"), _Clock("ckptfmt"), _Clock("torch.save")
        self._saved = folder / "saved.pt"
        self._raw = folder / "raw"
        self._repository = folder / "repository"
        self._temporary = ExitStack()

    # -- saves ------------------------------------------------------------------------------------
    def measure_saves(self) -> None:
        with self._temporary, ckptfmt.open(self._repository, catalog=self._catalog()) as repository:
            with repository.checkpointer(RUN) as checkpointer:
                for number in range(self._order.saves):
                    self._echo(f"save {number + 1} of {self._order.saves}")
                    states.step(self.state, number)
                    self._save_raw()
                    self._save_ours(checkpointer, number)
                    self._save_theirs()
            self._digest = states.state_digest(self.state)

    def _catalog(self) -> str | None:
        """Beside the data where SQLite can be trusted there, else on this machine's temporary folder."""
        if filesystem_type(self._folder) in LOCAL:
            return f"sqlite:///{self._repository / 'catalog.sqlite'}"
        place = self._temporary.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX))
        return f"sqlite:///{place}/catalog.sqlite"

    def _save_raw(self) -> None:
        limit = CopyLimit(self.state)
        copied = min(seconds[0] for seconds in limit.times(1).values())
        self._raw.unlink(missing_ok=True)
        written = raw_write(self._raw, limit.memory[: self._raw_bytes], threads=_RAW_THREADS)
        self.direct = written.direct
        self.limits.stalls.append(copied)
        self.limits.commits.append(copied + written.seconds)

    def _save_ours(self, checkpointer: Any, number: int) -> None:
        began = time.perf_counter()
        pending = checkpointer.save(self.state, step=number)
        self.ours.stalls.append(time.perf_counter() - began)
        pending.wait()
        self.ours.commits.append(time.perf_counter() - began)

    def _save_theirs(self) -> None:
        self._saved.unlink(missing_ok=True)
        began = time.perf_counter()
        with self._saved.open("xb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._folder)
        seconds = time.perf_counter() - began
        self.theirs.stalls.append(seconds)  # it blocks until the file is safe
        self.theirs.commits.append(seconds)

    # -- restores ---------------------------------------------------------------------------------
    def measure_restores(self) -> None:
        for number in range(RESTORES):
            self._echo(f"restore {number + 1} of {RESTORES}")
            for clock, restore in (
                (self.limits, None),
                (self.ours, self._restore_ours),
                (self.theirs, self._restore_theirs),
            ):
                for times, cold in ((clock.cold, True), (clock.warm, False)):
                    (drop_cache if cold else fill_cache)(self._folder)
                    times.append(self._read_raw(cold) if restore is None else self._restored(clock.name, restore))

    def _read_raw(self, cold: bool) -> float:
        memory = CopyLimit(self.state).memory[: self._raw_bytes]
        return raw_read(self._raw, memory, threads=_RAW_THREADS, direct=cold).seconds

    def _restored(self, name: str, restore: Callable[[], None]) -> float:
        states.clear(self.state)
        began = time.perf_counter()
        restore()
        seconds = time.perf_counter() - began
        if states.state_digest(self.state) != self._digest:
            raise Corrupt(
                f"{name} restored other bytes than were saved in {self._folder}; check the disk and the memory"
            )
        return seconds

    def _restore_ours(self) -> None:
        ckptfmt.restore(self.state, self._repository, run=RUN, catalog="none")

    def _restore_theirs(self) -> None:
        loaded = torch.load(self._saved, weights_only=True)
        for (name, tensor), (other, value) in zip(
            states.named_tensors(self.state), states.named_tensors(loaded), strict=True
        ):
            if name != other:
                raise CkptError(f"torch.save gave {other} in place of {name}")
            tensor.copy_(value)
