"""Settle what earlier launches left: finish what is complete, abort the rest, adopt what storage proves.

Called by a takeover before it restores, and by ``recover``. Idempotent: a second call finds nothing to do.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptfmt.engine import process, protocol, verdicts
from ckptfmt.engine.keep import absentees
from ckptfmt.engine.keep.resume import can_finish_staged, finish_staged, free_aborted
from ckptfmt.engine.leases import Lease
from ckptfmt.engine.opened import open_proven, read_manifest
from ckptfmt.engine.reports import RecoverAction, RecoverReport
from ckptfmt.engine.site import Site
from ckptfmt.engine.sweep import close_retired, is_closed
from ckptfmt.errors import (
    AccessDenied,
    BackendError,
    CatalogBehind,
    CkptError,
    Conflict,
    Fenced,
    FormatError,
    Mismatch,
    NotFound,
    OutOfSpace,
    SaveFailed,
)
from ckptfmt.format import verdict
from ckptfmt.format.states import State
from ckptfmt.ports.records import AdoptFacts, GenerationRecord, LaunchRecord

log = logging.getLogger("ckptfmt")

Acquire = Callable[[str, str], LaunchRecord]
"""(run, token) -> the run's lease, without waiting for a live holder (``Conflict`` then)."""

_UNFINISHED = (State.WRITING, State.DURABLE)
_SETTLE_SECONDS = 60.0
_DURABLE = "every rank's data was durable"
_STAGED = "every rank's data was durable, or is finished from the stage"
_PENDING = "its proof is pending: storage or the catalog kept refusing it; the next recover tries again"
_RETIRED = (
    "storage says that it was committed as number {found.commit_seq} of epoch {found.epoch}, and retired since: the "
    "catalog was put back from a copy; `ckptfmt db rebuild --merge` writes that down"
)


def recover(site: Site, run: str | None, *, dry_run: bool, acquire: Acquire) -> RecoverReport:
    """Recover one run, or every run. Only finishes proofs while a live launch holds the run."""
    actions: list[RecoverAction] = []
    for record in site.sql().runs():
        if run is not None and record.name != run:
            continue
        actions += prove_committed(site, record.name, dry_run=dry_run)
        actions += close_retired_late(site, record.name, dry_run=dry_run)
        actions += _settle_run(site, record.name, dry_run=dry_run, acquire=acquire)
    return RecoverReport(dry_run, tuple(actions))


def _settle_run(site: Site, run: str, *, dry_run: bool, acquire: Acquire) -> list[RecoverAction]:
    catalog = site.sql()
    rows = _in_order(catalog.generations(run=run, states=_UNFINISHED))
    if not rows:
        return []
    if dry_run:
        holder = catalog.live_launch(run)
        if holder is not None and not process.is_gone(holder):
            return [_action(row, "left", _held_by(holder)) for row in rows]
        return [_plan(site, row) for row in rows]
    try:
        launch = acquire(run, secrets.token_hex(16))
    except Conflict as held:
        holder = catalog.live_launch(run)
        return [_action(row, "left", str(held) if holder is None else _held_by(holder)) for row in rows]
    lease = Lease(catalog, launch)
    try:
        return settle_older(site, run, lease)
    finally:
        lease.close()


def _held_by(holder: LaunchRecord) -> str:
    return (
        f"{holder.host}:{holder.pid} holds the run (launch {holder.id}, lease until {holder.lease_until:%H:%M:%S} UTC) "
        "and settles it; where that job is gone, recover again once its lease has lapsed"
    )


def settle_older(site: Site, run: str, lease: Lease) -> list[RecoverAction]:
    """Settle every ``writing`` or ``durable`` row of launches with a lower fence, oldest first.

    ``Fenced`` once a newer launch has the run.
    """
    rows = [row for row in site.sql().generations(run=run, states=_UNFINISHED) if row.fence < lease.launch.fence]
    return [settle(site, row, lease) for row in _in_order(rows)]


def _in_order(rows: Sequence[GenerationRecord]) -> list[GenerationRecord]:
    """By launch and save number: two saves that were in flight together may have begun in either order."""
    return sorted(rows, key=lambda row: (row.fence, row.save_number))


def settle(site: Site, row: GenerationRecord, lease: Lease) -> RecoverAction:
    """Bring one unfinished row of a fenced launch to its verdict.

    One that storage contradicts is passed over, and told: it must not keep every later launch out.
    """
    try:
        lease.check()
        return _settle(site, row, lease)
    except (Conflict, NotFound, FormatError) as error:
        lease.confirm()  # a newer launch may have settled it meanwhile, which is no contradiction
        return _action(row, "left", contradicted(site, error))


def contradicted(site: Site, error: CkptError) -> str:
    """What to say of a generation where catalog and storage cannot be brought together, and is passed over.

    Raises ``error`` where that is not so: somebody else has the run, or governs the root.
    """
    told = _contradiction(site, error)
    log.error("passed over: %s", told)
    return told


def _contradiction(site: Site, error: CkptError) -> str:
    if isinstance(error, Fenced | CatalogBehind):
        raise error
    return f"{error}; see what `ckptfmt db rebuild --merge {site.backend.url}` says of it"


