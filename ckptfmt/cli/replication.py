"""What ``replicate`` found and did: how far tiers are behind, what was copied, what was repaired."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

from ckptfmt import reading
from ckptfmt.cli import exit_codes
from ckptfmt.cli import quantities as q
from ckptfmt.cli.output import Page, style
from ckptfmt.cli.places import Place
from ckptfmt.cli.repository_view import run_names
from ckptfmt.cli.verification import wanted_generations
from ckptfmt.engine import governing
from ckptfmt.engine.keep import repair as repairing
from ckptfmt.engine.keep.lag import TierLag, lag_by_catalog, lag_by_proof
from ckptfmt.engine.keep.repair import RepairItem
from ckptfmt.engine.keep.replicas import replicate
from ckptfmt.engine.limiter import Limiter
from ckptfmt.engine.load.resolve import Wanted, open_wanted
from ckptfmt.engine.opened import Opened, open_row
from ckptfmt.engine.replicate import Pace
from ckptfmt.engine.reports import Report
from ckptfmt.engine.tiers import Tier
from ckptfmt.errors import BackendError, CkptError, FormatError, InvalidInput, NotFound
from ckptfmt.exchange.counting import Phases
from ckptfmt.ports.records import GenerationRecord, LaunchRecord


@dataclass(frozen=True)
class CopiedGeneration(Report):
    """One generation that a replica was to get."""

    generation_id: int
    run: str
    step: int
    url: str
    """Of the replica."""
    nbytes: int
    """That were copied; what was there already only counts as compared."""
    seconds: float
    problem: str | None
    """Why the replica does not hold it whole; null: it does."""
    kind: str | None
    """The problem's code."""


@dataclass(frozen=True)
class Replication(Report):
    """How far tiers are behind, and what was done about it."""

    report: str
    url: str
    read_by: str
    dry_run: bool
    lag: tuple[TierLag, ...]
    """After what was copied; empty with ``--repair``."""
    copied: tuple[CopiedGeneration, ...]
    repairs: tuple[RepairItem, ...]


def replicate_place(
    place: Place, phases: Phases, *, yes: bool, repair: bool, every: bool, bandwidth: int | None
) -> Replication:
    place.require_repository()
    if every and not repair:
        raise InvalidInput("--all belongs to --repair: replicas get every committed generation anyway")
    if yes:
        place.require_catalog("replicate --yes")
        governing.require_governing(place.site)
    limiter = Limiter(bandwidth) if bandwidth is not None else place.site.tiers.limiter
    lag: list[TierLag] = []
    copied: list[CopiedGeneration] = []
    repairs: list[RepairItem] = []
    if repair:
        for opened in _opened(place, every):
            with _guarded(place, opened, yes), phases(f"#{opened.info.id}") as progress:
                repairs += repairing.repair(opened, dry_run=not yes, pace=Pace(limiter=limiter), progress=progress)
    else:
        if place.reference.at is not None:
            raise InvalidInput(f"replicas get whole runs: leave out @{place.reference.at}, or add --repair")
        if yes:
            copied = [done for tier in place.site.tiers.replicas for done in _catch_up(place, tier, limiter, phases)]
        lag = _lag(place)
    return Replication("replicate", place.url, place.read_by, not yes, tuple(lag), tuple(copied), tuple(repairs))


# -- lag --------------------------------------------------------------------------------------------
def _runs(place: Place) -> list[str]:
    run = place.reference.run
    names = run_names(place)
    if run is None:
        return names
    place.require_run(run, names)
    return [run]


def _lag(place: Place) -> list[TierLag]:
    runs = _runs(place)
    if place.site.catalog is None:
        return [one for run in runs for one in lag_by_proof(place.site, run)]
    why = {lost.record.url: lost.why for lost in place.unreachable}
    found = [one for one in lag_by_catalog(place.site, place.reference.run) if one.run in runs]
    return [TierLag(**{**vars(one), "problem": why.get(one.url)}) for one in found]


# -- catching up ------------------------------------------------------------------------------------
def _catch_up(place: Place, tier: Tier, limiter: Limiter | None, phases: Phases) -> Iterator[CopiedGeneration]:
    catalog = place.require_catalog("replicate --yes")
    for run in _runs(place):
        holder = catalog.live_launch(run)
        for row in catalog.unreplicated(run, tier.uuid):
            yield _copied(place, tier, row, holder, limiter, phases)


