"""``gc``: a plan first, then exactly that plan. Deletes only keys that this catalog holds as aborted or retired."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from ckptfmt.engine import contradictions, governing, verdicts
from ckptfmt.engine.keep import debris, gc_tiers
from ckptfmt.engine.keep.recover import adopt, contradicted
from ckptfmt.engine.reports import GcItem, GcReport
from ckptfmt.engine.site import Site
from ckptfmt.engine.sweep import (
    close_retired,
    closed_at,
    is_torn_abort,
    note_closed,
    removable,
    remove,
    sweep_aborted,
)
from ckptfmt.errors import Conflict, FormatError, NotFound
from ckptfmt.format import layout
from ckptfmt.format.states import State
from ckptfmt.ports.backend import ObjectInfo
from ckptfmt.ports.records import GenerationRecord, RunRecord

log = logging.getLogger("ckptfmt")

GRACE = timedelta(hours=1)
"""How long bytes stay after the tombstone became durable, for readers that hold no row."""

_SWEEPABLE = (State.ABORTED, State.RETIRED, State.DELETED)


@dataclass(frozen=True)
class _Slot:
    """A generation that is not committed in the catalog, and what storage says of it."""

    row: GenerationRecord
    proven: bool = False
    """Aborted in the catalog, committed on storage: to be adopted, not removed, unless it is ``tombstoned``."""
    tombstoned: bool = False
    """It is retired; if aborted in the catalog, the catalog was put back in between."""
    since: datetime | None = None
    """When its tombstone was durable."""

    @property
    def is_open(self) -> bool:
        """Its key is closed by the sweep only."""
        return self.row.state is State.ABORTED and not self.tombstoned


@dataclass(frozen=True)
class _Due:
    slot: _Slot
    objects: tuple[ObjectInfo, ...]
    reason: str

    @property
    def row(self) -> GenerationRecord:
        return self.slot.row


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
        slots = _look(site, run, damaged, dry_run=dry_run)
        now = catalog.database_now()  # after what was closed just now
        for due in _due(site, slots, now, grace, waiting, dry_run=dry_run):
            if dry_run:
                items += _items(due, due.objects)
                adopted += [due.row.id] if due.slot.proven and not due.slot.tombstoned else []
                continue
            try:
                removed, repaired = _sweep(site, run, due)
            except (Conflict, NotFound, FormatError) as error:
                damaged.append(f"{run.name} #{due.row.id}: {contradicted(site, error)}")
                continue
            items += _items(due, removed)
            adopted += [due.row.id] if repaired else []
    items += debris.sweep(site, leftovers, dry_run=dry_run)
    beside = gc_tiers.collect(site, runs, dry_run=dry_run, grace=grace)
    return GcReport(
        dry_run,
        items=(*items, *beside.items),
        unknown=(*unknown_folders(site), *beside.unknown),
        waiting=(*waiting, *beside.waiting),
        damaged=(*damaged, *beside.damaged),
        adopted=tuple(adopted),
        held=tuple(held),
    )


def _look(site: Site, run: RunRecord, damaged: list[str], *, dry_run: bool) -> list[_Slot]:
    """What is in the slot of each generation that is not committed (any more). Unless it is a ``dry_run``: make, or
    note, the tombstones that whoever retired did not live to: their grace begins now."""
    slots = []
    for row in site.sql().generations(run=run.name, states=_SWEEPABLE):
        try:
            slots.append(_slot(site, row, dry_run=dry_run))
        except FormatError as error:
            damaged.append(f"{row.run} #{row.id}: {error}")
        except Conflict as error:
            damaged.append(f"{row.run} #{row.id}: its tombstone cannot be made: {error}")
    return slots


def _slot(site: Site, row: GenerationRecord, *, dry_run: bool) -> _Slot:
    if row.state is State.RETIRED:
        if dry_run:
            return _Slot(row, tombstoned=True, since=closed_at(site, row) if _tombstoned(site, row) else None)
        return _Slot(row, tombstoned=True, since=close_retired(site, row))
    proven = row.state is State.ABORTED and _proven(site, row)
    if not proven or not _tombstoned(site, row):
        return _Slot(row, proven=proven)
    since = closed_at(site, row)
    if since is None and not dry_run:
        since = note_closed(site, row)
    return _Slot(row, proven=True, tombstoned=True, since=since)


def _due(
    site: Site, slots: Iterable[_Slot], now: datetime, grace: timedelta, waiting: list[str], *, dry_run: bool
) -> list[_Due]:
    due = []
    for slot in slots:
        row = slot.row
        if slot.proven and not slot.tombstoned:
            due.append(_Due(slot, (), "storage proves it"))
            continue
        if slot.tombstoned:
            if slot.since is None:
                waiting.append(f"{row.run} #{row.id} (the grace begins with its tombstone, which a gc makes)")
                continue
            if slot.since + grace > now:
                waiting.append(f"{row.run} #{row.id} (due {slot.since + grace:%Y-%m-%d %H:%M:%S} UTC)")
                continue
        # Of an aborted one they are listed anew once its key is closed.
        found = () if slot.is_open and not dry_run else tuple(removable(site, row))
        if found or row.state is not State.DELETED:
            reason = f"{row.state} {row.abort_reason or ''}".strip()
            reason = reason if row.state is not State.DELETED else "appeared after deletion"
            due.append(_Due(slot, found, reason))
    return due


def _tombstoned(site: Site, row: GenerationRecord) -> bool:
    return verdicts.is_retired(site.backend, verdicts.folder_of(row), row.key)


def _proven(site: Site, row: GenerationRecord) -> bool:
    try:
        found = verdicts.read_commit(site.backend, verdicts.folder_of(row))
    except FormatError:
        if is_torn_abort(site, row):
            return False  # closing the key completes it
        raise
    return found is not None and found.verdict == "committed" and verdicts.belongs(found, site, row)


def _sweep(site: Site, run: RunRecord, due: _Due) -> tuple[tuple[ObjectInfo, ...], bool]:
    row = due.row
    if due.slot.is_open:
        swept = sweep_aborted(site, row)
        if swept.adopted:
            log.error(
                "generation %d of run %r was aborted in the catalog but storage proves it: adopting", row.id, run.name
            )
            adopt(site, row, fence=run.fence)
        return swept.objects, swept.adopted
    return remove(site, row, due.objects), False


def retire(site: Site, generation_id: int) -> GenerationRecord:
    """Take a generation out of the committed ones; its bytes go with a later gc, after the grace.

    ``Conflict`` says which rule protects it: newest proven, pinned, tagged, being read, restored from by a live
    launch, or a run under retention hold; or that this catalog does not govern the root.
    """
    governing.require_governing(site)
    row = site.sql().retire(generation_id)
    close_retired(site, row)
    gc_tiers.close_on_replicas(site, row)
    return row


def unknown_folders(site: Site) -> list[str]:
    """Generation folders that no row of this catalog explains: reported, never deleted."""
    folders = {
        run_key: site.backend.list_folders(layout.run_folder(run_key))
        for run_key in site.backend.list_folders(layout.RUNS)
    }
    # Asked afterwards: the row of a folder that others make meanwhile is there before the folder.
    known, keys = {run.key for run in site.sql().runs()}, site.sql().states()
    unknown = []
    for run_key, members in folders.items():
        if run_key not in known:
            unknown.append(layout.run_folder(run_key))
            continue
        unknown += [layout.generation_folder(run_key, key) for key in members if key != "commits" and key not in keys]
    return unknown


def _items(due: _Due, objects: tuple[ObjectInfo, ...]) -> list[GcItem]:
    return [GcItem(due.row.id, due.row.run, info.key, info.nbytes, due.reason) for info in objects]
