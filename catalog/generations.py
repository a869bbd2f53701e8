"""The verdict on a generation: durable (C3), committed (C4), proven (C5), aborted, adopted."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, select, update

from ckptfmt.catalog import packs, retention
from ckptfmt.catalog.queries import generations as queries
from ckptfmt.catalog.schema import generations, ranks, runs, saves
from ckptfmt.catalog.transaction import Transaction, actor, lock_generation, move, record
from ckptfmt.errors import CatalogBehind, Conflict, InvalidInput
from ckptfmt.format.states import OPEN_STATES, State
from ckptfmt.ports.catalog import AdoptFacts, DurableFacts, GenerationRecord


def mark_durable(tx: Transaction, generation_id: int, facts: DurableFacts, *, fence: int) -> GenerationRecord:
    """C3: ``writing -> durable`` with the manifest's facts."""
    _, row = lock_generation(tx, generation_id, fence=fence)
    if row.state != State.WRITING:
        _require_same_manifest(row, facts)
        return queries.by_id(tx.snapshot, tx.repository_id, generation_id)
    _require_ranks_durable(tx, row)
    _require_lower_saves_settled(tx, row)
    move(tx, row, "durable", {"durable_at": tx.now(), **_manifest(facts)}, {"manifest": facts.manifest_name})
    packs.refer(tx, row, facts.packs)
    return queries.by_id(tx.snapshot, tx.repository_id, generation_id)


def commit(tx: Transaction, generation_id: int, *, fence: int) -> GenerationRecord:
    """C4, the commit point: ``commit_seq`` comes from the run's row under its lock."""
    run, row = lock_generation(tx, generation_id, fence=fence)
    if row.commit_seq is None:
        if row.state != State.DURABLE:
            raise _not_committable(row)
        seq = run.next_commit_seq
        tx.connection.execute(update(runs).where(runs.c.id == run.id).values(next_commit_seq=seq + 1))
        values = {"commit_seq": seq, "epoch": tx.epoch(), "commit_fence": fence, "committed_at": tx.now()}
        move(tx, row, "commit", values, {"commit_seq": seq, "epoch": values["epoch"], "fence": fence})
        _give_tags(tx, row)
    return queries.by_id(tx.snapshot, tx.repository_id, generation_id)


def set_proven(tx: Transaction, generation_id: int) -> GenerationRecord:
    """C5: COMMIT.json is durable."""
    _, row = lock_generation(tx, generation_id)
    if row.commit_seq is None:
        raise Conflict(f"generation {generation_id} is {row.state}, not committed: there is nothing to prove")
    if row.proven_at is None:
        tx.connection.execute(update(generations).where(generations.c.id == row.id).values(proven_at=tx.now()))
        record(tx, row.run_id, "prove", generation_id=row.id)
    return queries.by_id(tx.snapshot, tx.repository_id, generation_id)


def abort(
    tx: Transaction, generation_id: int, *, stage: str, rank: int | None, reason: str, fence: int | None
) -> GenerationRecord:
    """``writing|durable -> aborted``; the first reason is kept."""
    if not stage or not reason:
        raise InvalidInput(f"abort of generation {generation_id} needs a stage and a reason")
    _, row = lock_generation(tx, generation_id, fence=fence)
    if row.commit_seq is not None:
        raise Conflict(
            f"generation {generation_id} is {row.state} with commit_seq {row.commit_seq}: it can no longer be "
            "aborted; treat the save as committed",
            kind="already_committed",
        )
    if row.state in OPEN_STATES:
        now = tx.now()
        if fence is None and (row.deadline is None or now < row.deadline):
            limit = "has no deadline" if row.deadline is None else f"has until {row.deadline.isoformat()}"
            raise Conflict(
                f"generation {generation_id} {limit}: only the launch that owns the run may abort it now",
                kind="before_deadline",
            )
        values = {"aborted_at": now, "abort_stage": stage, "abort_rank": rank, "abort_reason": reason}
        move(tx, row, "abort", values, {"stage": stage, "rank": rank, "reason": reason, "fence": fence})
    return queries.by_id(tx.snapshot, tx.repository_id, generation_id)


