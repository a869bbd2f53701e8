"""What storage proves, put into rows: the catalog's half of a rebuild, one transaction.

Rows go through the same transitions as ever, under the same triggers. Nothing that is there is lowered or taken away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from ckptfmt.catalog import generations, packs, runs
from ckptfmt.catalog.queries import generations as queries
from ckptfmt.catalog.queries import identity, launches
from ckptfmt.catalog.queries import runs as run_queries
from ckptfmt.catalog.transaction import Transaction, lock_run, move, record
from ckptfmt.errors import Conflict
from ckptfmt.format import layout
from ckptfmt.format.states import INITIAL, OPEN_STATES, State
from ckptfmt.ports.records import AdoptFacts, GenerationRecord, RunRecord
from ckptfmt.ports.restoration import Action, ProvenGeneration, ProvenRun, Restoration, RestoredRow

IDS_LEFT_FREE: Final = 1_000
"""Ids of generations that may have been begun, and left no trace on storage."""
FENCES_LEFT_FREE: Final = 1_000_000
"""Launches leave no trace unless they commit: a job that crashes every ten seconds needs four months for as many."""

_TOKEN = "restored:"


def restore(tx: Transaction, plan: Restoration) -> list[RestoredRow]:
    """See the port."""
    found = identity.locked(tx.session)
    if found != plan.expected:
        raise Conflict(
            f"the catalog {tx.url} is {found.uuid} (epoch {found.epoch}) now, no longer {plan.expected.uuid} (epoch "
            f"{plan.expected.epoch}): another rebuild was quicker; look at its result with `ckptfmt inspect`",
            kind="rebuilt_meanwhile",
        )
    # First, for a verdict of an epoch that the catalog has not reached is refused.
    tx.update("catalog_meta", "id = 1", {"uuid": plan.new.uuid, "epoch": plan.new.epoch})
    proven = {run.name: run for run in plan.runs}
    for name, one in proven.items():
        runs.ensure(tx, name, one.key)
    rows = []
    for known in run_queries.every(tx.session, tx.repository_id):
        run = lock_run(tx, known.id)
        seen = proven.get(run.name)
        rows += _generations(tx, run, seen.generations) if seen is not None else []
        _lift_and_hold(tx, run, seen, plan)
    before = _rebuilds_before(plan)
    tx.session.lift_ids("generations", plan.id_max + before * IDS_LEFT_FREE, IDS_LEFT_FREE)
    tx.session.lift_ids("launches", before * FENCES_LEFT_FREE, FENCES_LEFT_FREE)
    return rows


def _rebuilds_before(plan: Restoration) -> int:
    """Each of them lifted the counters, maybe in a catalog that is lost, and nothing on storage need tell it."""
    return max(plan.new.epoch - 2, 0)


def _lift_and_hold(tx: Transaction, run: RunRecord, seen: ProvenRun | None, plan: Restoration) -> None:
    """No launch from before may go on, and nothing is retired until somebody has looked."""
    now = tx.now()
    seen_before = (seen.fence_max if seen else 0) + _rebuilds_before(plan) * FENCES_LEFT_FREE
    fence = max(run.fence, seen_before) + FENCES_LEFT_FREE
    following = max(lock_run(tx, run.id).next_commit_seq, (seen.commit_seq_max if seen else 0) + 1)
    lifted = {"fence": fence, "next_commit_seq": following, "retention_hold": True}
    tx.update("runs", "id = :run", lifted, run=run.id)
    unclosed = "run_id = :run AND closed_at IS NULL AND lease_until > :now"
    tx.update("launches", unclosed, {"lease_until": now}, run=run.id, now=now)
    detail = {"how": plan.how, "epoch": plan.new.epoch, "fence": fence, "next_commit_seq": following}
    record(tx, run.id, "rebuild", detail=detail)


def _generations(tx: Transaction, run: RunRecord, found: Iterable[ProvenGeneration]) -> list[RestoredRow]:
    # In the order of commits, so that a place in it that is claimed twice goes to the same one every time.
    ordered = sorted(found, key=_order)
    known = [queries.by_key(tx.session, tx.repository_id, one.key) for one in ordered]
    absent = [one for one, row in zip(ordered, known, strict=True) if row is None]
    launch_ids = _launches(tx, run, absent)
    return [
        _absent(tx, run, one, launch_ids) if row is None else _known(tx, run, row, one)
        for one, row in zip(ordered, known, strict=True)
    ]


def _order(one: ProvenGeneration) -> tuple[int, int, int, str]:
    # Of two with one place in the order, the one under the higher fence: the run went on from there.
    return one.epoch, one.adoption.commit_seq if one.adoption else 0, -one.fence, one.key


# -- a generation that the catalog does not know -------------------------------------------------------
def _absent(tx: Transaction, run: RunRecord, one: ProvenGeneration, launch_ids: Mapping[str, int]) -> RestoredRow:
    reason = _taken(tx, run, one)
    if reason is not None:
        return _leave_out(tx, run, one, reason)
    traced = one.launch is not None and one.save_number is not None
    tx.insert(
        "generations",
        id=one.id,
        repository_id=tx.repository_id,
        run_id=run.id,
        launch_id=launch_ids[one.launch if one.launch is not None and traced else "unknown"],
        save_number=one.save_number if traced else one.id,
        key=one.key,
        step=one.step,
        state=INITIAL,
        fence=one.fence,
        world_size=one.world_size,
        epoch=one.epoch,
        created_at=one.created_at or (one.adoption.committed_at if one.adoption else tx.now()),
    )
    row = queries.by_id(tx.session, tx.repository_id, one.id)
    row = _committed(tx, run, row, one.adoption, one) if one.adoption is not None else _aborted(tx, run, row, one)
    return _told(row, "restored", one.quarantine or one.aborted or "")


def _taken(tx: Transaction, run: RunRecord, one: ProvenGeneration) -> str | None:
    for (key,) in tx.session.rows("SELECT key FROM generations WHERE id = :id", id=one.id):
        return f"its id {one.id} belongs to generation {key} as well: the root was written under two catalogs"
    return _seq_taken(tx, run, one)


def _seq_taken(tx: Transaction, run: RunRecord, one: ProvenGeneration) -> str | None:
    other = generations.holder_of_seq(tx, run, one.adoption) if one.adoption is not None else None
    if other is None or one.adoption is None:
        return None
    return (
        f"its commit_seq {one.adoption.commit_seq} of epoch {one.epoch} belongs to generation {other} as well: the "
        "root was written under two catalogs"
    )


def _leave_out(tx: Transaction, run: RunRecord, one: ProvenGeneration, reason: str) -> RestoredRow:
    """Remembered, so that this verdict is not taken for news each time."""
    record(tx, run.id, "left_out", detail={"key": one.key, "id": one.id, "reason": reason})
    state = State.COMMITTED if one.adoption is not None else State.ABORTED
    return RestoredRow(run.name, one.key, one.id, one.step, state, "left_out", reason)


def _committed(
    tx: Transaction, run: RunRecord, row: GenerationRecord, facts: AdoptFacts, one: ProvenGeneration
) -> GenerationRecord:
    generations.move_adopted(tx, run, row, facts, fence=None)
    packs.restore(tx, row, facts.durable.packs)
    row = queries.by_id(tx.session, tx.repository_id, row.id)
    if one.retired_at is not None:
        return _retired(tx, run, row, one)
    if one.quarantine is not None and row.quarantined_at is None:
        marked = {"quarantined_at": tx.now(), "quarantine_reason": one.quarantine}
        tx.update("generations", "id = :id", marked, id=row.id)
        record(tx, run.id, "quarantine", generation_id=row.id, detail={"reason": one.quarantine})
    return queries.by_id(tx.session, tx.repository_id, row.id)


def _retired(tx: Transaction, run: RunRecord, row: GenerationRecord, one: ProvenGeneration) -> GenerationRecord:
    """Storage has its tombstone. The time must be the tombstone's, which gc makes again from the row."""
    move(tx, run, row, "retire", {"retired_at": one.retired_at or tx.now()}, {"restored": True})
    return _swept(tx, run, row, one)


