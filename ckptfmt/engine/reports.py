"""Frozen answers for programs and people: the library returns them, the CLI prints them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from ckptfmt.ports.records import GenerationRecord


class Report:
    """``as_json()`` for frozen dataclasses: plain JSON values, times as RFC 3339 text."""

    def as_json(self) -> dict[str, Any]:
        return {item.name: _plain(getattr(self, item.name)) for item in dataclasses.fields(self)}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, Report):
        return value.as_json()
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@dataclass(frozen=True)
class GenerationInfo(Report):
    """One generation as the catalog knows it (by proof: as COMMIT.json tells it). Times are aware UTC."""

    id: int
    key: str
    run: str
    step: int
    state: str
    nbytes: int | None
    tags: tuple[str, ...]
    parent_key: str | None
    commit_seq: int | None
    world_size: int | None
    created_at: datetime | None
    durable_at: datetime | None
    committed_at: datetime | None
    proven_at: datetime | None
    stall_seconds: float | None
    pinned: bool = False
    abort_stage: str | None = None
    abort_rank: int | None = None
    abort_reason: str | None = None
    quarantine_reason: str | None = None

    @property
    def proof_pending(self) -> bool:
        """Committed in the catalog, but COMMIT.json is not yet on storage: ``recover`` finishes it."""
        return self.state == "committed" and self.proven_at is None

    @classmethod
    def of(cls, record: GenerationRecord) -> GenerationInfo:
        return cls(
            id=record.id,
            key=record.key,
            run=record.run,
            step=record.step,
            state=record.state.value,
            nbytes=record.nbytes,
            tags=record.tags,
            parent_key=record.parent_key,
            commit_seq=record.commit_seq,
            world_size=record.world_size,
            created_at=record.created_at,
            durable_at=record.durable_at,
            committed_at=record.committed_at,
            proven_at=record.proven_at,
            stall_seconds=record.stall_seconds,
            pinned=record.pinned,
            abort_stage=record.abort_stage,
            abort_rank=record.abort_rank,
            abort_reason=record.abort_reason,
            quarantine_reason=record.quarantine_reason,
        )


@dataclass(frozen=True)
class RunInfo(Report):
    """One run: how many generations it has, the latest committed one, and who holds it."""

    name: str
    committed: int
    latest: GenerationInfo | None
    in_flight: int
    holder: str | None
    """``host:pid`` of the launch that holds the run's lease."""
    nbytes: int
    """Bytes of the packs of its committed generations; read by proof 0, for that would take every manifest."""


@dataclass(frozen=True)
class RestoreReport(Report):
    """What a restore did. Names are dotted names in the live state."""

    generation_id: int
    run: str
    step: int
    metadata: Mapping[str, Any]
    nbytes: int
    seconds: float
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    fell_back_from: tuple[int, ...] = ()
    """Ids of newer generations that could not be read (``fallback=True``)."""
    amplification: float = 1.0
    """Bytes of the chunks that were read over ``nbytes``: 1.0 unless this rank needed only parts of chunks."""
    sources: tuple[ReadFrom, ...] = ()
    """The tiers that they came from, nearest first."""
    damaged: tuple[Problem, ...] = ()
    """What was read from another place instead: one entry for each object."""
    retries: int = 0
    """How often a chunk was read once more from the same place, because it differed from its digest, and was right."""


@dataclass(frozen=True)
class ReadFrom(Report):
    """One tier that gave bytes."""

    role: str
    """``durable``, ``stage`` or ``replica``."""
    url: str
    nbytes: int


@dataclass(frozen=True)
class Problem(Report):
    """One thing wrong with one object."""

    kind: str
    """The error's ``kind``: corrupt, not_found, unverifiable, ..."""
    object: str
    message: str
    tensor: str | None = None
    offset: int | None = None
    tier: str | None = None
    """URL of the tier on which that object is; None: the place that was opened."""


@dataclass(frozen=True)
class VerifiedTier(Report):
    """One tier, and what it holds of a generation."""

    role: str
    url: str
    packs: int
    """That were read."""
    absent: int
    """Packs that a stage or replica does not have."""
    nbytes: int
    problems: int
    repaired: int
    """Packs that are whole as a repair only."""