def _copied(
    place: Place,
    tier: Tier,
    row: GenerationRecord,
    holder: LaunchRecord | None,
    limiter: Limiter | None,
    phases: Phases,
) -> CopiedGeneration:
    began, copied = time.perf_counter(), []
    problem: CkptError | None = None
    if holder is not None and holder.id == row.launch_id:
        why = f"its launch on {holder.host} (pid {holder.pid}) is running, and copies what it saves itself"
        return CopiedGeneration(row.id, row.run, row.step, tier.backend.url, 0, 0.0, why, LAUNCH_LIVE)
    with phases(f"#{row.id} to {tier.backend.url}") as progress:

        def count(nbytes: int) -> None:
            copied.append(nbytes)
            if progress is not None:
                progress(sum(copied), max(sum(copied), row.nbytes or 0))

        try:
            opened = open_row(place.site, row)
            with _guarded(place, opened, True):
                replicate(opened, row, tier, Pace(limiter=limiter, copied=count))
        except (BackendError, FormatError, NotFound) as error:
            problem = error
    return CopiedGeneration(
        generation_id=row.id,
        run=row.run,
        step=row.step,
        url=tier.backend.url,
        nbytes=sum(copied),
        seconds=time.perf_counter() - began,
        problem=None if problem is None else str(problem),
        kind=None if problem is None else problem.kind,
    )


# -- repair -----------------------------------------------------------------------------------------
def _opened(place: Place, every: bool) -> Iterator[Opened]:
    if place.reference.at is not None:
        if every:
            raise InvalidInput("--all repairs a run or a repository: leave it out to repair one generation")
        yield place.open()
        return
    for info in wanted_generations(place, every):
        yield open_wanted(place.site, info.run, Wanted(id=info.id))


def _guarded(place: Place, opened: Opened, yes: bool) -> AbstractContextManager[None]:
    """Registered as its reader while it is copied, so that it is not retired underneath."""
    return reading.guarded(place.connection, opened) if yes else nullcontext()


def exit_code_of(report: Replication) -> int:
    """Whether all that was asked for was done; a plan is no failure, unless something can be had nowhere."""
    if any(item.problem is not None for item in report.repairs):
        return exit_codes.CORRUPT
    failed = (exit_codes.problem_code(one.kind) for one in report.copied if one.kind not in (None, LAUNCH_LIVE))
    return max(failed, default=exit_codes.OK)


LAUNCH_LIVE: Final = "launch_live"
"""Kind of the problem that is none: its launch brings it there."""


# -- pages ------------------------------------------------------------------------------------------
def show_replication(page: Page, report: Replication) -> None:
    if report.copied:
        _show_copied(page, report)
        page.blank()
    if report.repairs:
        _show_repairs(page, report)
    elif report.lag:
        _show_lag(page, report)
    elif report.copied:
        page.line("no replica is behind")
    else:
        page.line("nothing to replicate or to repair")


def _show_lag(page: Page, report: Replication) -> None:
    rows = [
        (
            one.run,
            one.role,
            one.url,
            "" if one.newest_id is None else f"#{one.newest_id}",
            "" if one.held_id is None else f"#{one.held_id}",
            style(f"{one.generations:,}", "yellow") if one.generations else "0",
            "" if one.nbytes is None else q.size(one.nbytes),
            q.duration(one.seconds),
        )
        for one in report.lag
    ]
    page.table(("RUN", "TIER", "URL", ">NEWEST", ">HELD", ">BEHIND", ">BYTES", ">FOR"), rows)
    for one in report.lag:
        if one.problem:
            page.line(style(f"{one.url}: {one.problem}", "red"))
    behind = sum(one.generations for one in report.lag if one.role == "replica")
    if any(one.role == "stage" for one in report.lag):
        page.line("staged is not durable: its launch copies it, and `ckptfmt recover` finishes what a dead one left")
    if not behind:
        page.line("no replica is behind")
    elif report.dry_run:
        page.line(f"{q.count(behind, 'generation')} to copy; ", style("to do it: --yes", "bold"))


def _show_copied(page: Page, report: Replication) -> None:
    rows = [
        (
            style("whole", "green") if one.problem is None else style("left", "red"),
            f"#{one.generation_id}",
            one.run,
            str(one.step),
            one.url,
            q.size(one.nbytes),
            q.duration(one.seconds),
        )
        for one in report.copied
    ]
    page.table(("", ">ID", "RUN", ">STEP", "REPLICA", ">COPIED", ">TIME"), rows)
    for one in report.copied:
        if one.problem is not None:
            page.line(style(f"#{one.generation_id}: {one.problem}", "red"))


def _show_repairs(page: Page, report: Replication) -> None:
    rows = [
        (
            f"#{one.generation_id}",
            one.role,
            one.object if one.written is None else one.written,
            q.size(one.nbytes),
            ", ".join(one.sources) or style("nowhere", "red"),
        )
        for one in report.repairs
    ]
    page.table((">ID", "TIER", "OBJECT" if report.dry_run else "WRITTEN", ">SIZE", "WHOLE ON"), rows)
    for one in report.repairs:
        page.line(f"#{one.generation_id} {one.tier}: ", page.paragraph(one.problem or one.reason))
    count = sum(one.repairable for one in report.repairs)
    if report.dry_run and count:
        page.line(f"would write {q.count(count, 'object')}; ", style("to do it: --yes", "bold"))
    elif count:
        page.line(style(f"repaired {q.count(count, 'object')}", "green"))