def _aborted(tx: Transaction, run: RunRecord, row: GenerationRecord, one: ProvenGeneration) -> GenerationRecord:
    reason = one.aborted or "aborted"
    values = {"aborted_at": tx.now(), "abort_stage": "rebuild", "abort_rank": None, "abort_reason": reason}
    move(tx, run, row, "abort", values, {"stage": "rebuild", "reason": reason, "restored": True})
    return _swept(tx, run, row, one)


def _swept(tx: Transaction, run: RunRecord, row: GenerationRecord, one: ProvenGeneration) -> GenerationRecord:
    row = queries.by_id(tx.session, tx.repository_id, row.id)
    if one.swept:
        move(tx, run, row, "delete", {"swept_at": tx.now()}, {"restored": True})
    return queries.by_id(tx.session, tx.repository_id, row.id)


# -- a generation that the catalog knows ----------------------------------------------------------------
def _known(tx: Transaction, run: RunRecord, row: GenerationRecord, one: ProvenGeneration) -> RestoredRow:
    committed = one.aborted is None
    if committed and row.commit_seq is None:
        if one.adoption is None or row.state is State.DELETED:
            return _leave_out(tx, run, one, f"the catalog has it as {row.state}, storage as committed")
        reason = _seq_taken(tx, run, one)
        if reason is not None:
            if row.state in OPEN_STATES:  # else no launch could ever settle it
                _aborted(tx, run, row, replace(one, aborted=reason, swept=False))
            return _leave_out(tx, run, one, reason)
        row = _committed(tx, run, row, one.adoption, one)
        if row.state is State.COMMITTED:
            generations.give_tags(tx, run, row)
        return _told(row, "adopted", one.quarantine or "")
    if not committed and row.state in OPEN_STATES:
        return _told(_aborted(tx, run, row, replace(one, swept=False)), "aborted", one.aborted or "")
    if row.state is State.COMMITTED and (one.retired_at is not None or not committed):
        # Whichever closed it: its bytes may go at any time, so nobody may open it.
        return _told(_retired(tx, run, row, replace(one, swept=False)), "retired", one.aborted or "")
    return _told(row, "known", "")


