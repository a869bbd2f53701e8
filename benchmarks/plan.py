"""Which measurement runs for whom, in which order: contenders take turns, and every round starts with another one."""

from __future__ import annotations

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
from benchmarks.loading import AFRESH, IN_PLACE, WAYS
from benchmarks.samples import Samples
from benchmarks.starts import fill_catalog, measure_starts

LIMITS = "raw limits"
IN_GOALS = ("ckptfmt", "safetensors", "DCP async", "DCP async, cached")
"""Compared in a goal, hence measured more often in each process."""
IN_FEW_ROUNDS = ("torch.save", "DCP save", "DCP async, process", "DCP async, blocking stager")
FEW_ROUNDS = 3
"""Rounds of those that no goal is about; the time is spent on the others."""
ONCE = (("DCP async, cached", "small"),)
"""One later save in each process: it takes most of the time of its group."""
SMALL_SAVERS = ("ckptfmt", "safetensors", "torch.save", "DCP async, cached")
BESIDE_TRAINING = ("ckptfmt", "DCP async", "DCP async, cached")
MEMORY_WAYS = ("save", "staged", "partial", "restore", "restore, atomic=False")


@dataclass(frozen=True)
class Scale:
    """How much is measured. ``part`` is the train state of what needs no full one."""

    nbytes: int
    tensors: int
    part: int
    rounds: int
    pairs: int
    """Figures that each round gives of what a goal compares: later saves, loads, or processes."""
    generations: int
    quiet_steps: int
    """Of training before each save that is watched from beside it."""


FULL = Scale(1_700_000_000, 20_000, 420_000_000, rounds=5, pairs=2, generations=10_000, quiet_steps=40)
QUICK = Scale(4_000_000, 60, 2_000_000, rounds=1, pairs=1, generations=50, quiet_steps=5)


