"""Begin and skip of a save (C1)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from ckptfmt.catalog.free_text import document, storable
from ckptfmt.catalog.ownership import require_saving
from ckptfmt.catalog.queries import generations as queries
from ckptfmt.catalog.transaction import NOW, Transaction, lock_launch, record
from ckptfmt.errors import Conflict, InvalidInput
from ckptfmt.format.states import INITIAL
from ckptfmt.ports.records import LaunchRecord, RunRecord, SaveTicket

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
    tx.session.insert_rows(
        "ranks",
        [
            {"generation_id": generation_id, "rank": rank, "state": "writing", "retries": 0, "updated_at": now}
            for rank in ranks_expected
        ],
    )
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
    if generation.key != storable(key):
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
        tags=document(list(tags)),
        created_at=NOW,
    )
