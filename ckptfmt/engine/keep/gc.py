"""``gc``: a plan first, then exactly that plan. Deletes only keys that this catalog holds as aborted or retired."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from ckptfmt.engine import contradictions, governing, verdicts
from ckptfmt.engine.keep import debris
from ckptfmt.engine.keep.recover import adopt, contradicted
from ckptfmt.engine.reports import GcItem, GcReport
from ckptfmt.engine.site import Site
from ckptfmt.engine.sweep import close_retired, closed_at, note_closed, removable, sweep_aborted, sweep_closed
from ckptfmt.errors import Conflict, FormatError, NotFound
from ckptfmt.format import layout
from ckptfmt.format.states import State
from ckptfmt.ports.backend import ObjectInfo
from ckptfmt.ports.records import GenerationRecord, RunRecord

log = logging.getLogger("ckptfmt")

GRACE = timedelta(hours=1)
"""How long bytes stay after the tombstone became durable, for readers that hold no row."""

_CLOSING = (State.RETIRED, State.ABORTED)
_SWEEPABLE = (State.ABORTED, State.RETIRED, State.DELETED)


@dataclass(frozen=True)
class _Due:
    row: GenerationRecord
    objects: tuple[ObjectInfo, ...]
    reason: str
    proven: bool = False
    """Aborted in the catalog, committed on storage: to be adopted, not removed."""
    retired: bool = False
    """Aborted in the catalog, committed and retired on storage: the catalog was put back in between."""


def collect(site: Site, *, dry_run: bool, grace: timedelta = GRACE) -> GcReport:
    """Remove (or with ``dry_run`` list) what aborted and retired generations left on storage.

    ``Conflict`` unless this catalog governs the root, and knows all that storage proves.
    """
    catalog = site.sql()
    governing.require_governing(site)
    contradictions.require_none(site)
    items: list[GcItem] = []
    waiting: list[str] = []
    damaged: list[str] = []
    adopted: list[int] = []
    held: list[str] = []
    runs = catalog.runs()
    leftovers = debris.look(site, runs)
    for run in runs:
        if run.retention_hold:
            held.append(run.name)
            continue
        if not dry_run:
            _close(site, run, damaged)
        now = catalog.database_now()  # after what was closed just now
        for due in _due(site, run, now, grace, waiting, damaged):
            if dry_run:
                items += _items(due, due.objects)
                adopted += [due.row.id] if due.proven else []
                continue
            try:
                removed, repaired = _sweep(site, run, due)
            except (Conflict, NotFound, FormatError) as error:
                damaged.append(f"{run.name} #{due.row.id}: {contradicted(site, error)}")
                continue
            items += _items(due, removed)
            adopted += [due.row.id] if repaired else []
    items += debris.sweep(site, leftovers, dry_run=dry_run)
    unknown = tuple(unknown_folders(site))
    return GcReport(dry_run, tuple(items), unknown, tuple(waiting), tuple(damaged), tuple(adopted), tuple(held))


def _close(site: Site, run: RunRecord, damaged: list[str]) -> None:
    """Make, or note, the tombstones that whoever retired did not live to: their grace begins now."""
    for row in site.sql().generations(run=run.name, states=_CLOSING):
        try:
            if row.state is State.RETIRED:
                close_retired(site, row)
            elif _proven(site, row) and _tombstoned(site, row) and closed_at(site, row) is None:
                note_closed(site, row)
        except FormatError:
            continue  # a damaged verdict is told when it comes to be swept
        except Conflict as error:
            damaged.append(f"{row.run} #{row.id}: its tombstone cannot be made: {error}")


def _due(
    site: Site, run: RunRecord, now: datetime, grace: timedelta, waiting: list[str], damaged: list[str]
) -> list[_Due]:
    due = []
    for row in site.sql().generations(run=run.name, states=_SWEEPABLE):
        try:
            proven = row.state is State.ABORTED and _proven(site, row)
            tombstoned = proven and _tombstoned(site, row)
        except FormatError as error:
            damaged.append(f"{row.run} #{row.id}: {error}")
            continue
        if proven and not tombstoned:
            due.append(_Due(row, (), "storage proves it", proven=True))
            continue
        if row.state is State.RETIRED or tombstoned:
            since = closed_at(site, row)
            if since is None:
                waiting.append(f"{row.run} #{row.id} (the grace begins with its tombstone, which a gc makes)")
                continue
            if since + grace > now:
                waiting.append(f"{row.run} #{row.id} (due {since + grace:%Y-%m-%d %H:%M:%S} UTC)")
                continue
        found = tuple(removable(site, row))
        if found or row.state is not State.DELETED:
            reason = f"{row.state} {row.abort_reason or ''}".strip()
            reason = reason if row.state is not State.DELETED else "appeared after deletion"
            due.append(_Due(row, found, reason, retired=tombstoned))
    return due


def _tombstoned(site: Site, row: GenerationRecord) -> bool:
    return verdicts.is_retired(site.backend, verdicts.folder_of(row), row.key)


def _proven(site: Site, row: GenerationRecord) -> bool:
    found = verdicts.read_commit(site.backend, verdicts.folder_of(row))
    return found is not None and found.verdict == "committed" and verdicts.belongs(found, site, row)


def _sweep(site: Site, run: RunRecord, due: _Due) -> tuple[tuple[ObjectInfo, ...], bool]:
    row = due.row
    if row.state is State.ABORTED and not due.retired:
        swept = sweep_aborted(site, row)
        if swept.adopted:
            log.error(
                "generation %d of run %r was aborted in the catalog but storage proves it: adopting", row.id, run.name
            )
            adopt(site, row, fence=run.fence)
        return swept.objects, swept.adopted
    if row.state is State.RETIRED:
        close_retired(site, row)
    return sweep_closed(site, row).objects, False


def retire(site: Site, generation_id: int) -> GenerationRecord:
    """Take a generation out of the committed ones; its bytes go with a later gc, after the grace.

    ``Conflict`` says which rule protects it: newest proven, pinned, tagged, being read, restored from by a live
    launch, or a run under retention hold; or that this catalog does not govern the root.
    """
    governing.require_governing(site)
    row = site.sql().retire(generation_id)
    close_retired(site, row)
    return row


def unknown_folders(site: Site) -> list[str]:
    """Generation folders that no row of this catalog explains: reported, never deleted."""
    catalog = site.sql()
    known = {run.key for run in catalog.runs()}
    unknown = []
    for run_key in site.backend.list_folders(layout.RUNS):
        if run_key not in known:
            unknown.append(layout.run_folder(run_key))
            continue
        for key in site.backend.list_folders(layout.run_folder(run_key)):
            if key != "commits" and catalog.generation_by_key(key) is None:
                unknown.append(layout.generation_folder(run_key, key))
    return unknown


def _items(due: _Due, objects: tuple[ObjectInfo, ...]) -> list[GcItem]:
    return [GcItem(due.row.id, due.row.run, info.key, info.nbytes, due.reason) for info in objects]
