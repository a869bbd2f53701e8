"""Which generation a resume would take, and why not a newer one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfmt.engine.load.resolve import Wanted, open_wanted, proven
from ckptfmt.engine.opened import Opened, info_of
from ckptfmt.engine.reports import GenerationInfo, Problem, Report
from ckptfmt.engine.site import Site
from ckptfmt.errors import BackendError, Corrupt, FormatError, NotFound
from ckptfmt.format import layout
from ckptfmt.format.states import OPEN_STATES, State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import GenerationRecord, LaunchRecord

PASSED_OVER_MAX = 50
"""Newer generations that are explained, newest first."""


@dataclass(frozen=True)
class PassedOver(Report):
    """A newer generation that a resume does not take."""

    id: int
    step: int
    state: str
    reason: str


@dataclass(frozen=True)
class Resume(Report):
    """The answer to "which generation would a resume take, and why"."""

    generation: GenerationInfo | None
    """None: nothing can be resumed."""
    reason: str
    proof: str | None
    """Key of the COMMIT.json that proves it."""
    passed_over: tuple[PassedOver, ...]
    problem: Problem | None
    """Why it cannot be read, if it cannot."""


def resume_of(site: Site, run: str) -> tuple[Resume, Opened | None]:
    """Decide as ``load`` and ``Checkpointer.restore`` do, and open what they would open."""
    if site.catalog is None:
        return _by_proof(site, run)
    row = site.catalog.latest(run)
    passed = _passed_over(site.catalog, run, row)
    if row is None:
        why = "no generation of this run is committed: a resume starts from scratch"
        return Resume(None, why, None, passed, None), None
    pending = (
        "" if row.proven_at is not None else "; its COMMIT.json is not on storage yet (`ckptfmt recover` proves it)"
    )
    folder = layout.generation_folder(row.run_key, row.key)
    reason = f"commit {row.commit_seq} of the run is its newest (catalog epoch {row.epoch}){pending}"
    opened, problem = _try_open(site, run, row.id)
    proof = None if row.proven_at is None else f"{folder}/{layout.COMMIT}"
    return Resume(GenerationInfo.of(row), reason, proof, passed, problem), opened


def _by_proof(site: Site, run: str) -> tuple[Resume, Opened | None]:
    first = next(proven(site, layout.run_key(run)), None)
    if first is None:
        return Resume(None, "storage proves no commit of this run", None, (), None), None
    folder, commit = first
    opened, problem = _try_open(site, run, commit.id)
    info = opened.info if opened is not None else info_of(commit)
    reason = f"commit {commit.commit_seq} is the newest that storage proves (catalog epoch {commit.epoch})"
    return Resume(info, reason, f"{folder}/{layout.COMMIT}", (), problem), opened


def _try_open(site: Site, run: str, generation_id: int) -> tuple[Opened | None, Problem | None]:
    try:
        opened = open_wanted(site, run, Wanted(id=generation_id))
        opened.require_packs()
        return opened, None
    except (FormatError, NotFound, BackendError) as error:
        return None, problem_of(error)


def problem_of(error: FormatError | NotFound | BackendError) -> Problem:
    """What stopped a generation from being opened, as one line of a report."""
    damaged = error if isinstance(error, Corrupt) else None
    return Problem(
        kind=error.kind,
        object=(damaged.object or "") if damaged else "",
        message=str(error),
        tensor=damaged.tensor if damaged else None,
        offset=damaged.offset if damaged else None,
    )


# -- newer ones -------------------------------------------------------------------------------------
def _passed_over(catalog: Catalog, run: str, taken: GenerationRecord | None) -> tuple[PassedOver, ...]:
    states = [state for state in State if state is not State.COMMITTED]
    others = catalog.generations(run=run, states=states, limit=PASSED_OVER_MAX)
    newer = [row for row in others if taken is None or _is_newer(row, taken)]
    newer += _quarantined(catalog, run, taken)
    if not newer:
        return ()
    holder = catalog.live_launch(run)
    flights = {row["generation_id"]: row for row in catalog.view("in_flight", run=run)}
    return tuple(
        PassedOver(row.id, row.step, row.state.value, _reason(row, holder, flights))
        for row in sorted(newer, key=lambda row: -row.id)
    )


def _is_newer(row: GenerationRecord, taken: GenerationRecord) -> bool:
    """A later commit, or for what never was committed a later beginning: ids are given in that order."""
    if row.commit_seq is not None and taken.commit_seq is not None:
        return (row.epoch, row.commit_seq) > (taken.epoch, taken.commit_seq)
    return row.id > taken.id


def _quarantined(catalog: Catalog, run: str, taken: GenerationRecord | None) -> list[GenerationRecord]:
    """Committed generations ahead of the one taken: each is quarantined, else it had been taken."""
    found: list[GenerationRecord] = []
    for row in catalog.generations(run=run, states=[State.COMMITTED], limit=PASSED_OVER_MAX):
        if taken is not None and row.id == taken.id:
            break
        found.append(row)
    return found


def _reason(row: GenerationRecord, holder: LaunchRecord | None, flights: Mapping[int, Mapping[str, Any]]) -> str:
    if row.state in OPEN_STATES:
        return _unfinished(row, holder, flights.get(row.id))
    if row.state is State.COMMITTED:
        return f"quarantined: {row.quarantine_reason or 'no reason was given'}"
    if row.abort_reason is not None:
        rank = "" if row.abort_rank is None else f", rank {row.abort_rank}"
        return f"failed ({row.abort_stage or 'unknown stage'}{rank}): {row.abort_reason}"
    return {State.RETIRED: "retired: gc removes its bytes", State.DELETED: "its bytes were removed"}.get(
        row.state, str(row.state)
    )


def _unfinished(row: GenerationRecord, holder: LaunchRecord | None, flight: Mapping[str, Any] | None) -> str:
    progress = ""
    if flight is not None:
        progress = f"; {flight['ranks_durable']} of {flight['ranks_expected']} ranks durable"
    if holder is not None and row.launch_id == holder.id:
        return f"{holder.host}:{holder.pid} is saving it{progress}"
    return f"its launch is gone{progress}; the next launch or `ckptfmt recover` settles it"


def shown(passed_over: Sequence[PassedOver], limit: int) -> tuple[Sequence[PassedOver], int]:
    """The first of them, and how many are left out."""
    return passed_over[:limit], max(0, len(passed_over) - limit)
