"""A catalog made anew, or brought up to what storage proves: after a loss, a restored copy, or a copied root.

The order makes it safe to die anywhere. Storage is read first and nothing is changed. Then the next epoch is claimed
on storage: from there on no other catalog, and no older copy of this one, commits or deletes. Then hints. The rows, the
counters, the hold and the catalog's own epoch come last, in one transaction: a catalog that does not have the epoch
which its claim says is refused (``CatalogBehind``), so that half a rebuild is never taken for a whole one.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptfmt.engine import governing, process, protocol
from ckptfmt.engine.keep.evidence import Evidence, gather
from ckptfmt.engine.reports import RebuildReport, RebuiltGeneration, RebuiltRun, SetApart
from ckptfmt.engine.site import Site
from ckptfmt.errors import Conflict
from ckptfmt.format import layout, verdict
from ckptfmt.format.states import State
from ckptfmt.ports.records import CatalogIdentity, RunRecord
from ckptfmt.ports.restoration import Restoration, RestoredRow

log = logging.getLogger("ckptfmt")

LOST_ALWAYS = (
    "what ranks reported: stall and write seconds, retries, errors of failed ranks",
    "generations that were begun and left no verdict on storage",
)
LOST_WITH_THE_FILE = (
    "tags and pins",
    "which tiers there are and what they hold: opening with them and `ckptfmt replicate` find it again",
    "quarantine of generations that can be read",
    "history: events, who saved on which host, when launches and generations began and ended",
    "skipped saves and the last steps that launches reported",
    "why and at which stage a save failed, unless it was swept",
)


@dataclass(frozen=True)
class Order:
    """``how``: ``rebuild`` (a new catalog), ``merge`` (one that is behind) or ``adopt`` (of a copied root)."""

    how: str
    location: governing.Location
    claims: governing.Claims
    new_identity: bool = False
    """The catalog gets another uuid: its file is a copy of one that governs another root."""
    set_aside: str | None = None
    require_idle: bool = True
    """Refuse while a live launch holds a run."""
    blank: bool = False
    """The catalog knows nothing of the repository: all that storage does not hold is lost."""


def rebuild(site: Site, order: Order) -> RebuildReport:
    """Make ``site``'s catalog the one that governs the root, knowing all that storage proves.

    After a crash it is run again. ``Conflict`` while a launch is live, or if somebody else rebuilds at the same time.
    """
    catalog = site.sql()
    if order.require_idle:
        _require_idle(site)
    identity = catalog.identity()
    evidence = gather(site, catalog.states())
    new = CatalogIdentity(
        uuid=str(uuid.uuid4()) if order.new_identity else identity.uuid,
        epoch=max(order.claims.highest, identity.epoch) + 1,
    )
    _claim(site, new, order.location)
    for run_key, key, epoch, seq in evidence.unhinted:
        protocol.create_hint(site, run_key, key, epoch=epoch, seq=seq)
    plan = Restoration(
        expected=identity,
        new=new,
        how=order.how,
        url=site.backend.url,
        runs=tuple(evidence.runs.values()),
        id_max=evidence.id_max,
    )
    rows = catalog.restore(plan)
    report = _report(site, order, new, evidence, rows)
    log.info(
        "%s: the catalog %s was rebuilt from storage and governs from epoch %d on; retention is on hold",
        site.backend.url,
        catalog.url,
        new.epoch,
    )
    return report


def _require_idle(site: Site) -> None:
    for run in site.sql().runs():
        holder = site.sql().live_launch(run.name)
        if holder is not None and not process.is_gone(holder):
            raise Conflict(
                f"run {run.name!r} is held by {holder.host}:{holder.pid} (launch {holder.id}): stop that job before "
                f"the catalog is rebuilt, or wait until its lease has lapsed ({holder.lease_until:%H:%M:%S} UTC)",
                kind="launch_held",
            )


def _claim(site: Site, new: CatalogIdentity, location: governing.Location) -> None:
    claim = verdict.CatalogClaim(repository=site.repository, catalog=new.uuid, epoch=new.epoch, location=location)
    try:
        governing.claim_epoch(site.backend, claim)
    except Conflict as error:
        raise Conflict(
            f"{site.backend.url}: epoch {new.epoch} was claimed by another rebuild a moment ago "
            f"({layout.catalog_claim(new.epoch)}); look at its result with `ckptfmt inspect` before you begin another",
            kind="epoch_claimed",
        ) from error


# -- the report ---------------------------------------------------------------------------------------
def _report(
    site: Site, order: Order, new: CatalogIdentity, evidence: Evidence, rows: Sequence[RestoredRow]
) -> RebuildReport:
    folders = {
        one.key: layout.generation_folder(run.key, one.key) for run in evidence.runs.values() for one in run.generations
    }
    quarantine = {
        one.key: one.quarantine
        for run in evidence.runs.values()
        for one in run.generations
        if one.quarantine is not None
    }
    known = site.sql().states()
    left_out = {folders[row.key]: row.reason for row in rows if row.action == "left_out"} | {
        folder: f"its row stays as it is: {reason}" if folder.rpartition("/")[2] in known else reason
        for folder, reason in evidence.left_out.items()
    }
    quarantined = {
        folders[row.key]: quarantine[row.key] for row in rows if row.state == State.COMMITTED and row.key in quarantine
    }
    changes = [row for row in rows if row.action not in ("known", "left_out")]
    return RebuildReport(
        how=order.how,
        catalog=site.sql().url,
        uuid=new.uuid,
        epoch=new.epoch,
        set_aside=order.set_aside,
        runs=tuple(_run(site, run) for run in site.sql().runs()),
        changes=tuple(
            RebuiltGeneration(row.id, row.run, row.step, row.key, row.state, row.action, row.reason) for row in changes
        ),
        unchanged=sum(row.action == "known" for row in rows),
        quarantined=_apart({folder: reason for folder, reason in quarantined.items() if folder not in left_out}),
        left_out=_apart(left_out),
        unfinished=_apart(
            {folder: why for folder, why in evidence.unfinished.items() if folder.rpartition("/")[2] not in known}
        ),
        lost=LOST_ALWAYS + (LOST_WITH_THE_FILE if order.blank else ()),
    )


def _apart(found: dict[str, str]) -> tuple[SetApart, ...]:
    return tuple(SetApart(folder, reason) for folder, reason in sorted(found.items()))


def _run(site: Site, run: RunRecord) -> RebuiltRun:
    catalog = site.sql()
    states = [row.state for row in catalog.generations(run=run.name)]
    latest = catalog.latest(run.name)
    count: Callable[[State], int] = states.count
    return RebuiltRun(
        run=run.name,
        committed=count(State.COMMITTED),
        retired=count(State.RETIRED),
        aborted=count(State.ABORTED),
        deleted=count(State.DELETED),
        latest=None if latest is None else latest.id,
        next_commit_seq=run.next_commit_seq,
        fence=run.fence,
    )
