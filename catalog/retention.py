"""What may go, and what must stay: retire and sweep, tags, pins, quarantine."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, delete, insert, select, update

from ckptfmt.catalog.queries import generations as queries
from ckptfmt.catalog.queries.launches import restored
from ckptfmt.catalog.schema import generations, pins, readers, tags
from ckptfmt.catalog.transaction import Transaction, actor, lock_generation, move, record
from ckptfmt.errors import Conflict, InvalidInput, NotCommitted, NotFound
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import GenerationRecord


def retire(tx: Transaction, generation_id: int, *, fence: int | None) -> GenerationRecord:
    """``committed -> retired``, if the rule, recomputed under the lock, allows it."""
    run, row = lock_generation(tx, generation_id, fence=fence)
    if row.commit_seq is None:
        raise NotCommitted(f"generation {generation_id} is {row.state}, never committed: gc removes it without retire")
    if row.state == State.COMMITTED:
        reason = _kept_because(tx, run, row)
        if reason is not None:
            raise Conflict(f"generation {generation_id} of run {run.name!r} is kept: {reason}", kind="retention")
        move(tx, row, "retire", {"retired_at": tx.now()}, {"fence": fence})
    return queries.by_id(tx.snapshot, tx.repository_id, generation_id)


def mark_swept(tx: Transaction, generation_id: int) -> GenerationRecord:
    """``retired|aborted -> deleted``; on ``deleted`` only the time moves."""
    _, row = lock_generation(tx, generation_id)
    now = tx.now()
    if row.state == State.DELETED:
        tx.connection.execute(update(generations).where(generations.c.id == row.id).values(swept_at=now))
        record(tx, row.run_id, "sweep", generation_id=row.id)
    elif row.state in (State.RETIRED, State.ABORTED):
        move(tx, row, "delete", {"swept_at": now}, {})
    else:
        raise Conflict(f"generation {generation_id} is {row.state}: only a retired or aborted one may be swept")
    return queries.by_id(tx.snapshot, tx.repository_id, generation_id)


def tag(tx: Transaction, generation_id: int, name: str) -> None:
    """Give a committed generation the tag; it moves here from wherever it was."""
    if not name:
        raise InvalidInput("a tag must not be empty")
    _, row = lock_generation(tx, generation_id)
    _require_committed(row, f"tag {name!r}")
    holder = tag_holder(tx, row.run_id, name)
    if holder is None or holder.id != row.id:
        move_tag(tx, row, name)


def move_tag(tx: Transaction, row: Row[Any], name: str) -> None:
    """Put the tag on the generation, under the lock of its run."""
    holder = tag_holder(tx, row.run_id, name)
    tx.connection.execute(delete(tags).where(tags.c.run_id == row.run_id, tags.c.name == name))
    tx.connection.execute(insert(tags).values(run_id=row.run_id, name=name, generation_id=row.id, tagged_at=tx.now()))
    detail = {"name": name, "moved_from": holder.id if holder is not None else None}
    record(tx, row.run_id, "tag", generation_id=row.id, detail=detail)


def tag_holder(tx: Transaction, run_id: int, name: str) -> Row[Any, Any, Any] | None:
    """Id, epoch and commit_seq of the generation that has the tag."""
    return tx.connection.execute(
        select(generations.c.id, generations.c.epoch, generations.c.commit_seq)
        .join(tags, tags.c.generation_id == generations.c.id)
        .where(tags.c.run_id == run_id, tags.c.name == name)
    ).one_or_none()


def untag(tx: Transaction, generation_id: int, name: str) -> None:
    """Take the tag away; ``NotFound`` if this generation does not have it."""
    _, row = lock_generation(tx, generation_id)
    gone = tx.connection.execute(
        delete(tags).where(tags.c.run_id == row.run_id, tags.c.name == name, tags.c.generation_id == row.id)
    )
    if gone.rowcount == 0:
        raise NotFound(f"generation {generation_id} does not have the tag {name!r}: see `ckptfmt ls`")
    record(tx, row.run_id, "untag", generation_id=row.id, detail={"name": name})


def pin(tx: Transaction, generation_id: int, *, reason: str) -> None:
    """Keep the generation until it is unpinned; the newest reason stands."""
    if not reason:
        raise InvalidInput(f"a pin on generation {generation_id} needs a reason")
    _, row = lock_generation(tx, generation_id)
    _require_committed(row, "pin")
    known = tx.connection.execute(select(pins).where(pins.c.generation_id == row.id)).one_or_none()
    if known is not None and known.reason == reason:
        return
    tx.connection.execute(delete(pins).where(pins.c.generation_id == row.id))
    tx.connection.execute(
        insert(pins).values(generation_id=row.id, reason=reason, pinned_by=actor(), pinned_at=tx.now())
    )
    record(tx, row.run_id, "pin", generation_id=row.id, detail={"reason": reason})


def unpin(tx: Transaction, generation_id: int) -> None:
    """Take the pin away. Idempotent."""
    _, row = lock_generation(tx, generation_id)
    gone = tx.connection.execute(delete(pins).where(pins.c.generation_id == row.id))
    if gone.rowcount:
        record(tx, row.run_id, "unpin", generation_id=row.id)


def quarantine(tx: Transaction, generation_id: int, *, reason: str) -> None:
    """Leave a committed generation out of ``latest``; the first reason stands."""
    if not reason:
        raise InvalidInput(f"quarantine of generation {generation_id} needs a reason")
    _, row = lock_generation(tx, generation_id)
    _require_committed(row, "quarantine")
    if row.quarantined_at is not None:
        return
    tx.connection.execute(
        update(generations).where(generations.c.id == row.id).values(quarantined_at=tx.now(), quarantine_reason=reason)
    )
    record(tx, row.run_id, "quarantine", generation_id=row.id, detail={"reason": reason})


def _require_committed(row: Row[Any], what: str) -> None:
    if row.state != State.COMMITTED:
        raise NotCommitted(f"generation {row.id} is {row.state}, not committed: {what} is for committed ones")


def _kept_because(tx: Transaction, run: Row[Any], row: Row[Any]) -> str | None:
    """The rule that keeps this committed generation, in words; None if nothing does."""
    if run.retention_hold:
        return "the run is under retention hold after a repair of the catalog; an operator must clear the hold first"
    if row.proven_at is None:
        return "its COMMIT.json is not proven yet; run `ckptfmt recover` first"
    if row.id == _restore_point(tx, run.id):
        return "it is the newest proven generation, the run's restore point"
    pinned = tx.connection.execute(select(pins.c.reason).where(pins.c.generation_id == row.id)).scalar_one_or_none()
    if pinned is not None:
        return f"it is pinned ({pinned}); unpin it first"
    tag_names = tx.connection.execute(select(tags.c.name).where(tags.c.generation_id == row.id)).scalars().all()
    if tag_names:
        return f"it has the tag {', '.join(map(repr, tag_names))}; untag it first"
    reader = tx.connection.execute(
        select(readers).where(readers.c.generation_id == row.id, readers.c.expires_at > tx.now()).limit(1)
    ).one_or_none()
    if reader is not None:
        return f"it is being read by host {reader.host}, pid {reader.pid}"
    launch = restored(tx.snapshot, tx.repository_id, row.key)
    if launch is not None:
        return f"launch {launch.id} (host {launch.host}, pid {launch.pid}) restored from it and is live"
    return None


def _restore_point(tx: Transaction, run_id: int) -> int | None:
    """The newest proven generation, by preference one that is not quarantined."""
    query = (
        select(generations.c.id)
        .where(
            generations.c.run_id == run_id,
            generations.c.state == State.COMMITTED,
            generations.c.proven_at.is_not(None),
        )
        .order_by(
            generations.c.quarantined_at.is_not(None), generations.c.epoch.desc(), generations.c.commit_seq.desc()
        )
        .limit(1)
    )
    found: int | None = tx.connection.execute(query).scalar_one_or_none()
    return found
