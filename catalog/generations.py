"""The verdict on a generation: durable (C3), committed (C4), proven (C5), aborted, adopted."""

from __future__ import annotations

from typing import Any

from ckptfmt.catalog import packs, retention
from ckptfmt.catalog.free_text import as_kept, storable
from ckptfmt.catalog.queries import generations as queries
from ckptfmt.catalog.snapshot import from_json
from ckptfmt.catalog.transaction import Transaction, actor, lock_generation, move, record
from ckptfmt.errors import CatalogBehind, Conflict, InvalidInput
from ckptfmt.format.states import OPEN_STATES, State
from ckptfmt.ports.records import AdoptFacts, DurableFacts, GenerationRecord, RunRecord

_WAITING = "SELECT rank, state FROM ranks WHERE generation_id = :generation AND state <> 'durable' ORDER BY rank"
_LOWER = f"""
SELECT id, save_number, state FROM generations
WHERE launch_id = :launch AND save_number < :n AND state IN ({", ".join(repr(s.value) for s in sorted(OPEN_STATES))})
ORDER BY save_number LIMIT 1
"""


def mark_durable(tx: Transaction, generation_id: int, facts: DurableFacts, *, fence: int) -> GenerationRecord:
    """C3: ``writing -> durable`` with the manifest's facts."""
    run, row = lock_generation(tx, generation_id, fence=fence)
    if row.state != State.WRITING:
        _require_same_manifest(row, facts)
        return queries.by_id(tx.session, tx.repository_id, generation_id)
    _require_ranks_durable(tx, row)
    _require_lower_saves_settled(tx, row)
    move(tx, run, row, "durable", {"durable_at": tx.now(), **_columns(facts)}, {"manifest": facts.manifest_name})
    packs.refer(tx, run, row, facts.packs)
    return queries.by_id(tx.session, tx.repository_id, generation_id)


def commit(tx: Transaction, generation_id: int, *, fence: int) -> GenerationRecord:
    """C4, the commit point: ``commit_seq`` comes from the run's row under its lock."""
    run, row = lock_generation(tx, generation_id, fence=fence)
    if row.commit_seq is None:
        if row.state != State.DURABLE:
            raise _not_committable(row)
        seq = run.next_commit_seq
        tx.update("runs", "id = :run", {"next_commit_seq": seq + 1}, run=run.id)
        values = {"commit_seq": seq, "epoch": tx.epoch(), "commit_fence": fence, "committed_at": tx.now()}
        move(tx, run, row, "commit", values, {"commit_seq": seq, "epoch": values["epoch"], "fence": fence})
        give_tags(tx, run, row)
    return queries.by_id(tx.session, tx.repository_id, generation_id)


def set_proven(tx: Transaction, generation_id: int) -> GenerationRecord:
    """C5: COMMIT.json is durable."""
    run, row = lock_generation(tx, generation_id)
    if row.commit_seq is None:
        raise Conflict(f"generation {generation_id} is {row.state}, not committed: there is nothing to prove")
    if row.proven_at is None:
        tx.update("generations", "id = :id", {"proven_at": tx.now()}, id=row.id)
        record(tx, run.id, "prove", generation_id=row.id)
    return queries.by_id(tx.session, tx.repository_id, generation_id)


def abort(
    tx: Transaction, generation_id: int, *, stage: str, rank: int | None, reason: str, fence: int | None
) -> GenerationRecord:
    """``writing|durable -> aborted``; the first reason is kept."""
    if not stage or not reason:
        raise InvalidInput(f"abort of generation {generation_id} needs a stage and a reason")
    run, row = lock_generation(tx, generation_id, fence=fence)
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
        move(tx, run, row, "abort", values, {"stage": stage, "rank": rank, "reason": reason, "fence": fence})
    return queries.by_id(tx.session, tx.repository_id, generation_id)


def adopt(tx: Transaction, generation_id: int, facts: AdoptFacts, *, fence: int) -> GenerationRecord:
    """Repair: commit on the evidence of a verdict found on storage, exactly as it says."""
    run, row = lock_generation(tx, generation_id, fence=fence)
    if row.commit_seq is not None:
        _require_same_verdict(row, facts)
        return queries.by_id(tx.session, tx.repository_id, generation_id)
    if row.state == State.DELETED:
        raise Conflict(f"generation {generation_id} was aborted and its objects are deleted: it cannot be adopted")
    if facts.epoch > tx.epoch():
        raise CatalogBehind(
            f"the verdict on generation {row.key} is of epoch {facts.epoch}, this catalog is of epoch {tx.epoch()}: "
            "another catalog governs the repository"
        )
    _require_free_seq(tx, run, row, facts)
    if run.next_commit_seq <= facts.commit_seq:
        tx.update("runs", "id = :run", {"next_commit_seq": facts.commit_seq + 1}, run=run.id)
    move_adopted(tx, run, row, facts, fence=fence)
    packs.refer(tx, run, row, facts.durable.packs)
    give_tags(tx, run, row)
    return queries.by_id(tx.session, tx.repository_id, generation_id)