def _told(row: GenerationRecord, action: Action, reason: str) -> RestoredRow:
    return RestoredRow(row.run, row.key, row.id, row.step, row.state, action, reason)


# -- launches -------------------------------------------------------------------------------------------
def _launches(tx: Transaction, run: RunRecord, absent: Iterable[ProvenGeneration]) -> dict[str, int]:
    """Ids of the launches that began these generations, by digest of their tokens; made where there is none.

    Storage tells under which fence a generation was committed: its launch's own, or that of a successor which finished
    it. So a launch gets the highest fence that is free and not above those.
    """
    known = launches.every(tx.session, tx.repository_id, run.name)
    ids = {_digest(launch.token): launch.id for launch in known}
    wanted: dict[str, list[ProvenGeneration]] = {}
    for one in absent:
        name = one.launch if one.launch is not None and one.save_number is not None else "unknown"
        if name not in ids:
            wanted.setdefault(name, []).append(one)
    taken = {launch.fence for launch in known} | {0}
    fences = {name: min(one.fence for one in members) for name, members in wanted.items()}
    for name in sorted(wanted, key=lambda name: (-fences[name], name)):
        fence = 0 if name == "unknown" else fences[name]
        while fence in taken and name != "unknown":
            fence -= 1
        taken.add(fence)
        ids[name] = _insert_launch(tx, run, name, fence, max(one.world_size for one in wanted[name]))
    return ids


def _digest(token: str) -> str:
    return token.removeprefix(_TOKEN) if token.startswith(_TOKEN) else layout.launch_digest(token)


def _insert_launch(tx: Transaction, run: RunRecord, digest: str, fence: int, world_size: int) -> int:
    now = tx.now()
    return tx.insert_new(
        "launches",
        run_id=run.id,
        token=f"{_TOKEN}{digest}",
        kind="training",
        fence=fence,
        host="unknown",
        pid=0,
        boot_id="",
        pid_started="",
        world_size=world_size,
        lease_until=now,
        created_at=now,
        closed_at=now,
    )
