"""Train, kill, resume, compare, inspect. ``ckptfmt demo`` and ``python -m ckptfmt.demo`` call this."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ckptfmt
from ckptfmt.demo.attempt import RUN, Attempt, Setup
from ckptfmt.demo.comparison import compare
from ckptfmt.demo.corpus import write_corpus
from ckptfmt.demo.journal import losses
from ckptfmt.demo.killer import Kill, Killer
from ckptfmt.demo.report import DemoReport, Life, SaveFigures
from ckptfmt.errors import DrillFailed, InvalidInput

Echo = Callable[[str], None]


def run_demo(
    directory: str | Path | None = None,
    *,
    kills: int = 3,
    steps: int = 60,
    every: int = 5,
    size: str = "full",
    seed: int = 1,
    keep: bool = False,
    commands: bool = True,
    echo: Echo = print,
) -> DemoReport:
    """Train ``steps`` steps uninterrupted, then again with saves and ``kills`` SIGKILLs, and compare.

    Every kill hits a generation that is ``writing``. ``directory`` must be new or empty and stays;
    without it a temporary folder is used and removed, unless ``keep``. ``size`` is ``"full"`` (a
    state of 224 MB) or ``"small"`` (26 MB). ``commands`` runs ``ckptfmt ls``, ``inspect`` and
    ``verify`` on the result.

    Raises ``DrillFailed`` if a loss or a digest differs, or the training ended before it was killed
    ``kills`` times; ``InvalidInput`` if the directory holds something.
    """
    began = time.monotonic()
    with _prepared(directory, keep=keep, size=size, every=every, seed=seed, echo=echo) as trial:
        reference = trial.uninterrupted(steps)
        echo(f"\nThe same training, saved every {every} steps, killed while a generation is `writing`:")
        for number in range(1, kills + 1):
            if not trial.life(steps, trial.killer.kill_while_writing):
                raise DrillFailed(
                    f"the training ended before kill {number} of {kills}; ask for more steps than {steps}"
                )
        trial.life(steps, None)
        report = trial.judge(steps, reference, began)
        if commands:
            trial.show_commands()
        return report


def run_chaos(
    seconds: float,
    directory: str | Path | None = None,
    *,
    every: int = 3,
    size: str = "full",
    seed: int = 1,
    keep: bool = False,
    echo: Echo = print,
) -> DemoReport:
    """Kill a saving training at random for ``seconds``, let it end, and compare it with an uninterrupted one.

    Two kills of three are aimed at a generation that is ``writing``, the others fall where they fall.
    Arguments and errors are those of ``run_demo``.
    """
    began = time.monotonic()
    with _prepared(directory, keep=keep, size=size, every=every, seed=seed, echo=echo) as trial:
        echo(f"\nTraining, saved every {every} steps, killed at random for {seconds:g} s:")
        endless = 10**9
        while time.monotonic() - began < seconds:
            aimed = trial.rng.random() < 2 / 3
            trial.life(endless, trial.killer.kill_while_writing if aimed else trial.kill_any_time)
        steps = 1 + every + max((step for _, events, _ in trial.lives for step in losses(events)), default=0)
        trial.life(steps, None)
        reference = trial.uninterrupted(steps)
        return trial.judge(steps, reference, began)


class _Trial:
    """The training processes of one demo, and what they left."""

    def __init__(self, setup: Setup, repo: ckptfmt.Repository, echo: Echo) -> None:
        self.setup = setup
        self.echo = echo
        self.rng = random.Random()  # not seeded: each demo tries other moments
        self.killer = Killer(repo, self.rng)
        self.lives: list[tuple[str, list[dict[str, object]], Kill | None]] = []
        self._repo = repo

    def uninterrupted(self, steps: int) -> list[dict[str, object]]:
        began = time.monotonic()
        events = self._run(Attempt(self.setup, "uninterrupted", steps=steps, saving=False), None)[0]
        values = list(losses(events).values())
        self.echo(
            f"\nUninterrupted, nothing saved: {steps} steps in {time.monotonic() - began:.1f} s, "
            f"loss {float.fromhex(values[0]):.4f} -> {float.fromhex(values[-1]):.4f}"
        )
        return events

    def life(self, steps: int, kill: Callable[[Attempt], Kill | None] | None) -> bool:
        """One process. True if it was killed."""
        name = f"life-{len(self.lives) + 1:03}"
        events, hit = self._run(Attempt(self.setup, name, steps=steps), kill)
        self.lives.append((name, events, hit))
        self.echo(f"  {name}: {_beginning(events)}, {len(losses(events))} steps, {_end(hit)}")
        return hit is not None

    def kill_any_time(self, attempt: Attempt) -> Kill | None:
        return self.killer.kill_any_time(attempt, within_seconds=5.0)

    def _run(
        self, attempt: Attempt, kill: Callable[[Attempt], Kill | None] | None
    ) -> tuple[list[dict[str, object]], Kill | None]:
        try:
            hit = kill(attempt) if kill else None
            return (attempt.events(), hit) if hit else (attempt.wait(), None)
        finally:
            attempt.discard()

    def judge(self, steps: int, reference: list[dict[str, object]], began: float) -> DemoReport:
        values = compare(reference, [(name, events) for name, events, _ in self.lives])
        expected = losses(reference)
        report = DemoReport(
            url=self.setup.url,
            steps=steps,
            seconds=time.monotonic() - began,
            lives=tuple(Life.of(name, events, expected, kill) for name, events, kill in self.lives),
            first_loss=float.fromhex(expected[0]),
            last_loss=float.fromhex(expected[steps - 1]),
            values=values,
            saves=SaveFigures.of(self._repo.generations(run=RUN)),
        )
        self._tell(report)
        return report

    def _tell(self, report: DemoReport) -> None:
        saves = report.saves
        compared = ", ".join(f"{count} {part}" for part, count in report.values.items())
        self.echo(
            f"\nCompared with the uninterrupted training, bit by bit:\n  losses of {report.steps} steps: identical"
        )
        self.echo(f"  digests at the end ({compared}): identical")
        self.echo(
            f"  kills {report.kills}, of them while writing {report.kills_while_writing}; "
            f"exact resumes {report.exact_resumes} of {report.resumes}; "
            f"loss {report.first_loss:.4f} -> {report.last_loss:.4f}"
        )
        self.echo(
            f"\n{saves.commits} generations of {saves.state_bytes / 1e6:.0f} MB committed: "
            f"stall {saves.stall_seconds * 1e3:.0f} ms (longest {saves.longest_stall_seconds * 1e3:.0f} ms), "
            f"commit after {saves.commit_seconds:.2f} s, {saves.bytes_per_second / 1e6:.0f} MB/s beside the training"
        )

    def show_commands(self) -> None:
        for verb in ("ls", "inspect", "verify"):
            self.echo(f"\n$ ckptfmt {verb} {self.setup.url}")
            done = subprocess.run(
                [sys.executable, "-m", "ckptfmt.cli.main", verb, self.setup.url], capture_output=True, text=True
            )
            self.echo((done.stdout + done.stderr).rstrip())
            if done.returncode:
                raise DrillFailed(f"`ckptfmt {verb} {self.setup.url}` ended with code {done.returncode}")


@contextmanager
def _prepared(
    directory: str | Path | None, *, keep: bool, size: str, every: int, seed: int, echo: Echo
) -> Iterator[_Trial]:
    with _folder(directory, keep=keep) as folder:
        setup = Setup(folder=folder, size=size, seed=seed, every=every)
        text_bytes = write_corpus(setup.corpus)
        ckptfmt.open(setup.url).close()
        with ckptfmt.open(setup.url, mode="r") as repo:
            echo(f"A transformer on {text_bytes / 1e3:.0f} kB of this package's own text, in {folder}")
            yield _Trial(setup, repo, echo)
        if directory is not None or keep:
            echo(f"\nThe repository stays in {setup.url}")


@contextmanager
def _folder(directory: str | Path | None, *, keep: bool) -> Iterator[Path]:
    if directory is None and not keep:
        with tempfile.TemporaryDirectory(prefix="ckptfmt-demo-") as temporary:
            yield Path(temporary)
        return
    if directory is None:
        yield Path(tempfile.mkdtemp(prefix="ckptfmt-demo-"))
        return
    folder = Path(directory)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInput(f"{folder} is not empty: the demo wants a folder of its own, new or empty")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def _beginning(events: list[dict[str, object]]) -> str:
    resumed = next((event for event in events if event["event"] == "resumed"), None)
    if resumed is None:
        return "began at step 0" if events else "did not come to train"
    return f"resumed generation {resumed['generation']} (step {resumed['step']}) in {resumed['seconds']:.2f} s"


def _end(kill: Kill | None) -> str:
    if kill is None:
        return "came to its end"
    if kill.generation is None:
        return "killed between two saves"
    return f"killed: generation {kill.generation} (step {kill.step}) was {kill.state}"
