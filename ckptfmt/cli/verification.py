"""All bytes of one or more generations against their digests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ckptfmt import overview
from ckptfmt.cli import quantities as q
from ckptfmt.cli.output import Page, style
from ckptfmt.cli.places import Place
from ckptfmt.cli.repository_view import run_names
from ckptfmt.cli.resume import problem_of
from ckptfmt.engine.keep.verify import verify
from ckptfmt.engine.load.resolve import Wanted, open_wanted
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.reports import GenerationInfo, Report, VerifyReport
from ckptfmt.errors import BackendError, FormatError, InvalidInput, NotFound
from ckptfmt.exchange.counting import Phases

PROBLEMS_MAX = 50


@dataclass(frozen=True)
class Verification(Report):
    """What verify found. ``nbytes`` were read and compared, in ``seconds``."""

    report: str
    url: str
    ok: bool
    nbytes: int
    seconds: float
    generations: tuple[VerifyReport, ...]


def verify_place(place: Place, phases: Phases, *, every: bool) -> Verification:
    """Verify what the URL names. One generation that cannot be read does not keep the others from being verified."""
    began = time.perf_counter()
    if place.connection.folder or place.reference.at is not None:
        if every:
            raise InvalidInput("--all verifies a run or a repository: leave it out to verify one generation")
        opened = place.open()
        reports = [_verified(lambda: opened, opened.info, phases)]
    else:
        reports = [_verified(partial(_open, place, info), info, phases) for info in wanted_generations(place, every)]
    return Verification(
        report="verify",
        url=place.url,
        ok=all(report.ok for report in reports),
        nbytes=sum(report.nbytes for report in reports),
        seconds=time.perf_counter() - began,
        generations=tuple(reports),
    )


def wanted_generations(place: Place, every: bool) -> Iterator[GenerationInfo]:
    """Those that a URL without ``@`` names: what a resume of each run would take, or ``every`` committed one."""
    run = place.reference.run
    runs = run_names(place) if run is None else [run]
    if not runs:
        raise NotFound(f"{place.url} has nothing to verify: it has no run yet")
    for name in runs:
        if every:
            yield from overview.generations(place.site, run=name, state="committed", limit=None)
        else:
            yield from _latest(place, name, required=run is not None)


def _latest(place: Place, run: str, *, required: bool) -> Iterator[GenerationInfo]:
    """What a resume would take. A run without commits is passed by, unless it was named."""
    if place.site.catalog is None:
        found = overview.generations(place.site, run=run, state="committed", limit=1)
    else:
        row = place.site.catalog.latest(run)
        found = [] if row is None else [GenerationInfo.of(row)]
    if not found and required:
        open_wanted(place.site, run, Wanted())  # says which of "none" and "none committed" it is
    yield from found


def _open(place: Place, info: GenerationInfo) -> Opened:
    return open_wanted(place.site, info.run, Wanted(id=info.id))


def _verified(opening: Callable[[], Opened], info: GenerationInfo, phases: Phases) -> VerifyReport:
    began = time.perf_counter()
    try:
        opened = opening()
    except (FormatError, NotFound, BackendError) as error:
        seconds = time.perf_counter() - began
        return VerifyReport(info.id, info.run, info.step, 0, 0, seconds, (problem_of(error),))
    with phases(f"#{info.id} step {info.step}") as progress:
        return verify(opened, progress)


def show_verification(page: Page, report: Verification) -> None:
    rows = [
        (
            style("ok", "green") if one.ok else style(q.count(len(one.problems), "problem"), "bold", "red"),
            f"#{one.generation_id}",
            one.run,
            str(one.step),
            q.size(one.nbytes),
            f"{one.chunks:,}",
            q.duration(one.seconds),
            q.rate(one.nbytes, one.seconds),
        )
        for one in report.generations
    ]
    page.table(("", ">ID", "RUN", ">STEP", ">SIZE", ">CHUNKS", ">TIME", ">RATE"), rows)
    _show_tiers(page, report)
    for one in report.generations:
        for problem in one.problems[:PROBLEMS_MAX]:
            page.blank()
            page.line(style(f"generation #{one.generation_id}: {problem.kind}", "red"))
            page.facts(
                [
                    ("tier", problem.tier or ""),
                    ("object", problem.object),
                    ("tensor", problem.tensor or ""),
                    ("offset", "" if problem.offset is None else f"{problem.offset:,}"),
                    ("message", page.paragraph(problem.message)),
                ]
            )
        if len(one.problems) > PROBLEMS_MAX:
            page.line(f"and {len(one.problems) - PROBLEMS_MAX} more problems: --json")
    if not report.ok:
        page.blank()
        broken = [f"#{one.generation_id}" for one in report.generations if not one.ok]
        page.line(f"damaged: {', '.join(broken)}; {_advice(report)}")


def _show_tiers(page: Page, report: Verification) -> None:
    """Which tier holds what, where there are several."""
    rows = [
        (
            style("ok", "green") if not tier.problems else style(q.count(tier.problems, "problem"), "bold", "red"),
            f"#{one.generation_id}",
            tier.role,
            tier.url,
            f"{tier.packs:,}",
            f"{tier.absent:,}",
            f"{tier.repaired:,}",
        )
        for one in report.generations
        for tier in one.tiers
        if len(one.tiers) > 1
    ]
    if rows:
        page.blank()
        page.table(("", ">ID", "TIER", "URL", ">PACKS", ">NOT THERE", ">REPAIRED"), rows)


def _advice(report: Verification) -> str:
    if any(len(one.tiers) > 1 for one in report.generations):
        return "what another tier has whole is read there, and put right by `ckptfmt replicate --repair`"
    return "restore another generation with @id, or put the objects back from a copy"
