"""Which measurement runs for whom, in which order: contenders take turns, and every round starts with another one."""

from __future__ import annotations

import inspect
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import SAVERS
from benchmarks.job import Job, run_job
from benchmarks.loading import LOADERS, WAYS
from benchmarks.samples import Samples
from benchmarks.starts import measure_starts
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.repository import Repository

LIMITS = "raw limits"
IN_GOALS = ("ckptfmt", "safetensors", "DCP async", "DCP async, cached")
"""Compared in a goal, hence measured more often in each process."""
FEW_ROUNDS = {"DCP async, process": 2}
"""No goal is about it, and starting its process takes longest."""
SMALL_SAVERS = ("ckptfmt", "safetensors", "torch.save", "DCP async, cached")
BESIDE_TRAINING = ("ckptfmt", "DCP async", "DCP async, cached")
MEMORY_WAYS = ("save", "staged", "partial", "restore", "restore, atomic=False")
OPTIONAL_WAYS: dict[str, tuple[Callable[..., Any], str]] = {
    "staged": (Repository.checkpointer, "host_bytes_max"),
    "partial": (Checkpointer.save, "sync"),
}
"""Measured where this ckptfmt has the parameter."""


@dataclass(frozen=True)
class Scale:
    """How much is measured. ``part`` is the train state of what needs no full one."""

    nbytes: int
    tensors: int
    part: int
    rounds: int
    pairs: int
    """Later saves, or loads, in each process of a contender that a goal compares."""
    generations: int
    starts: int
    """Processes of each kind where one process gives one figure."""
    quiet_steps: int
    """Of training before each save that is watched from beside it."""


FULL = Scale(1_700_000_000, 20_000, 420_000_000, rounds=5, pairs=2, generations=10_000, starts=9, quiet_steps=40)
QUICK = Scale(4_000_000, 60, 2_000_000, rounds=1, pairs=1, generations=50, starts=1, quiet_steps=5)


