"""A whole repository, or one run of it, on one screen."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ckptfmt import overview
from ckptfmt.cli import quantities as q
from ckptfmt.cli.history import HistoryItem, history_table, items
from ckptfmt.cli.listing import generation_table
from ckptfmt.cli.output import Page, style
from ckptfmt.cli.places import Place
from ckptfmt.cli.run_view import RunView, run_view, show_run
from ckptfmt.engine.load.resolve import proven_runs
from ckptfmt.engine.reports import GenerationInfo, Report
from ckptfmt.format.states import State
from ckptfmt.format.verdict import VERSION

SCREEN_LINES = 40
GENERATIONS = 12
EVENTS = 12


@dataclass(frozen=True)
class CatalogView(Report):
    """The catalog that was read. ``url`` is for display: without a password."""

    url: str
    uuid: str
    epoch: int


@dataclass(frozen=True)
class RepositoryView(Report):
    """All runs of a repository, each with what a resume would take."""

    report: str
    url: str
    repository: str
    format_version: int
    read_by: str
    catalog: CatalogView | None
    runs: tuple[RunView, ...]


@dataclass(frozen=True)
class RunDetails(Report):
    """One run, with its newest generations and the end of its history."""

    report: str
    url: str
    repository: str
    read_by: str
    run: RunView
    generations: tuple[GenerationInfo, ...]
    """The newest ones in every state, by id."""
    history: tuple[HistoryItem, ...]
    """The newest events, oldest first."""


def repository_view(place: Place) -> RepositoryView:
    return RepositoryView(
        report="repository",
        url=place.url,
        repository=place.site.repository,
        format_version=VERSION,
        read_by=place.read_by,
        catalog=_catalog(place),
        runs=tuple(run_view(place, name) for name in run_names(place)),
    )


def run_names(place: Place) -> list[str]:
    if place.site.catalog is None:
        return proven_runs(place.site)
    return [record.name for record in place.site.catalog.runs()]


def _catalog(place: Place) -> CatalogView | None:
    if place.site.catalog is None:
        return None
    identity = place.site.catalog.identity()
    return CatalogView(place.site.catalog.url, identity.uuid, identity.epoch)


def run_details(place: Place, run: str) -> RunDetails:
    names = run_names(place)
    place.require_run(run, names)
    newest = overview.generations(place.site, run=run, state="committed", limit=GENERATIONS)
    if place.site.catalog is not None:
        newest = sorted([*newest, *_uncommitted(place, run)], key=lambda info: -info.id)[:GENERATIONS]
    events = [] if place.site.catalog is None else place.site.catalog.events(run=run, limit=EVENTS)
    return RunDetails(
        report="run",
        url=place.url,
        repository=place.site.repository,
        read_by=place.read_by,
        run=run_view(place, run),
        generations=tuple(newest),
        history=items(events),
    )


def _uncommitted(place: Place, run: str) -> list[GenerationInfo]:
    states = [state for state in State if state is not State.COMMITTED]
    return [GenerationInfo.of(row) for row in place.site.sql().generations(run=run, states=states, limit=GENERATIONS)]


# -- pages ------------------------------------------------------------------------------------------
def show_repository(page: Page, view: RepositoryView, now: datetime) -> None:
    page.line(style(view.url, "bold"), style(f"  repository {view.repository}, format {view.format_version}", "dim"))
    page.line(style(_read_by_text(view), "dim"))
    if not view.runs:
        page.blank()
        page.line("no runs yet: nothing was ever saved here")
    elif len(view.runs) == 1:
        page.blank()
        show_run(page, view.runs[0], now, by_catalog=view.catalog is not None, passed_over=5, entries=14)
    else:
        _show_many(page, view, now)


def _show_many(page: Page, view: RepositoryView, now: datetime) -> None:
    """A few lines for each run; those that do not fit the screen are counted."""
    fitting = (SCREEN_LINES - 8) // 3
    rows = []
    for run in view.runs[:fitting]:
        info = run.resume.generation
        holds = "" if run.contents is None else _holds(run)
        newer = len(run.resume.passed_over)
        note = style("cannot be read", "red") if run.resume.problem else holds
        rows.append(
            (
                style(run.name, "bold"),
                style("nothing", "yellow") if info is None else f"#{info.id}",
                q.ABSENT if info is None else str(info.step),
                q.ABSENT if info is None else q.age(info.committed_at, now),
                q.ABSENT if info is None else q.size(info.nbytes),
                str(newer or q.ABSENT),
                q.ABSENT if run.holder is None else style(f"{run.holder.host}:{run.holder.pid}", "yellow"),
                note,
            )
        )
    page.blank()
    page.line(f"{q.count(len(view.runs), 'run')}; what a resume takes from each, its newest commit:")
    page.table(("RUN", ">RESUMES", ">STEP", ">COMMITTED", ">SIZE", ">NEWER", "HELD BY", "HOLDS"), rows, indent=2)
    if len(view.runs) > fitting:
        page.line(style(f"  and {len(view.runs) - fitting} more runs: ckptfmt ls {view.url}", "dim"))
    passed = [(run.name, one) for run in view.runs for one in run.resume.passed_over]
    if passed:
        page.blank()
        page.line("Newer ones that are not taken:")
        page.facts((name, f"#{one.id} step {one.step} is {one.state}: {one.reason}") for name, one in passed[:fitting])
    page.blank()
    page.line(style(f"One run in full: ckptfmt inspect {view.url}#{view.runs[0].name}", "dim"))


def _holds(run: RunView) -> str:
    if run.contents is None:
        return ""
    return ", ".join(entry.name for entry in run.contents.entries)


def _read_by_text(view: RepositoryView) -> str:
    if view.catalog is None:
        return "read by proof, without a catalog: only committed generations can be told"
    return f"catalog {view.catalog.url}, epoch {view.catalog.epoch}"


def show_details(page: Page, view: RunDetails, now: datetime) -> None:
    page.line(style(view.url, "bold"), style(f"  repository {view.repository}, read by {view.read_by}", "dim"))
    page.blank()
    show_run(page, view.run, now, by_catalog=view.read_by == "catalog", passed_over=10)
    if view.generations:
        page.blank()
        page.heading("Newest generations")
        generation_table(page, view.generations, now, indent=2)
    if view.history:
        page.blank()
        page.heading("Last events")
        history_table(page, view.history)