def _settle(site: Site, row: GenerationRecord, lease: Lease) -> RecoverAction:
    fence = lease.launch.fence
    adopted = _adopt_if_proven(site, row, fence)
    if adopted is not None:
        return adopted
    try:
        resumed = row.state is State.WRITING and finish_staged(site, row, lease.check)
        finished = _finish(site, row, fence)
    except (NotFound, FormatError, Mismatch, SaveFailed, BackendError) as error:
        if not _shows_incomplete(error):
            raise
        site.sql().abort(row.id, stage="recover", rank=None, reason=f"incomplete: {error}"[:1000], fence=fence)
        log.warning("generation %d of run %r (step %d) aborted: %s", row.id, row.run, row.step, error)
        free_aborted(site, row)
        return _action(row, "aborted", str(error))
    log.warning("generation %d of run %r (step %d) was complete and is now committed", row.id, row.run, row.step)
    reason = _STAGED if resumed else _DURABLE
    return _action(finished, "committed", reason if finished.proven_at is not None else f"{reason}; {_PENDING}")


def _shows_incomplete(error: Exception) -> bool:
    """Whether the bytes are not there. Storage that is away, forbidden or full says nothing about them."""
    return not isinstance(error, BackendError) or not (error.transient or isinstance(error, AccessDenied | OutOfSpace))


def _finish(site: Site, row: GenerationRecord, fence: int) -> GenerationRecord:
    """C3 to C5 for a generation whose ranks were all durable. Raises what shows that it is incomplete."""
    until = time.monotonic() + _SETTLE_SECONDS
    protocol.repeat(lambda: _check_complete(site, row), until=until)
    if row.state is State.WRITING:
        parent = protocol.parent_of(site, row)
        protocol.repeat(lambda: protocol.merge(site, row, parent=parent, fence=fence), until=until)
    return protocol.prove(site, protocol.commit(site, row, fence=fence, until=until))


def _check_complete(site: Site, row: GenerationRecord) -> None:
    """Raise what shows that the generation cannot be finished. Changes nothing."""
    if row.state is State.DURABLE:
        _check_whole(site, row)
        return
    ranks = site.sql().ranks(row.id)
    unready = [rank for rank in ranks if rank.state != "durable"]
    if unready or not ranks:
        told = absentees.told_of(site, row, unready)
        raise SaveFailed(told, stage="recover", key=row.key, generation_id=row.id)
    protocol.merged_manifest(site, row, parent=protocol.parent_of(site, row))


def _check_whole(site: Site, row: GenerationRecord) -> None:
    """The manifest with equal digest, and every pack with its length."""
    if row.manifest_name is None or row.manifest_digest is None:
        raise NotFound(f"generation {row.id} is {row.state} without a manifest")
    folder = verdicts.folder_of(row)
    manifest = read_manifest(site, folder, row.manifest_name, row.manifest_digest, row.key)
    protocol.check_packs(site, folder, manifest)


def _adopt_if_proven(site: Site, row: GenerationRecord, fence: int) -> RecoverAction | None:
    """A verdict that is on storage already decides: committed is adopted, aborted aborts the row."""
    try:
        found = verdicts.read_commit(site.backend, verdicts.folder_of(row))
    except FormatError as error:
        # Nobody can read it as a commit, and it must not block every later launch. gc leaves it where it is.
        reason = f"its verdict on storage is damaged: {error}"
        site.sql().abort(row.id, stage="recover", rank=None, reason=reason[:1000], fence=fence)
        return _action(row, "aborted", reason)
    if found is None or not verdicts.belongs(found, site, row):
        return None
    if found.verdict == "aborted":
        site.sql().abort(row.id, stage="recover", rank=None, reason=found.reason or "aborted", fence=fence)
        return _action(row, "aborted", "storage holds an aborted verdict")
    if verdicts.is_retired(site.backend, verdicts.folder_of(row), row.key):
        reason = _RETIRED.format(found=found)
        site.sql().abort(row.id, stage="recover", rank=None, reason=reason, fence=fence)
        log.error("generation %d of run %r (step %d) aborted in the catalog: %s", row.id, row.run, row.step, reason)
        return _action(row, "aborted", reason)
    adopt(site, row, fence=fence)
    return _action(row, "adopted", "storage proves that it was committed")


def adopt(site: Site, row: GenerationRecord, *, fence: int) -> GenerationRecord:
    """Repair a row whose storage holds a valid committed verdict."""
    folder = verdicts.folder_of(row)
    found = verdicts.read_commit(site.backend, folder)
    if found is None:
        raise NotFound(f"{site.backend.url}/{folder} holds no committed verdict")
    facts = _facts(site, row, found)
    _require_free_number(site, row, found)
    # The row will say that it is proven, so nobody would make the hint after a crash in between.
    protocol.create_hint(site, row.run_key, row.key, epoch=facts.epoch, seq=facts.commit_seq)
    return protocol.prove(site, site.sql().adopt(row.id, facts, fence=fence))


