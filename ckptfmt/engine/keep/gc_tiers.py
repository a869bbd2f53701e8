"""``gc`` on the tiers beside the durable one, in the same order: the tombstone first, bytes after the grace.

What the durable tier's own slot does not say is not done elsewhere either. A tier that cannot be reached is told, and
waits for the next gc; so does one that was not opened.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from ckptfmt.engine import stage, verdicts
from ckptfmt.engine.keep import debris
from ckptfmt.engine.reports import GcItem
from ckptfmt.engine.site import Site
from ckptfmt.engine.survey import RunSurvey, survey
from ckptfmt.engine.sweep import TOMBSTONES, removable
from ckptfmt.engine.tiers import Tier
from ckptfmt.errors import AccessDenied, BackendError, Conflict, FormatError, NotFound
from ckptfmt.format import layout, verdict
from ckptfmt.format.states import OPEN_STATES, State
from ckptfmt.ports.records import GenerationRecord, RunRecord

log = logging.getLogger("ckptfmt")

CLOSED_ON = "replica_tombstone"
"""Kind of the event that says: the tombstone is durable on the tier that the detail names."""

_GONE = (State.ABORTED, State.RETIRED, State.DELETED)


@dataclass
class Findings:
    """What was removed, or would be, and what was not."""

    items: list[GcItem] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def collect(site: Site, runs: Sequence[RunRecord], *, dry_run: bool, grace: timedelta) -> Findings:
    """Remove (or list) what generations that are gone left on the stage of this host and on the replicas."""
    found = Findings()
    open_runs = [run for run in runs if not run.retention_hold]
    for tier in site.tiers.replicas:
        try:
            _collect_replica(site, tier, runs, open_runs, found, dry_run=dry_run, grace=grace)
        except BackendError as error:
            found.waiting.append(f"{tier.name} ({error})")
    if site.tiers.stage is not None:
        try:
            _collect_stage(site, site.tiers.stage, open_runs, found, dry_run=dry_run)
        except BackendError as error:
            found.waiting.append(f"{site.tiers.stage.name} ({error})")
    return found


def close_on_replicas(site: Site, row: GenerationRecord) -> None:
    """Put the tombstone of a retired generation on the replicas as well, as far as they can be reached: gc does the
    rest."""
    for tier in site.tiers.replicas:
        try:
            _close(site, tier, row)
        except (BackendError, Conflict, FormatError, NotFound) as error:
            log.warning("the tombstone of generation %d is not on the %s yet: %s", row.id, tier.name, error)


# -- replicas -------------------------------------------------------------------------------------------
def _collect_replica(
    site: Site,
    tier: Tier,
    runs: Sequence[RunRecord],
    open_runs: Sequence[RunRecord],
    found: Findings,
    *,
    dry_run: bool,
    grace: timedelta,
) -> None:
    there = replace(site, backend=tier.backend)
    leftovers = debris.look(there, runs)
    held = {each.run_key: each for each in survey(tier.backend)}
    for run in open_runs:
        on_tier = held.get(run.key)
        if on_tier is None:
            continue
        for row in site.sql().generations(run=run.name, states=_GONE):
            names = on_tier.folders.get(row.key, {})
            if set(names) - TOMBSTONES:
                try:
                    _collect_generation(site, tier, row, found, dry_run=dry_run, grace=grace)
                except (Conflict, FormatError, NotFound, AccessDenied) as error:
                    found.damaged.append(f"{row.run} #{row.id} on {tier.name}: {error}")
    found.items += [
        replace(item, reason=f"{item.reason}, on {tier.name}")
        for item in debris.sweep(there, leftovers, dry_run=dry_run)
    ]
    found.unknown += _unknown(site, tier, held.values(), runs)


def _collect_generation(
    site: Site, tier: Tier, row: GenerationRecord, found: Findings, *, dry_run: bool, grace: timedelta
) -> None:
    if row.commit_seq is None:
        if not _close_aborted(site, tier, row, dry_run=dry_run):
            return
    else:
        since = _closed_at(site, tier, row)
        if since is None and not dry_run:
            since = _close(site, tier, row)
        if since is None or since + grace > site.sql().database_now():
            due = "the grace begins with its tombstone there" if since is None else f"due {since + grace:%H:%M:%S} UTC"
            found.waiting.append(f"{row.run} #{row.id} on {tier.name} ({due})")
            return
    objects = removable(replace(site, backend=tier.backend), row)
    what = "aborted" if row.commit_seq is None else "retired"
    if not dry_run:
        site.sql().drop_replicas(row.id, tier.uuid)  # first: nobody is to look for what is half gone
        for info in objects:
            tier.backend.delete(info.key)
    found.items += [GcItem(row.id, row.run, info.key, info.nbytes, f"{what}, on {tier.name}") for info in objects]


def _close_aborted(site: Site, tier: Tier, row: GenerationRecord, *, dry_run: bool) -> bool:
    """Put the aborted verdict of the durable tier into the tier's slot. False if there is none yet."""
    folder = verdicts.folder_of(row)
    decided = verdicts.read_commit(site.backend, folder)
    if decided is None or decided.verdict != "aborted" or not verdicts.belongs(decided, site, row):
        return False
    if not dry_run:
        tier.backend.create(f"{folder}/{layout.COMMIT}", verdict.encode_commit(decided))
    return True


