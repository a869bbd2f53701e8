"""``ckptfmt db rebuild``, ``adopt`` and ``hold``: what they print."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptfmt.cli import quantities as q
from ckptfmt.cli.output import Page, emit, style
from ckptfmt.cli.places import Place
from ckptfmt.cli.repair import How, repair_catalog
from ckptfmt.engine.reports import RebuildReport, Report, SetApart
from ckptfmt.errors import InvalidInput
from ckptfmt.reference import parse_reference

_SHOWN_MAX = 20


@dataclass(frozen=True)
class Rebuilt(Report):
    """``RebuildReport`` of a repository."""

    report: str
    url: str
    rebuild: RebuildReport


@dataclass(frozen=True)
class RunHold(Report):
    run: str
    held: bool
    """Nothing of it is retired or removed until the hold is cleared."""


@dataclass(frozen=True)
class Holds(Report):
    """The retention holds of a repository; with ``cleared`` after they were taken away."""

    report: str
    url: str
    cleared: bool
    runs: tuple[RunHold, ...]


def rebuild(url: str, catalog: str | None, how: How, as_json: bool) -> int:
    reference = parse_reference(url)
    if reference.run is not None:
        raise InvalidInput(f"a catalog is rebuilt for a whole repository: leave out #{reference.run}")
    found = repair_catalog(reference.url, how=how, catalog=catalog)
    report = Rebuilt("db.adopt" if how == "adopt" else "db.rebuild", reference.url, found)
    emit(report, lambda page: show_rebuilt(page, report), as_json=as_json)
    return 0


def show_rebuilt(page: Page, report: Rebuilt) -> None:
    found = report.rebuild
    page.line(style(f"{found.catalog} governs {report.url} from epoch {found.epoch} on", "green"))
    if found.set_aside is not None:
        page.line(f"the damaged database was kept as {found.set_aside}")
    if found.runs:
        page.table(
            ("RUN", ">COMMITTED", ">RETIRED", ">ABORTED", ">DELETED", ">LATEST"),
            [
                (
                    run.run,
                    *map(str, (run.committed, run.retired, run.aborted, run.deleted)),
                    "-" if run.latest is None else f"#{run.latest}",
                )
                for run in found.runs
            ],
        )
    by_action: dict[str, int] = {}
    for one in found.changes:
        by_action[one.action] = by_action.get(one.action, 0) + 1
    told = [f"{count} {action}" for action, count in by_action.items()] + [f"{found.unchanged} as they were"]
    page.line(f"generations: {', '.join(told)}")
    _show_apart(page, "quarantined", found.quarantined, "yellow")
    _show_apart(page, "left out", found.left_out, "red")
    _show_apart(page, "no verdict", found.unfinished, "yellow")
    page.line("storage does not hold, so it is lost:")
    for line in found.lost:
        page.line(f"  {line}")
    page.line(
        "retention is on hold: nothing is retired or removed before ",
        style(f"ckptfmt db hold --clear {report.url}", "bold"),
    )


def _show_apart(page: Page, what: str, members: Iterable[SetApart], colour: str) -> None:
    listed = list(members)
    for one in listed[:_SHOWN_MAX]:
        page.line(style(f"{what}: {one.folder}: {one.reason}", colour))
    if len(listed) > _SHOWN_MAX:
        page.line(f"{what}: {q.count(len(listed) - _SHOWN_MAX, 'more folder')}; --json lists all")


def hold(place: Place, *, clear: bool, as_json: bool) -> int:
    """Show which runs are under retention hold, or clear it."""
    catalog, wanted = place.require_catalog("db hold"), place.reference.run
    names = [run.name for run in catalog.runs()]
    if wanted is not None:
        place.require_run(wanted, names)
        names = [wanted]
    if clear:
        for name in names:
            catalog.set_retention_hold(name, False)
    runs = tuple(RunHold(run.name, run.retention_hold) for run in catalog.runs() if run.name in names)
    report = Holds("db.hold", place.url, clear, runs)
    emit(report, lambda page: _show_holds(page, report), as_json=as_json)
    return 0


def _show_holds(page: Page, report: Holds) -> None:
    if report.runs:
        rows = [(one.run, style("on hold", "yellow") if one.held else style("free", "green")) for one in report.runs]
        page.table(("RUN", "RETENTION"), rows)
    else:
        page.line("no run yet")
    if any(one.held for one in report.runs):
        page.line("nothing of a run on hold is retired or removed; to clear it: ", style("--clear", "bold"))