class Plan:
    """Runs rounds of groups of measurements in one folder and gathers their samples."""

    def __init__(self, scale: Scale, folder: Path) -> None:
        self.samples = Samples()
        self._scale = scale
        self._folder = folder
        self._saved: dict[str, dict[str, Any]] = {}
        self._groups: dict[str, Callable[[int], None]] = {
            "saves train": lambda turn: self._saves("train", turn),
            "saves small": lambda turn: self._saves("small", turn),
            "loads train": lambda turn: self._loads("train", turn),
            "loads small": lambda turn: self._loads("small", turn),
            "one tensor": self._one_tensor,
            "first": self._first,
            "modes": self._modes,
            "interference": self._interference,
            "memory": self._memory,
            "starts": self._starts,
        }

    def run(self, groups: Sequence[str], *, seconds: float) -> dict[str, int]:
        """Rounds of all ``groups``; a group that took longer than what is left of ``seconds`` has had its last one.

        Returns the rounds of each group.
        """
        began = time.monotonic()
        took: dict[str, float] = {}
        rounds = dict.fromkeys(groups, 0)
        for turn in range(self._scale.rounds):
            for group in groups:
                elapsed = time.monotonic() - began
                if turn and (rounds[group] < turn or elapsed + took[group] > seconds):
                    continue
                _tell(f"{elapsed:.0f} s: round {turn + 1} of {self._scale.rounds}, {group}")
                self._groups[group](turn)
                took[group] = time.monotonic() - began - elapsed
                rounds[group] += 1
        return rounds

    # -- groups ---------------------------------------------------------------------------------------
    def _saves(self, state: str, turn: int) -> None:
        """Saves of every contender beside the limits of memory and disk."""
        contenders = [*SAVERS] if state == "train" else [*SMALL_SAVERS]
        for contender in _in_turn([LIMITS, *contenders], turn):
            if contender in IN_FEW_ROUNDS and turn >= FEW_ROUNDS:
                continue
            if contender == LIMITS:
                sample = self._run("limits.measure_writing", LIMITS, state, count=self._scale.pairs)
            else:
                often = contender in IN_GOALS and (contender, state) not in ONCE
                count = 1 + (self._scale.pairs if often else 1)
                sample = self._run("saving.measure_saves", contender, state, count=count)
            self.samples.add(f"saves {state}", contender, sample)

    def _loads(self, state: str, turn: int) -> None:
        """Loads of what each contender saved, beside raw reads."""
        kept, saved = self._kept(state)
        for contender in _in_turn([LIMITS, *IN_PLACE], turn):
            if contender in IN_FEW_ROUNDS and turn >= FEW_ROUNDS:
                continue
            count = self._scale.pairs if contender in (LIMITS, *IN_GOALS) else 1
            if contender == LIMITS:
                sample = self._run("limits.measure_reading", LIMITS, state, folder=kept / LIMITS, count=count)
            else:
                about = (("digest", saved[contender]["digest"]), ("ways", _ways_of(contender, state)))
                sample = self._run(
                    "loading.measure_loads", contender, state, folder=kept / contender, count=count, options=about
                )
            self.samples.add(f"loads {state}", contender, sample | {"nbytes": saved["ckptfmt"]["nbytes"]})

    def _kept(self, state: str) -> tuple[Path, dict[str, Any]]:
        """Where each contender has saved the state once, and what is known of it."""
        kept = self._folder / f"kept-{state}"
        if state not in self._saved:
            kept.mkdir()
            self._run("limits.prepare_file", LIMITS, state, folder=_made(kept / LIMITS))
            self._saved[state] = {
                name: self._run("loading.prepare_saved", name, state, folder=_made(kept / name)) for name in IN_PLACE
            }
        return kept, self._saved[state]

    def _one_tensor(self, turn: int) -> None:
        """One tensor of the small state, by name."""
        kept, saved = self._kept("small")
        for contender in _in_turn([*IN_PLACE], turn):
            if contender in IN_FEW_ROUNDS and turn >= FEW_ROUNDS:
                continue
            about = tuple(saved[contender]["one"].items())
            for _ in range(self._scale.pairs if contender in IN_GOALS else 1):
                sample = self._run(
                    "loading.measure_one_tensor",
                    contender,
                    "small",
                    folder=kept / contender,
                    options=about,
                    interpreter=True,
                )
                self.samples.add("one tensor", contender, sample)

    def _first(self, turn: int) -> None:
        """The first save of a process after ``prepare`` and after ``restore``."""
        for after in _in_turn(["prepare", "restore"], turn) * self._scale.pairs:
            with self._place() as folder:
                if after == "restore":
                    self._run("loading.prepare_saved", "ckptfmt", "part", folder=folder)
                sample = self._run(
                    "saving.measure_first", "ckptfmt", "part", folder=folder, options=(("after", after),)
                )
            self.samples.add("first", after, sample)

    def _modes(self, turn: int) -> None:
        """Saves of ckptfmt that are waited for, beside busy processes, and back to back."""
        for way in _in_turn(["saves", "beside_busy", "back_to_back", "two_in_flight"], turn):
            sample = self._run(f"saving.measure_{way}", "ckptfmt", "part", count=1 + self._scale.pairs)
            self.samples.add("modes", way, sample)

    def _interference(self, turn: int) -> None:
        steps = (("quiet_steps", self._scale.quiet_steps),)
        for contender in _in_turn(BESIDE_TRAINING, turn):
            count = 1 + self._scale.pairs
            sample = self._run("interference.measure_interference", contender, "part", count=count, options=steps)
            self.samples.add("interference", contender, sample)

    def _memory(self, turn: int) -> None:
        for way in _in_turn(MEMORY_WAYS, turn):
            with self._place() as folder:
                if way.startswith("restore"):
                    self._run("loading.prepare_saved", "ckptfmt", "part", folder=folder)
                sample = self._run("memory.measure_memory", "ckptfmt", "part", folder=folder, options=(("way", way),))
            self.samples.add("memory", way, sample)

    def _starts(self, turn: int) -> None:
        repository = self._folder / "listed"
        if turn == 0:
            fill_catalog(repository, self._scale.generations)
        for name, seconds in measure_starts(repository, self._scale.pairs).items():
            self.samples.add("starts", name, {"seconds": seconds})

    # -- one measurement ------------------------------------------------------------------------------
    def _run(
        self,
        measurement: str,
        contender: str,
        state: str,
        *,
        folder: Path | None = None,
        count: int = 1,
        options: tuple[tuple[str, Any], ...] = (),
        interpreter: bool = False,
    ) -> dict[str, Any]:
        nbytes = self._scale.part if state == "part" else self._scale.nbytes
        kind = "train" if state == "part" else state
        began = time.monotonic()
        with self._place() as made:
            place = folder or made
            job = Job(measurement, contender, kind, nbytes, self._scale.tensors, place, count, options, interpreter)
            sample = run_job(job)
        _tell(f"  {time.monotonic() - began:5.1f} s  {measurement} {contender}")
        return sample

    @contextmanager
    def _place(self) -> Iterator[Path]:
        """A new folder that goes when it is left."""
        with tempfile.TemporaryDirectory(dir=self._folder) as made:
            yield Path(made)


def _in_turn(names: Sequence[str], turn: int) -> list[str]:
    """All of them, beginning with another one in each round."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _ways_of(contender: str, state: str) -> tuple[str, ...]:
    """Ways to load: all where a goal compares them, else in place, and of the small state only cold."""
    if contender in AFRESH:
        return WAYS
    return WAYS[:1] if state == "small" else WAYS[:2]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