class Plan:
    """Runs groups of measurements in one folder and gathers their samples."""

    def __init__(self, scale: Scale, folder: Path) -> None:
        self.samples = Samples()
        self._scale = scale
        self._folder = folder
        self._began = time.monotonic()

    def saves(self, state: str) -> None:
        """Saves of every contender beside the limits of memory and disk."""
        contenders = [*SAVERS] if state == "train" else [*SMALL_SAVERS]
        for contender in self._turns(f"saves of {state}", [LIMITS, *contenders], self._scale.rounds):
            if self.samples.count(f"saves {state}", contender) >= FEW_ROUNDS.get(contender, self._scale.rounds):
                continue
            wanted = 1 + self._scale.pairs if contender in IN_GOALS else 2
            if contender == LIMITS:
                sample = self._run("limits.measure_writing", LIMITS, state, count=self._scale.pairs)
            else:
                sample = self._run("saving.measure_saves", contender, state, count=wanted)
            self.samples.add(f"saves {state}", contender, sample)

    def loads(self, state: str) -> None:
        """Loads of what each contender saved, beside raw reads; and of one tensor of the small state."""
        with self._place() as kept:
            self._run("limits.prepare_file", LIMITS, state, folder=_made(kept / LIMITS))
            saved = {
                name: self._run("loading.prepare_saved", name, state, folder=_made(kept / name)) for name in LOADERS
            }
            for contender in self._turns(f"loads of {state}", [LIMITS, *LOADERS], self._scale.rounds):
                count = self._scale.pairs if contender in (LIMITS, *IN_GOALS) else 1
                if contender == LIMITS:
                    sample = self._run("limits.measure_reading", LIMITS, state, folder=kept / LIMITS, count=count)
                else:
                    about = (("digest", saved[contender]["digest"]), ("ways", _ways_of(contender, state)))
                    sample = self._run(
                        "loading.measure_loads", contender, state, folder=kept / contender, count=count, options=about
                    )
                self.samples.add(f"loads {state}", contender, sample | {"nbytes": saved["ckptfmt"]["nbytes"]})
            if state == "small":
                self._one_tensor(kept, saved)

    def _one_tensor(self, kept: Path, saved: dict[str, Any]) -> None:
        for contender in self._turns("one tensor", [*LOADERS], self._scale.starts):
            about = tuple(saved[contender]["one"].items())
            sample = self._run("loading.measure_one_tensor", contender, "small", folder=kept / contender, options=about)
            self.samples.add("one tensor", contender, sample)

    def modes(self) -> None:
        """ckptfmt alone, by a part of the train state: first saves, back to back, beside busy processes."""
        scale = self._scale
        with self._place() as kept:
            self._run("loading.prepare_saved", "ckptfmt", "part", folder=_made(kept / "ckptfmt"))
            for after in self._turns("first saves", ["prepare", "restore"], scale.starts):
                with self._place() as folder:
                    shutil.copytree(kept / "ckptfmt", folder, dirs_exist_ok=True)
                    sample = self._run(
                        "saving.measure_first", "ckptfmt", "part", folder=folder, options=(("after", after),)
                    )
                self.samples.add("first", after, sample)
        rounds = -(-scale.starts // 3)
        for way in self._turns("saves beside busy processes", ["saves", "beside_busy", "back_to_back"], rounds):
            sample = self._run(f"saving.measure_{way}", "ckptfmt", "part", count=4)
            self.samples.add("modes", way, sample)

    def interference(self) -> None:
        for contender in self._turns("saves beside training", BESIDE_TRAINING, self._scale.rounds):
            steps = (("quiet_steps", self._scale.quiet_steps),)
            sample = self._run(
                "interference.measure_interference", contender, "part", count=1 + self._scale.pairs, options=steps
            )
            self.samples.add("interference", contender, sample)

    def memory(self) -> None:
        rounds = -(-self._scale.starts // 3)
        for way in self._turns("memory", [way for way in MEMORY_WAYS if _offered(way)], rounds):
            with self._place() as folder:
                if way.startswith("restore"):
                    self._run("loading.prepare_saved", "ckptfmt", "part", folder=folder)
                sample = self._run("memory.measure_memory", "ckptfmt", "part", folder=folder, options=(("way", way),))
            self.samples.add("memory", way, sample)

    def starts(self) -> None:
        with self._place() as folder:
            found = measure_starts(folder, self._scale.starts, self._scale.generations)
        for name, seconds in found.items():
            self.samples.add("starts", name, {"seconds": seconds})

    # -- one measurement ------------------------------------------------------------------------------
    def _turns(self, what: str, names: Sequence[str], rounds: int) -> Iterator[str]:
        for turn in range(rounds):
            elapsed = time.monotonic() - self._began
            print(f"{elapsed:5.0f} s  {what}, round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
            start = turn % len(names)
            yield from [*names[start:], *names[:start]]

    def _run(
        self,
        measurement: str,
        contender: str,
        state: str,
        *,
        folder: Path | None = None,
        count: int = 1,
        options: tuple[tuple[str, Any], ...] = (),
    ) -> dict[str, Any]:
        nbytes = self._scale.part if state == "part" else self._scale.nbytes
        kind = "train" if state == "part" else state
        began = time.monotonic()
        with self._place() as made:
            job = Job(measurement, contender, kind, nbytes, self._scale.tensors, folder or made, count, options)
            sample = run_job(job)
        print(f"{'':9}{time.monotonic() - began:5.1f} s  {measurement} {contender}", file=sys.stderr, flush=True)
        return sample

    @contextmanager
    def _place(self) -> Iterator[Path]:
        """A new folder that goes when it is left."""
        with tempfile.TemporaryDirectory(dir=self._folder) as made:
            yield Path(made)


def _ways_of(contender: str, state: str) -> tuple[str, ...]:
    """Ways to load: all where a goal compares them, else in place, and of the small state only cold."""
    if contender in IN_GOALS:
        return WAYS
    return WAYS[:1] if state == "small" else WAYS[:2]


def _offered(way: str) -> bool:
    if way not in OPTIONAL_WAYS:
        return True
    method, parameter = OPTIONAL_WAYS[way]
    if parameter in inspect.signature(method).parameters:
        return True
    print(f"        not measured: {way}, since this ckptfmt has no {parameter}", file=sys.stderr, flush=True)
    return False


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