def adopt(tx: Transaction, generation_id: int, facts: AdoptFacts, *, fence: int) -> GenerationRecord:
    """Repair: commit on the evidence of a verdict found on storage, exactly as it says."""
    run, row = lock_generation(tx, generation_id, fence=fence)
    if row.commit_seq is not None:
        _require_same_verdict(row, facts)
        return queries.by_id(tx.snapshot, tx.repository_id, generation_id)
    if row.state == State.DELETED:
        raise Conflict(f"generation {generation_id} was aborted and its objects are deleted: it cannot be adopted")
    if facts.epoch > tx.epoch():
        raise CatalogBehind(
            f"the verdict on generation {row.key} is of epoch {facts.epoch}, this catalog is of epoch {tx.epoch()}: "
            "another catalog governs the repository"
        )
    _require_free_seq(tx, row, facts)
    if run.next_commit_seq <= facts.commit_seq:
        tx.connection.execute(update(runs).where(runs.c.id == run.id).values(next_commit_seq=facts.commit_seq + 1))
    now = tx.now()
    values = {
        **_manifest(facts.durable),
        "epoch": facts.epoch,
        "commit_seq": facts.commit_seq,
        "committed_at": facts.committed_at,
        "commit_fence": facts.commit_fence,
        "durable_at": row.durable_at or now,
        # The verdict is the proof: COMMIT.json was found.
        "proven_at": now,
        "adopted_at": now,
        "adopted_by": actor(),
    }
    move(tx, row, "adopt", values, {"commit_seq": facts.commit_seq, "epoch": facts.epoch, "fence": fence})
    packs.refer(tx, row, facts.durable.packs)
    _give_tags(tx, row)
    return queries.by_id(tx.snapshot, tx.repository_id, generation_id)


def _manifest(facts: DurableFacts) -> dict[str, Any]:
    return {
        "manifest_name": facts.manifest_name,
        "manifest_digest": facts.manifest_digest,
        "manifest_bytes": facts.manifest_bytes,
        "nbytes": facts.nbytes,
        "parent_key": facts.parent_key,
    }


def _require_same_manifest(row: Row[Any], facts: DurableFacts) -> None:
    if row.state == State.ABORTED or (row.commit_seq is None and row.state == State.DELETED):
        raise Conflict(
            f"generation {row.id} was aborted at stage {row.abort_stage} ({row.abort_reason}): save again",
            kind="aborted",
        )
    _require_equal(row, _manifest(facts))


def _require_same_verdict(row: Row[Any], facts: AdoptFacts) -> None:
    verdict = {
        "epoch": facts.epoch,
        "commit_seq": facts.commit_seq,
        "committed_at": facts.committed_at,
        "commit_fence": facts.commit_fence,
    }
    _require_equal(row, {**verdict, **_manifest(facts.durable)})


def _require_equal(row: Row[Any], facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        recorded = row._mapping[name]
        if recorded != value:
            raise Conflict(
                f"generation {row.id} is {row.state} with {name} {recorded}, not {value}: "
                "two processes act on the same save",
                kind="facts_differ",
            )


def _require_ranks_durable(tx: Transaction, row: Row[Any]) -> None:
    waiting = tx.connection.execute(
        select(ranks.c.rank, ranks.c.state)
        .where(ranks.c.generation_id == row.id, ranks.c.state != "durable")
        .order_by(ranks.c.rank)
    ).all()
    if waiting:
        names = ", ".join(f"{rank} ({state})" for rank, state in waiting[:8])
        raise Conflict(f"generation {row.id} waits for ranks {names}: it is not durable yet", kind="ranks_missing")


def _require_lower_saves_settled(tx: Transaction, row: Row[Any]) -> None:
    lower = tx.connection.execute(
        select(generations.c.id, generations.c.save_number, generations.c.state)
        .where(
            generations.c.launch_id == row.launch_id,
            generations.c.save_number < row.save_number,
            generations.c.state.in_(sorted(OPEN_STATES)),
        )
        .order_by(generations.c.save_number)
        .limit(1)
    ).one_or_none()
    if lower is not None:
        raise Conflict(
            f"generation {row.id} (save {row.save_number}) waits for generation {lower.id} (save "
            f"{lower.save_number}), which is still {lower.state}",
            kind="lower_save_open",
        )


def _require_free_seq(tx: Transaction, row: Row[Any], facts: AdoptFacts) -> None:
    other = tx.connection.execute(
        select(generations.c.id).where(
            generations.c.run_id == row.run_id,
            generations.c.epoch == facts.epoch,
            generations.c.commit_seq == facts.commit_seq,
        )
    ).scalar_one_or_none()
    if other is not None:
        raise Conflict(
            f"the verdict on generation {row.id} has commit_seq {facts.commit_seq} of epoch {facts.epoch}, which "
            f"belongs to generation {other}: the repository was written under two catalogs"
        )


def _not_committable(row: Row[Any]) -> Conflict:
    if row.state == State.WRITING:
        return Conflict(f"generation {row.id} is still writing: mark it durable before the commit", kind="not_durable")
    return Conflict(
        f"generation {row.id} was aborted at stage {row.abort_stage} ({row.abort_reason}): save again",
        kind="aborted",
    )


def _give_tags(tx: Transaction, row: Row[Any]) -> None:
    """Move the save's tags here, unless a later commit has them already (an adoption may come late)."""
    names = tx.connection.execute(select(saves.c.tags).where(saves.c.generation_id == row.id)).scalar_one_or_none()
    current = tx.connection.execute(select(generations).where(generations.c.id == row.id)).one()
    for name in dict.fromkeys(names or ()):
        holder = retention.tag_holder(tx, row.run_id, name)
        if holder is None or (holder.epoch, holder.commit_seq) < (current.epoch, current.commit_seq):
            retention.move_tag(tx, current, name)
