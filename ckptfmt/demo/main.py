"""Train, kill, resume, compare, inspect: what ``ckptfmt demo`` calls."""

from __future__ import annotations

from pathlib import Path

from ckptfmt.demo.attempt import Attempt, Setup, Start, start_process
from ckptfmt.demo.killer import Kill
from ckptfmt.demo.report import DemoReport
from ckptfmt.demo.trial import Echo, demo_folder, prepared, say
from ckptfmt.errors import DrillFailed


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
    start: Start = start_process,
    echo: Echo = say,
) -> DemoReport:
    """Train ``steps`` steps uninterrupted, then again with saves and ``kills`` SIGKILLs, and compare.

    Every kill hits a generation that is ``writing``. ``directory`` must be new or empty and stays;
    without it a temporary folder is used and removed, unless ``keep``. ``size`` is ``"full"`` (a
    state of 225 MB), ``"medium"`` (102 MB) or ``"small"`` (25 MB). ``commands`` runs ``ckptfmt ls``, ``inspect`` and
    ``verify`` on the result.

    Raises ``DrillFailed`` if a loss or a digest differs, or the training ended before it was killed
    ``kills`` times; ``InvalidInput`` if the directory holds something.
    """
    with demo_folder(directory, keep=keep, echo=echo) as folder:
        setup = Setup(folder=folder, size=size, seed=seed, every=every, start=start)
        with prepared(setup, echo) as trial:
            reference = trial.uninterrupted(steps)
            echo(f"\nThe same training, saved every {every} steps, killed while a generation is `writing`:")
            for number in range(1, kills + 1):
                if not trial.life(steps, trial.killer.kill_while_writing):
                    raise DrillFailed(
                        f"the training ended before kill {number} of {kills}; ask for more steps than {steps}"
                    )
            trial.life(steps, None)
            report = trial.judge(steps, reference)
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
    start: Start = start_process,
    echo: Echo = say,
) -> DemoReport:
    """Kill a saving training at random for ``seconds``, let it end, and compare it with an uninterrupted one.

    Two kills of three are aimed at a generation that is ``writing``, the others fall where they fall.
    Arguments and errors are those of ``run_demo``.
    """
    endless = 10**9
    with demo_folder(directory, keep=keep, echo=echo) as folder:
        setup = Setup(folder=folder, size=size, seed=seed, every=every, start=start)
        with prepared(setup, echo) as trial:

            def kill_any_time(attempt: Attempt) -> Kill | None:
                return trial.killer.kill_any_time(attempt, within_seconds=5.0)

            echo(f"\nTraining, saved every {every} steps, killed at random for {seconds:g} s:")
            while trial.seconds < seconds:
                aimed = trial.rng.random() < 2 / 3
                trial.life(endless, trial.killer.kill_while_writing if aimed else kill_any_time)
            steps = trial.last_step + 1 + every
            trial.life(steps, None)
            return trial.judge(steps, trial.uninterrupted(steps))
