"""What ``gc`` and ``recover`` did, or would do."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfmt.cli import quantities as q
from ckptfmt.cli.output import Page, style
from ckptfmt.cli.places import Place
from ckptfmt.engine.keep.gc import collect
from ckptfmt.engine.keep.recover import recover
from ckptfmt.engine.reports import GcItem, GcReport, RecoverReport, Report
from ckptfmt.engine.save.launch import acquire
from ckptfmt.errors import InvalidInput
from ckptfmt.ports.records import LaunchRecord


@dataclass(frozen=True)
class Collected(Report):
    """``GcReport`` of a repository, and its sum."""

    report: str
    url: str
    nbytes: int
    """Bytes of all items."""
    gc: GcReport


@dataclass(frozen=True)
class Recovered(Report):
    """``RecoverReport`` of a repository or run."""

    report: str
    url: str
    run: str | None
    recover: RecoverReport


def collect_garbage(place: Place, *, dry_run: bool) -> Collected:
    place.require_catalog("gc")
    if place.reference.run is not None:
        raise InvalidInput(f"gc works on a whole repository: leave out #{place.reference.run}")
    found = collect(place.site, dry_run=dry_run)
    return Collected("gc", place.url, found.nbytes, found)


def recover_runs(place: Place, run: str | None, *, dry_run: bool) -> Recovered:
    catalog = place.require_catalog("recover")
    named = place.reference.run
    if run is not None and named is not None and run != named:
        raise InvalidInput(f"the URL names run {named!r} but --run {run!r} was given: give one of them")
    if place.reference.at is not None:
        raise InvalidInput(f"recover works on whole runs: leave out @{place.reference.at}")
    wanted = run or named
    if wanted is not None:
        place.require_run(wanted, [record.name for record in catalog.runs()])

    def lease(name: str, token: str) -> LaunchRecord:
        return acquire(catalog, name, token=token, takeover=False, kind="recover", wait=False)

    report = recover(place.site, wanted, dry_run=dry_run, acquire=lease)
    return Recovered("recover", place.url, wanted, report)


# -- pages ------------------------------------------------------------------------------------------
def show_collected(page: Page, report: Collected) -> None:
    found = report.gc
    rows = [
        (
            f"#{item.generation_id}" if item.generation_id else "",
            item.run,
            item.object,
            q.size(item.nbytes),
            item.reason,
        )
        for item in found.items
    ]
    if rows:
        page.table((">ID", "RUN", "OBJECT", ">SIZE", "WHY"), rows)
    _show_beside(page, found)
    total = f"{q.count(len(rows), 'object')}, {q.size(report.nbytes)}"
    if not rows:
        page.line("nothing to remove")
    elif found.dry_run:
        page.line(f"would remove {total}{_generations(found.items)}; ", style("to do it: --yes", "bold"))
    else:
        page.line(style(f"removed {total}{_generations(found.items)}", "green"))


def _generations(items: tuple[GcItem, ...]) -> str:
    """Of how many generations; leftovers of creates are of none."""
    ids = {item.generation_id for item in items} - {0}
    return f" of {q.count(len(ids), 'generation')}" if ids else ""


def _show_beside(page: Page, found: GcReport) -> None:
    for text in found.waiting:
        page.line(f"waiting: {text}")
    for text in found.damaged:
        page.line(style(f"left alone: {text}", "red"))
    for run in found.held:
        page.line(style(f"on hold: run {run} after a repair of the catalog; see `ckptfmt db hold`", "yellow"))
    for generation_id in found.adopted:
        page.line(style(f"adopted: #{generation_id} was proved committed on storage; kept", "yellow"))
    for folder in found.unknown:
        page.line(style(f"unknown: {folder} belongs to no generation of this catalog; left alone", "yellow"))


_ACTION_STYLES = {
    "proved": "green",
    "committed": "green",
    "adopted": "green",
    "aborted": "red",
    "closed": "dim",
    "left": "yellow",
}


def show_recovered(page: Page, report: Recovered) -> None:
    actions = report.recover.actions
    if not actions:
        page.line("nothing to recover")
        return
    rows = [
        (
            f"#{one.generation_id}",
            one.run,
            str(one.step),
            style(one.action, _ACTION_STYLES.get(one.action, "dim")),
            one.reason,
        )
        for one in actions
    ]
    page.table((">ID", "RUN", ">STEP", "WOULD BE" if report.recover.dry_run else "ACTION", "WHY"), rows)
