"""The training processes of one demo, what they left, and the judgement on it."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ckptfmt
from ckptfmt import GenerationInfo, connect
from ckptfmt.demo.attempt import RUN, Attempt, Setup
from ckptfmt.demo.commands import show_commands
from ckptfmt.demo.comparison import compare
from ckptfmt.demo.corpus import write_corpus
from ckptfmt.demo.journal import losses
from ckptfmt.demo.killer import Kill, Killer
from ckptfmt.demo.report import CommitFigures, DemoReport, Life
from ckptfmt.errors import InvalidInput
from ckptfmt.ports.catalog import Catalog
from ckptfmt.repository import Repository

Echo = Callable[[str], None]
Events = list[dict[str, Any]]
KillRule = Callable[[Attempt], Kill | None]
VERBS = ("ls", "inspect", "verify")


def say(text: str) -> None:
    """Print at once: the demo takes minutes, and may be read through a pipe."""
    print(text, flush=True)


class Trial:
    """Runs training processes one after another. Every method tells what it found through ``echo``."""

    def __init__(self, setup: Setup, repo: Repository, catalog: Catalog, echo: Echo) -> None:
        self.rng = random.Random()  # not seeded: each demo tries other moments
        self.killer = Killer(repo, catalog, self.rng)
        self.catalog = catalog
        self.recovered: set[int] = set()
        """Generations that were finished between two lives."""
        self._setup = setup
        self._repo = repo
        self._echo = echo
        self._began = time.monotonic()
        self._lives: list[tuple[str, Events, Kill | None]] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def last_step(self) -> int:
        """The highest step that any process has finished; -1 before the first."""
        return max((step for _, events, _ in self._lives for step in losses(events)), default=-1)

    def committed(self) -> list[GenerationInfo]:
        """Newest first."""
        return self._repo.generations(run=RUN)

    def uninterrupted(self, steps: int) -> Events:
        """Train without saving anything and return the events: what every other process has to equal."""
        began = time.monotonic()
        events, _ = self._run(Attempt(self._setup, "uninterrupted", steps=steps, saving=False), None)
        values = list(losses(events).values())
        self._echo(
            f"\nUninterrupted, nothing saved: {steps} steps in {time.monotonic() - began:.1f} s, "
            f"loss {float.fromhex(values[0]):.4f} -> {float.fromhex(values[-1]):.4f}"
        )
        return events

    def life(self, steps: int, kill: KillRule | None) -> Kill | None:
        """One saving process, to its end or its kill, which is returned."""
        name = f"life-{len(self._lives) + 1:03}"
        events, hit = self._run(Attempt(self._setup, name, steps=steps), kill)
        beginning = _beginning(events, self._unfinished())
        self._lives.append((name, events, hit))
        self._echo(f"  {name}: {beginning}, {len(losses(events))} steps, {_end(hit)}")
        return hit

    def _unfinished(self) -> int | None:
        """The generation that the last life left for the next one to settle."""
        kill = self._lives[-1][2] if self._lives else None
        return None if kill is None or kill.generation in self.recovered else kill.generation

    @staticmethod
    def _run(attempt: Attempt, kill: KillRule | None) -> tuple[Events, Kill | None]:
        try:
            hit = kill(attempt) if kill else None
            return (attempt.events(), hit) if hit else (attempt.wait(), None)
        finally:
            attempt.discard()

    def judge(self, steps: int, reference: Events) -> DemoReport:
        """Compare everything with the uninterrupted run; raises ``DrillFailed`` on any difference."""
        values = compare(reference, [(name, events) for name, events, _ in self._lives])
        expected = losses(reference)
        report = DemoReport(
            url=self._setup.url,
            steps=steps,
            seconds=self.seconds,
            lives=tuple(Life.of(name, events, expected, kill) for name, events, kill in self._lives),
            first_loss=float.fromhex(expected[0]),
            last_loss=float.fromhex(expected[steps - 1]),
            values=values,
            saves=CommitFigures.of(self.committed()),
        )
        self._tell(report)
        return report

    def _tell(self, report: DemoReport) -> None:
        saves = report.saves
        compared = ", ".join(f"{count} {part}" for part, count in report.values.items())
        self._echo(
            f"\nCompared with the uninterrupted training, bit by bit:\n"
            f"  losses of {report.steps} steps: identical\n"
            f"  digests at the end ({compared}): identical\n"
            f"  kills {report.kills}, of them while writing {report.kills_while_writing}; "
            f"exact resumes {report.exact_resumes} of {report.resumes}; "
            f"loss {report.first_loss:.4f} -> {report.last_loss:.4f}"
        )
        self._echo(
            f"\n{saves.commits} generations of {saves.state_bytes / 1e6:.0f} MB committed: "
            f"stall {saves.stall_seconds * 1e3:.0f} ms (longest {saves.longest_stall_seconds * 1e3:.0f} ms), "
            f"commit after {saves.commit_seconds:.2f} s, {saves.bytes_per_second / 1e6:.0f} MB/s beside the training"
        )

    def show_commands(self) -> None:
        """Let the command line speak about the repository; raises ``DrillFailed`` if a command fails."""
        show_commands([(verb, self._setup.url) for verb in VERBS], self._echo)


@contextmanager
def prepared(setup: Setup, echo: Echo) -> Iterator[Trial]:
    """Write the text and make the repository."""
    text_bytes = write_corpus(setup.corpus)
    catalog, options = setup.catalog, setup.storage_options
    ckptfmt.open(setup.url, catalog=catalog, storage_options=options).close()
    connection = connect.open_site(setup.url, mode="r", catalog=catalog, storage_options=options)
    with Repository(connection, "r") as repo:
        echo(f"A transformer on {text_bytes / 1e3:.0f} kB of this package's own text, in {setup.folder}")
        yield Trial(setup, repo, connection.site.sql(), echo)


@contextmanager
def demo_folder(directory: str | Path | None, *, keep: bool, echo: Echo) -> Iterator[Path]:
    """``directory``, new or empty (else ``InvalidInput``), or a temporary folder that goes unless ``keep``."""
    if directory is None and not keep:
        with tempfile.TemporaryDirectory(prefix="ckptfmt-demo-") as temporary:
            yield Path(temporary)
        return
    folder = Path(directory) if directory is not None else Path(tempfile.mkdtemp(prefix="ckptfmt-demo-"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInput(f"{folder} is not empty: the demo wants a folder of its own, new or empty")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        echo(f"\nEverything stays in {folder}")


def _beginning(events: Events, unfinished: int | None) -> str:
    resumed = next((event for event in events if event["event"] == "resumed"), None)
    if resumed is None:
        return "began at step 0" if events else "did not come to train"
    words = f"generation {resumed['generation']} (step {resumed['step']}) in {resumed['seconds']:.2f} s"
    if unfinished is not None and unfinished == resumed["generation"]:
        return f"found the last save complete, committed it, resumed {words}"
    return f"resumed {words}"


def _end(kill: Kill | None) -> str:
    if kill is None:
        return "came to its end"
    if kill.generation is None:
        return "killed between two saves"
    staged = ", staged" if kill.staged else ""
    return f"killed: generation {kill.generation} (step {kill.step}) was {kill.state}{staged}"