def _require_free_number(site: Site, row: GenerationRecord, found: verdict.Commit) -> None:
    """As the catalog's ``adopt`` would, but nothing is tried: a dry run says the same."""
    for other in site.sql().generations(run=row.run):
        if other.id != row.id and (other.epoch, other.commit_seq) == (found.epoch, found.commit_seq):
            raise Conflict(
                f"the verdict on generation {row.id} has commit_seq {found.commit_seq} of epoch {found.epoch}, which "
                f"belongs to generation {other.id}: the repository was written under two catalogs",
                kind="commit_seq_taken",
            )


def _facts(site: Site, row: GenerationRecord, found: verdict.Commit) -> AdoptFacts:
    """What a committed verdict and its manifest tell. Raises what shows that the generation cannot be read."""
    folder = verdicts.folder_of(row)
    if found.manifest is None or found.commit_seq is None:
        raise NotFound(f"{site.backend.url}/{folder} holds no committed verdict")
    opened = open_proven(site, folder, found)
    ref = found.manifest
    if opened.info.committed_at is None:
        raise FormatError(f"{site.backend.url}/{folder}: a committed verdict without a time")
    durable = protocol.durable_facts(opened.manifest, row.key, ref.name, ref.digest, ref.bytes)
    return AdoptFacts(
        commit_seq=found.commit_seq,
        committed_at=opened.info.committed_at,
        commit_fence=found.fence,
        epoch=found.epoch,
        durable=replace(durable, tiers=verdict.tiers_of(found)),
    )


def prove_committed(site: Site, run: str, *, dry_run: bool) -> list[RecoverAction]:
    """Finish C5 of committed rows. Anyone may: after reading the manifest with equal digest and seeing every pack."""
    actions = []
    for row in site.sql().unproven(run):
        try:
            _check_whole(site, row)
            foretold = _plan_proof(site, row)
        except (NotFound, FormatError, BackendError) as error:
            foretold = _action(row, "left", f"cannot be proved: {error}")
        if foretold.action == "left":
            log.error("generation %d of run %r is committed, but %s", row.id, run, foretold.reason)
        actions.append(foretold if dry_run or foretold.action == "left" else _proved(site, row, foretold))
    return actions


def _proved(site: Site, row: GenerationRecord, foretold: RecoverAction) -> RecoverAction:
    try:
        proved = protocol.prove(site, row)
    except Conflict as error:  # its verdict came since
        return _action(row, "left", contradicted(site, error))
    return foretold if proved.proven_at is not None else _action(row, "left", _PENDING)


def close_retired_late(site: Site, run: str, *, dry_run: bool) -> list[RecoverAction]:
    """Make the tombstones that whoever retired did not live to make: catalog and storage say the same again."""
    actions = []
    for row in site.sql().generations(run=run, states=[State.RETIRED]):
        if is_closed(site, row):
            continue
        if not dry_run:
            close_retired(site, row)
        actions.append(_action(row, "closed", "it is retired, and its tombstone was missing"))
    return actions


# -- a dry run ------------------------------------------------------------------------------------------
def _plan_proof(site: Site, row: GenerationRecord) -> RecoverAction:
    """What ``protocol.prove`` would come to: another object in the slot stays there."""
    found = verdicts.read_commit(site.backend, verdicts.folder_of(row))
    if found is None:
        return _action(row, "proved", "COMMIT.json was missing")
    if found == verdicts.commit_of(site, row):
        return _action(row, "proved", "COMMIT.json was there, and not noted in the catalog")
    disproof = protocol.disproof(site, row, found)
    return _action(row, "left", f"cannot be proved: {disproof or 'another verdict is in its place'}")


def _plan(site: Site, row: GenerationRecord) -> RecoverAction:
    """What ``settle`` would do, without doing it."""
    try:
        return _planned(site, row)
    except (Conflict, NotFound, FormatError) as error:
        return _action(row, "left", _contradiction(site, error))


def _planned(site: Site, row: GenerationRecord) -> RecoverAction:
    try:
        found = verdicts.read_commit(site.backend, verdicts.folder_of(row))
    except FormatError as error:
        return _action(row, "aborted", f"its verdict on storage is damaged: {error}")
    if found is not None and verdicts.belongs(found, site, row):
        return _plan_for(site, row, found)
    try:
        if row.state is State.WRITING and can_finish_staged(site, row):
            return _action(row, "committed", _STAGED)
        _check_complete(site, row)
    except (NotFound, FormatError, Mismatch, SaveFailed, BackendError) as error:
        if not _shows_incomplete(error):
            raise
        return _action(row, "aborted", str(error))
    return _action(row, "committed", _DURABLE)


def _plan_for(site: Site, row: GenerationRecord, found: verdict.Commit) -> RecoverAction:
    if found.verdict != "committed":
        return _action(row, "aborted", "storage holds an aborted verdict")
    if verdicts.is_retired(site.backend, verdicts.folder_of(row), row.key):
        return _action(row, "aborted", _RETIRED.format(found=found))
    _facts(site, row, found)
    _require_free_number(site, row, found)
    return _action(row, "adopted", "storage proves that it was committed")


def _action(row: GenerationRecord, action: str, reason: str) -> RecoverAction:
    return RecoverAction(row.id, row.run, row.step, action, reason)
