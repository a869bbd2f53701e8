"""What may go, and what must stay: retire and sweep, tags, pins, quarantine."""

from __future__ import annotations

from ckptfmt.catalog.free_text import storable
from ckptfmt.catalog.queries import generations as queries
from ckptfmt.catalog.queries.launches import restored
from ckptfmt.catalog.transaction import Transaction, actor, lock_generation, move, record
from ckptfmt.errors import Conflict, InvalidInput, NotCommitted, NotFound
from ckptfmt.format.states import State
from ckptfmt.ports.records import GenerationRecord, RunRecord

_UNPIN = "DELETE FROM pins WHERE generation_id = :generation"
_READER = "SELECT host, pid FROM readers WHERE generation_id = :generation AND expires_at > :now LIMIT 1"
_RESTORE_POINT = """
SELECT id FROM generations WHERE run_id = :run AND state = 'committed' AND proven_at IS NOT NULL
ORDER BY quarantined_at IS NOT NULL, epoch DESC, commit_seq DESC LIMIT 1
"""


def retire(tx: Transaction, generation_id: int, *, fence: int | None) -> GenerationRecord:
    """``committed -> retired``, if the rule, recomputed under the lock, allows it."""
    run, row = lock_generation(tx, generation_id, fence=fence)
    if row.commit_seq is None:
        raise NotCommitted(f"generation {generation_id} is {row.state}, never committed: gc removes it without retire")
    if row.state == State.COMMITTED:
        reason = _kept_because(tx, run, row)
        if reason is not None:
            raise Conflict(f"generation {generation_id} of run {run.name!r} is kept: {reason}", kind="retention")
        move(tx, run, row, "retire", {"retired_at": tx.now()}, {"fence": fence})
    return queries.by_id(tx.session, tx.repository_id, generation_id)


def mark_swept(tx: Transaction, generation_id: int) -> GenerationRecord:
    """``retired|aborted -> deleted``; on ``deleted`` only the time moves."""
    run, row = lock_generation(tx, generation_id)
    now = tx.now()
    if row.state == State.DELETED:
        tx.update("generations", "id = :id", {"swept_at": now}, id=row.id)
        record(tx, run.id, "sweep", generation_id=row.id)
    elif row.state in (State.RETIRED, State.ABORTED):
        move(tx, run, row, "delete", {"swept_at": now}, {})
    else:
        raise Conflict(f"generation {generation_id} is {row.state}: only a retired or aborted one may be swept")
    return queries.by_id(tx.session, tx.repository_id, generation_id)


def tag(tx: Transaction, generation_id: int, name: str) -> None:
    """Give a committed generation the tag; it moves here from wherever it was."""
    if not name:
        raise InvalidInput("a tag must not be empty")
    run, row = lock_generation(tx, generation_id)
    _require_committed(row, f"tag {name!r}")
    if storable(name) not in row.tags:
        move_tag(tx, run, row, name)


def move_tag(tx: Transaction, run: RunRecord, row: GenerationRecord, name: str) -> None:
    """Put the tag on the generation, under the lock of its run."""
    holder = queries.tagged(tx.session, tx.repository_id, run.name, name)
    tx.session.execute("DELETE FROM tags WHERE run_id = :run AND name = :name", run=run.id, name=name)
    tx.insert("tags", run_id=run.id, name=name, generation_id=row.id, tagged_at=tx.now())
    detail = {"name": name, "moved_from": holder.id if holder is not None else None}
    record(tx, run.id, "tag", generation_id=row.id, detail=detail)


def untag(tx: Transaction, generation_id: int, name: str) -> None:
    """Take the tag away; ``NotFound`` if this generation does not have it."""
    run, row = lock_generation(tx, generation_id)
    statement = "DELETE FROM tags WHERE run_id = :run AND name = :name AND generation_id = :generation"
    if not tx.session.execute(statement, run=run.id, name=name, generation=row.id):
        raise NotFound(f"generation {generation_id} does not have the tag {name!r}: see `ckptfmt ls`")
    record(tx, run.id, "untag", generation_id=row.id, detail={"name": name})


def pin(tx: Transaction, generation_id: int, *, reason: str) -> None:
    """Keep the generation until it is unpinned; the newest reason stands."""
    if not reason:
        raise InvalidInput(f"a pin on generation {generation_id} needs a reason")
    run, row = lock_generation(tx, generation_id)
    _require_committed(row, "pin")
    if _pinned(tx, row) == storable(reason):
        return
    tx.session.execute(_UNPIN, generation=row.id)
    tx.insert("pins", generation_id=row.id, reason=reason, pinned_by=actor(), pinned_at=tx.now())
    record(tx, run.id, "pin", generation_id=row.id, detail={"reason": reason})


def unpin(tx: Transaction, generation_id: int) -> None:
    """Take the pin away. Idempotent."""
    run, row = lock_generation(tx, generation_id)
    if tx.session.execute(_UNPIN, generation=row.id):
        record(tx, run.id, "unpin", generation_id=row.id)


def quarantine(tx: Transaction, generation_id: int, *, reason: str) -> None:
    """Leave a committed generation out of ``latest``; the first reason stands."""
    if not reason:
        raise InvalidInput(f"quarantine of generation {generation_id} needs a reason")
    run, row = lock_generation(tx, generation_id)
    _require_committed(row, "quarantine")
    if row.quarantined_at is not None:
        return
    facts = {"quarantined_at": tx.now(), "quarantine_reason": reason}
    tx.update("generations", "id = :id", facts, id=row.id)
    record(tx, run.id, "quarantine", generation_id=row.id, detail={"reason": reason})


def _require_committed(row: GenerationRecord, what: str) -> None:
    if row.state != State.COMMITTED:
        raise NotCommitted(f"generation {row.id} is {row.state}, not committed: {what} is for committed ones")


def _kept_because(tx: Transaction, run: RunRecord, row: GenerationRecord) -> str | None:
    """The rule that keeps this committed generation, in words; None if nothing does."""
    if run.retention_hold:
        return "the run is under retention hold after a repair of the catalog; an operator must clear the hold first"
    if row.proven_at is None:
        return "its COMMIT.json is not proven yet; run `ckptfmt recover` first"
    if row.id == _restore_point(tx, run.id):
        return "it is the newest proven generation, the run's restore point"
    pinned = _pinned(tx, row)
    if pinned is not None:
        return f"it is pinned ({pinned}); unpin it first"
    if row.tags:
        return f"it has the tag {', '.join(map(repr, row.tags))}; untag it first"
    for host, pid in tx.session.rows(_READER, generation=row.id, now=tx.now()):
        return f"it is being read by host {host}, pid {pid}"
    launch = restored(tx.session, tx.repository_id, row.key)
    if launch is not None:
        return f"launch {launch.id} (host {launch.host}, pid {launch.pid}) restored from it and is live"
    return None


def _restore_point(tx: Transaction, run_id: int) -> int | None:
    """The newest proven generation, by preference one that is not quarantined."""
    found = tx.session.rows(_RESTORE_POINT, run=run_id)
    return found[0][0] if found else None


def _pinned(tx: Transaction, row: GenerationRecord) -> str | None:
    """Why it is pinned, None if it is not."""
    found = tx.session.rows("SELECT reason FROM pins WHERE generation_id = :generation", generation=row.id)
    return found[0][0] if found else None
