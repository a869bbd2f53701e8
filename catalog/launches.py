"""Launches: who holds a run's lease, under which fence.

Lease times are compared with the database's clock alone, after the run's lock was taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from ckptfmt.catalog import messages
from ckptfmt.catalog.free_text import as_kept, storable
from ckptfmt.catalog.ownership import require_open, require_owner
from ckptfmt.catalog.queries.launches import by_id, by_token, live
from ckptfmt.catalog.transaction import Transaction, lock_launch, lock_run_named, record
from ckptfmt.errors import Conflict, InvalidInput
from ckptfmt.ports.records import LaunchRecord, LaunchRequest, RunRecord


def acquire(
    tx: Transaction, run_name: str, request: LaunchRequest, *, lease_seconds: float, displace: int | None, rank: int
) -> LaunchRecord:
    """Take the lease (see the port). The older launch's lease ends in the same transaction."""
    if lease_seconds <= 0 or not 0 <= rank < request.world_size:
        raise InvalidInput("a launch needs a positive lease, a world size of at least 1, and a rank of that world")
    request = as_kept(request)
    run = lock_run_named(tx, run_name)
    known = by_token(tx.session, tx.repository_id, run.id, request.token)
    if known is not None:
        return _repeat(tx, run, known, request)
    now = tx.now()
    holder = live(tx.session, tx.repository_id, run_name)
    if holder is not None and holder.id != displace:
        raise _held(run_name, holder, now)
    unclosed = "run_id = :run AND closed_at IS NULL AND lease_until > :now"
    tx.update("launches", unclosed, {"lease_until": now}, run=run.id, now=now)
    fence = run.fence + 1
    tx.update("runs", "id = :run", {"fence": fence}, run=run.id)
    launch_id = _insert(tx, run.id, request, rank, fence, now, now + timedelta(seconds=lease_seconds))
    messages.forget_older(tx, run.id, fence)
    detail = {"launch": launch_id, "kind": request.kind, "fence": fence, "host": request.host, "pid": request.pid}
    if holder is not None:
        detail["displaced"] = holder.id
    record(tx, run.id, "launch", detail=detail)
    return by_id(tx.session, tx.repository_id, launch_id)


def renew(tx: Transaction, launch_id: int, *, lease_seconds: float, last_step: int | None) -> LaunchRecord:
    """Heartbeat: no event, for there would be one every few seconds."""
    if lease_seconds <= 0:
        raise InvalidInput("a lease must be longer than 0 s")
    run, launch = lock_launch(tx, launch_id)
    require_owner(run, launch)
    require_open(run, launch)
    values: dict[str, Any] = {"lease_until": tx.now() + timedelta(seconds=lease_seconds)}
    if last_step is not None:
        values["last_step"] = last_step
    _change(tx, launch_id, values)
    return by_id(tx.session, tx.repository_id, launch_id)


def close(tx: Transaction, launch_id: int) -> None:
    """Release the lease. A fenced launch may close too: it gives up what it no longer has."""
    run, launch = lock_launch(tx, launch_id)
    if launch.closed_at is not None:
        return
    _change(tx, launch_id, {"closed_at": tx.now()})
    record(tx, run.id, "close", detail={"launch": launch_id})


def set_restored_from(tx: Transaction, launch_id: int, generation_key: str) -> None:
    """Note what the launch restored: retention keeps it while the launch lives."""
    run, launch = lock_launch(tx, launch_id)
    require_owner(run, launch)
    require_open(run, launch)
    if launch.restored_from == storable(generation_key):
        return
    _change(tx, launch_id, {"restored_from": generation_key})
    record(tx, run.id, "restore", detail={"launch": launch_id, "generation_key": generation_key})


def _change(tx: Transaction, launch_id: int, values: Mapping[str, Any]) -> None:
    tx.update("launches", "id = :launch", values, launch=launch_id)


def _insert(
    tx: Transaction,
    run_id: int,
    request: LaunchRequest,
    rank: int,
    fence: int,
    now: datetime,
    lease_until: datetime,
) -> int:
    process = {
        "host": request.host,
        "pid": request.pid,
        "boot_id": request.boot_id,
        "pid_started": request.pid_started,
    }
    launch_id = tx.insert_new(
        "launches",
        run_id=run_id,
        token=request.token,
        kind=request.kind,
        fence=fence,
        world_size=request.world_size,
        lease_until=lease_until,
        created_at=now,
        **process,
    )
    tx.insert("launch_ranks", launch_id=launch_id, rank=rank, joined_at=now, **process)
    return launch_id


def _repeat(tx: Transaction, run: RunRecord, known: LaunchRecord, request: LaunchRequest) -> LaunchRecord:
    """The answer to a repeated request; ``Conflict`` for a token that is used up or someone else's."""
    theirs = (known.host, known.pid, known.boot_id, known.pid_started)
    if theirs != (request.host, request.pid, request.boot_id, request.pid_started):
        raise Conflict(
            f"the launch token of run {run.name!r} is in use by host {known.host}, pid {known.pid} "
            f"(launch {known.id}): every start of a job needs a token of its own",
            kind="launch_token",
        )
    require_open(run, known)
    require_owner(run, known)
    return by_id(tx.session, tx.repository_id, known.id)


def _held(run_name: str, holder: LaunchRecord, now: datetime) -> Conflict:
    age = (now - holder.created_at).total_seconds()
    left = (holder.lease_until - now).total_seconds()
    return Conflict(
        f"run {run_name!r} is held by launch {holder.id} on host {holder.host}, pid {holder.pid}, since {age:.0f} s "
        f"(its lease lapses in {left:.0f} s unless renewed): wait, stop that process, or pass takeover=True",
        kind="launch_held",
    )