@dataclass(frozen=True)
class VerifyReport(Report):
    """All bytes of one generation, read and compared with their digests."""

    generation_id: int
    run: str
    step: int
    nbytes: int
    chunks: int
    seconds: float
    problems: tuple[Problem, ...] = ()
    repaired: tuple[Problem, ...] = ()
    """What is wrong with objects beside which a whole repair lies: readers find that, so it is no problem."""
    tiers: tuple[VerifiedTier, ...] = ()
    """The durable one first."""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class RecoverAction(Report):
    """What recover did, or with ``dry_run`` would do, to one generation."""

    generation_id: int
    run: str
    step: int
    action: str
    """``proved``, ``committed``, ``aborted``, ``adopted``, ``closed`` (a retired one gets its tombstone) or ``left``
    (a live launch is writing it, or storage contradicts the catalog)."""
    reason: str


@dataclass(frozen=True)
class RecoverReport(Report):
    dry_run: bool
    actions: tuple[RecoverAction, ...] = ()


@dataclass(frozen=True)
class GcItem(Report):
    """One object that gc removed, or with ``dry_run`` would remove."""

    generation_id: int
    run: str
    object: str
    nbytes: int
    reason: str


@dataclass(frozen=True)
class GcReport(Report):
    dry_run: bool
    items: tuple[GcItem, ...] = ()
    unknown: tuple[str, ...] = ()
    """Folders that no catalog row explains: reported, never deleted."""
    waiting: tuple[str, ...] = ()
    """Retired generations still inside the grace period, with the time when they become due."""
    damaged: tuple[str, ...] = ()
    """Generations whose verdict or tombstone on storage cannot be read, or contradicts the catalog, and why: nothing of
    them was removed."""
    adopted: tuple[int, ...] = field(default=())
    """Aborted rows whose storage held a committed verdict: repaired in place of being deleted."""
    held: tuple[str, ...] = ()
    """Runs under retention hold: nothing of them was looked at."""

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


@dataclass(frozen=True)
class RebuiltRun(Report):
    """One run after a rebuild: how many generations it has by state, and what its counters were lifted to."""

    run: str
    committed: int
    retired: int
    aborted: int
    deleted: int
    latest: int | None
    """Id of the generation that a resume takes now."""
    next_commit_seq: int
    fence: int


@dataclass(frozen=True)
class RebuiltGeneration(Report):
    """What a rebuild did with one generation of which storage has a valid verdict."""

    generation_id: int
    run: str
    step: int
    key: str
    state: str
    action: str
    """``restored`` (had no row), ``adopted``, ``aborted`` or ``retired`` (its row was behind)."""
    reason: str


@dataclass(frozen=True)
class SetApart(Report):
    """A folder that a rebuild gave no row, and why."""

    folder: str
    reason: str


@dataclass(frozen=True)
class RebuildReport(Report):
    """What ``db rebuild`` or ``db adopt`` did."""

    how: str
    """``rebuild``, ``merge`` or ``adopt``."""
    catalog: str
    uuid: str
    epoch: int
    """The catalog governs the root under this uuid and epoch now."""
    set_aside: str | None
    """File name of the damaged database that was kept."""
    runs: tuple[RebuiltRun, ...] = ()
    changes: tuple[RebuiltGeneration, ...] = ()
    """What was not in the catalog as storage proves it."""
    unchanged: int = 0
    """Generations whose rows said already what storage proves."""
    quarantined: tuple[SetApart, ...] = ()
    """Committed generations that cannot be read: they have a row, and are left out of ``latest``."""
    left_out: tuple[SetApart, ...] = ()
    """Folders with a damaged or foreign verdict, or one that contradicts another: no row was made for them."""
    unfinished: tuple[SetApart, ...] = ()
    """Folders without a verdict: no row was made, nothing is deleted."""
    lost: tuple[str, ...] = ()
    """What storage does not hold, and a rebuild cannot bring back."""


def human_bytes(nbytes: float) -> str:
    """Bytes for people, in decimal units: ``1.7 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")
