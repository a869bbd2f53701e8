"""Begin and skip of a save (C1), and the reports of its ranks (C2)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from ckptfmt.catalog.launches import require_saving
from ckptfmt.catalog.queries import generations as queries
from ckptfmt.catalog.transaction import NOW, Transaction, lock_launch, record
from ckptfmt.errors import Conflict, InvalidInput, NotFound
from ckptfmt.format.states import INITIAL, State
from ckptfmt.ports.records import LaunchRecord, RankState, RunRecord, SaveTicket

_RANK = """
SELECT q.state, q.part_digest, g.state FROM ranks AS q JOIN generations AS g ON g.id = q.generation_id
WHERE g.repository_id = :repository AND q.generation_id = :generation AND q.rank = :rank
"""
_SAVE = "SELECT launch_id, n, step, outcome, generation_id FROM saves WHERE launch_id = :launch AND n = :n"


def begin(
    tx: Transaction,
    launch_id: int,
    *,
    n: int,
    step: int,
    key: str,
    ranks_expected: Sequence[int],
    deadline_seconds: float | None,
    fence: int,
    token: str,
    tags: Sequence[str],
) -> SaveTicket:
    """C1: find or insert the save and its generation."""
    run, launch = lock_launch(tx, launch_id, fence=fence)
    require_saving(run, launch, token)
    _check_request(launch, n, step, key, ranks_expected, tags)
    known = _known(tx, launch_id, n)
    if known is not None:
        return _repeat(tx, known, step, key)
    taken = queries.by_key(tx.session, tx.repository_id, key)
    if taken is not None:
        raise Conflict(f"generation key {key} belongs to generation {taken.id}: keys are never used twice")
    now = tx.now()
    generation_id = tx.insert_new(
        "generations",
        repository_id=tx.repository_id,
        run_id=run.id,
        launch_id=launch_id,
        save_number=n,
        key=key,
        step=step,
        state=INITIAL,
        fence=launch.fence,
        world_size=launch.world_size,
        epoch=tx.epoch(),
        created_at=now,
        deadline=None if deadline_seconds is None else now + timedelta(seconds=deadline_seconds),
    )
    for rank in ranks_expected:
        tx.insert("ranks", generation_id=generation_id, rank=rank, state="writing", retries=0, updated_at=now)
    _insert(tx, run, launch_id, n, step, "begun", generation_id, tags)
    detail = {"launch": launch_id, "n": n, "step": step, "ranks": len(ranks_expected)}
    record(tx, run.id, "begin", generation_id=generation_id, target=INITIAL, detail=detail)
    return SaveTicket(queries.by_id(tx.session, tx.repository_id, generation_id), created=True)


def skip(tx: Transaction, launch_id: int, *, n: int, step: int, fence: int, token: str) -> None:
    """Record that save ``n`` was skipped; ``Conflict`` if it had begun."""
    run, launch = lock_launch(tx, launch_id, fence=fence)
    require_saving(run, launch, token)
    known = _known(tx, launch_id, n)
    if known is None:
        _insert(tx, run, launch_id, n, step, "skipped", None, ())
        record(tx, run.id, "skip", detail={"launch": launch_id, "n": n, "step": step})
        return
    _require_step(known, step)
    if known.outcome != "skipped":
        raise Conflict(
            f"save {n} of launch {launch_id} has begun as generation {known.generation_id}: take part in it",
            kind="save_begun",
        )


def report_rank(
    tx: Transaction,
    generation_id: int,
    rank: int,
    *,
    state: RankState,
    part_name: str | None,
    part_digest: str | None,
    values: dict[str, Any],
) -> None:
    """C2. Only this rank writes this row, so the run's lock is not needed, and there is no event."""
    if state == "durable" and (part_name is None or part_digest is None):
        raise InvalidInput(f"rank {rank} of generation {generation_id} is durable only with its part's name and digest")
    if state == "failed" and not values.get("error"):
        raise InvalidInput(f"rank {rank} of generation {generation_id} failed: say why in error")
    found = tx.session.rows(_RANK, repository=tx.repository_id, generation=generation_id, rank=rank)
    if not found:
        raise NotFound(f"generation {generation_id} expects no rank {rank}: check the id and the launch's ranks")
    ((known_state, known_digest, generation_state),) = found
    if known_digest is not None and part_digest is not None and known_digest != part_digest:
        raise Conflict(
            f"rank {rank} of generation {generation_id} reported part digest {known_digest} before and "
            f"{part_digest} now: two processes act as this rank"
        )
    if known_state == state and state in ("durable", "failed"):
        return
    if generation_state != State.WRITING:
        raise Conflict(
            f"generation {generation_id} is {generation_state}, not writing: rank {rank} must stop writing to it",
            kind="not_writing",
        )
    if known_state in ("durable", "failed"):
        raise Conflict(f"rank {rank} of generation {generation_id} is {known_state} already: it cannot become {state}")
    changes = {"state": state, "part_name": part_name, "part_digest": part_digest, "updated_at": NOW}
    changes |= {name: value for name, value in values.items() if value is not None}
    tx.update("ranks", "generation_id = :generation AND rank = :rank", changes, generation=generation_id, rank=rank)


def _check_request(
    launch: LaunchRecord, n: int, step: int, key: str, ranks_expected: Sequence[int], tags: Sequence[str]
) -> None:
    if n < 0 or step < 0 or not key:
        raise InvalidInput(f"save {n} at step {step}: n and step must not be negative and a key is needed")
    if not ranks_expected or len(set(ranks_expected)) != len(ranks_expected):
        raise InvalidInput(f"save {n}: the expected ranks must be distinct and at least one, not {ranks_expected!r}")
    if min(ranks_expected) < 0 or max(ranks_expected) >= launch.world_size:
        raise InvalidInput(f"save {n}: ranks {ranks_expected!r} do not fit a world of {launch.world_size}")
    if not all(tags):
        raise InvalidInput(f"save {n}: a tag must not be empty")


class _Known(NamedTuple):
    """A save that was begun or skipped before."""

    launch_id: int
    n: int
    step: int
    outcome: str
    generation_id: int | None


def _known(tx: Transaction, launch_id: int, n: int) -> _Known | None:
    found = tx.session.rows(_SAVE, launch=launch_id, n=n)
    return _Known(*found[0]) if found else None


def _repeat(tx: Transaction, known: _Known, step: int, key: str) -> SaveTicket:
    _require_step(known, step)
    if known.generation_id is None:
        raise Conflict(f"save {known.n} of launch {known.launch_id} was skipped: skip it too", kind="save_skipped")
    generation = queries.by_id(tx.session, tx.repository_id, known.generation_id)
    if generation.key != key:
        raise Conflict(
            f"save {known.n} of launch {known.launch_id} has generation key {generation.key}, not {key}: "
            "the ranks do not share one launch token"
        )
    return SaveTicket(generation, created=False)


def _require_step(known: _Known, step: int) -> None:
    if known.step != step:
        raise Conflict(
            f"save {known.n} of launch {known.launch_id} is at step {known.step}, this rank is at step {step}: "
            "all ranks must call save at the same steps",
            kind="step_differs",
        )


def _insert(
    tx: Transaction,
    run: RunRecord,
    launch_id: int,
    n: int,
    step: int,
    outcome: str,
    generation_id: int | None,
    tags: Sequence[str],
) -> None:
    tx.insert(
        "saves",
        run_id=run.id,
        launch_id=launch_id,
        n=n,
        step=step,
        outcome=outcome,
        generation_id=generation_id,
        tags=json.dumps(list(tags)),
        created_at=NOW,
    )