def _close(site: Site, tier: Tier, row: GenerationRecord) -> datetime | None:
    """Copy the tombstone, and note when it was durable there. None if the durable tier has none yet."""
    folder = verdicts.folder_of(row)
    stone = verdicts.read_retired(site.backend, folder)
    if stone is None or stone.key != row.key:
        return None
    tier.backend.make_folder(folder)
    tier.backend.create(f"{folder}/{layout.RETIRED}", verdict.encode_retired(stone))
    if _closed_at(site, tier, row) is None:
        site.sql().note(row.run, generation_id=row.id, kind=CLOSED_ON, detail={"tier": tier.uuid})
    return _closed_at(site, tier, row)


def _closed_at(site: Site, tier: Tier, row: GenerationRecord) -> datetime | None:
    """Since when nobody opens it there by proof, by the database's clock; None also where the tombstone is gone, or
    damaged: making it completes a beginning, and tells of anything else."""
    try:
        if verdicts.read_retired(tier.backend, verdicts.folder_of(row)) is None:
            return None
    except FormatError:
        return None
    noted = [
        event.at
        for event in site.sql().events(generation_id=row.id)
        if event.kind == CLOSED_ON and event.detail.get("tier") == tier.uuid
    ]
    return max(noted, default=None)


def _unknown(site: Site, tier: Tier, held: Iterable[RunSurvey], runs: Sequence[RunRecord]) -> list[str]:
    known: Mapping[str, object] = site.sql().states()
    names = {run.key for run in runs}
    return [
        f"{layout.generation_folder(each.run_key, key)} (on {tier.name})"
        for each in held
        for key in each.folders
        if each.run_key not in names or key not in known
    ]


# -- the stage ------------------------------------------------------------------------------------------
def _collect_stage(site: Site, tier: Tier, runs: Sequence[RunRecord], found: Findings, *, dry_run: bool) -> None:
    """What the launch that staged it has not lived to free. Nobody reads there what is gone."""
    held = stage.held(tier)
    states = site.sql().states()  # asked afterwards: what is staged meanwhile has its row before
    names = {run.key: run.name for run in runs}
    for each in held:
        folder = layout.generation_folder(each.run_key, each.key)
        state, _ = states.get(each.key, (None, None))
        if state is None:
            found.unknown.append(f"{folder} (on {tier.name})")
            continue
        if state in OPEN_STATES or state is State.COMMITTED or each.run_key not in names:
            continue
        row = site.sql().generation_by_key(each.key)
        if not dry_run:
            stage.free(tier, each.run_key, each.key, each.names)
        found.items += [
            GcItem(row.id if row else 0, names[each.run_key], f"{folder}/{name}", nbytes, f"{state}, on {tier.name}")
            for name, nbytes in each.names.items()
        ]