def move_adopted(
    tx: Transaction, run: RunRecord, row: GenerationRecord, facts: AdoptFacts, *, fence: int | None
) -> None:
    """Take the repair ``adopt``, under the lock of the run. Its ``commit_seq`` must be free."""
    now = tx.now()
    values = {
        **_columns(facts.durable),
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
    move(tx, run, row, "adopt", values, {"commit_seq": facts.commit_seq, "epoch": facts.epoch, "fence": fence})


def holder_of_seq(tx: Transaction, run: RunRecord, facts: AdoptFacts) -> int | None:
    """Id of the generation of the run that has this place in its order."""
    query = "SELECT id FROM generations WHERE run_id = :run AND epoch = :epoch AND commit_seq = :seq"
    found = tx.session.rows(query, run=run.id, epoch=facts.epoch, seq=facts.commit_seq)
    return found[0][0] if found else None


def _manifest(facts: DurableFacts) -> dict[str, Any]:
    facts = as_kept(facts)
    return {
        "manifest_name": facts.manifest_name,
        "manifest_digest": facts.manifest_digest,
        "manifest_bytes": facts.manifest_bytes,
        "nbytes": facts.nbytes,
        "parent_key": facts.parent_key,
        "tiers": tuple(sorted(set(map(storable, facts.tiers)))),
    }


def _columns(facts: DurableFacts) -> dict[str, Any]:
    """The same as the row keeps it."""
    values = _manifest(facts)
    return {**values, "tiers": ",".join(values["tiers"]) or None}


def _require_same_manifest(row: GenerationRecord, facts: DurableFacts) -> None:
    if row.state == State.ABORTED or (row.commit_seq is None and row.state == State.DELETED):
        raise Conflict(
            f"generation {row.id} was aborted at stage {row.abort_stage} ({row.abort_reason}): save again",
            kind="aborted",
        )
    _require_equal(row, _manifest(facts))


def _require_same_verdict(row: GenerationRecord, facts: AdoptFacts) -> None:
    verdict = {
        "epoch": facts.epoch,
        "commit_seq": facts.commit_seq,
        "committed_at": facts.committed_at,
        "commit_fence": facts.commit_fence,
    }
    _require_equal(row, {**verdict, **_manifest(facts.durable)})


def _require_equal(row: GenerationRecord, facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        recorded = getattr(row, name)
        if recorded != value:
            raise Conflict(
                f"generation {row.id} is {row.state} with {name} {recorded}, not {value}: "
                "two processes act on the same save",
                kind="facts_differ",
            )


def _require_ranks_durable(tx: Transaction, row: GenerationRecord) -> None:
    waiting = tx.session.rows(_WAITING, generation=row.id)
    if waiting:
        names = ", ".join(f"{rank} ({state})" for rank, state in waiting[:8])
        raise Conflict(f"generation {row.id} waits for ranks {names}: it is not durable yet", kind="ranks_missing")


def _require_lower_saves_settled(tx: Transaction, row: GenerationRecord) -> None:
    for id, save_number, state in tx.session.rows(_LOWER, launch=row.launch_id, n=row.save_number):
        raise Conflict(
            f"generation {row.id} (save {row.save_number}) waits for generation {id} (save "
            f"{save_number}), which is still {state}",
            kind="lower_save_open",
        )


def _require_free_seq(tx: Transaction, run: RunRecord, row: GenerationRecord, facts: AdoptFacts) -> None:
    other = holder_of_seq(tx, run, facts)
    if other is not None:
        raise Conflict(
            f"the verdict on generation {row.id} has commit_seq {facts.commit_seq} of epoch {facts.epoch}, which "
            f"belongs to generation {other}: the repository was written under two catalogs",
            kind="commit_seq_taken",
        )


def _not_committable(row: GenerationRecord) -> Conflict:
    if row.state == State.WRITING:
        return Conflict(f"generation {row.id} is still writing: mark it durable before the commit", kind="not_durable")
    return Conflict(
        f"generation {row.id} was aborted at stage {row.abort_stage} ({row.abort_reason}): save again",
        kind="aborted",
    )


def give_tags(tx: Transaction, run: RunRecord, row: GenerationRecord) -> None:
    """Move the save's tags here, unless a later commit has them already (an adoption may come late)."""
    found = tx.session.rows("SELECT tags FROM saves WHERE generation_id = :generation", generation=row.id)
    names = [name for (stored,) in found for name in from_json(stored)]
    current = queries.by_id(tx.session, tx.repository_id, row.id)
    for name in dict.fromkeys(names):
        holder = queries.tagged(tx.session, tx.repository_id, run.name, name)
        if holder is None or _order(holder) < _order(current):
            retention.move_tag(tx, run, current, name)


def _order(generation: GenerationRecord) -> tuple[int, int]:
    return generation.epoch, generation.commit_seq or 0
