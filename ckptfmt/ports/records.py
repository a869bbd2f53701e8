"""The rows of the SQL catalog as plain values (spec/catalog.md). Times are aware UTC, by the database's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from ckptfmt.format.states import State

RankState = Literal["writing", "staged", "durable", "failed"]
TierRole = Literal["durable", "stage", "replica"]


@dataclass(frozen=True)
class CatalogIdentity:
    """Which catalog this is: its uuid and the epoch under which it governs a root."""

    uuid: str
    epoch: int


@dataclass(frozen=True)
class RunRecord:
    id: int
    name: str
    key: str
    """The run's folder name on storage (``format.layout.run_key``)."""
    fence: int
    next_commit_seq: int
    retention_hold: bool
    created_at: datetime


@dataclass(frozen=True)
class LaunchRequest:
    """Who asks for a run's lease. ``pid_started`` with ``boot_id`` tells a reused pid apart."""

    token: str
    host: str
    pid: int
    boot_id: str
    pid_started: str
    world_size: int = 1
    kind: Literal["training", "recover"] = "training"


@dataclass(frozen=True)
class LaunchRecord:
    id: int
    run: str
    token: str
    kind: str
    fence: int
    host: str
    pid: int
    boot_id: str
    pid_started: str
    world_size: int
    restored_from: str | None
    """Key of the generation that this launch restored."""
    last_step: int | None
    lease_until: datetime
    live: bool
    """Not closed, and the lease has not lapsed by the database's clock."""
    created_at: datetime
    closed_at: datetime | None


@dataclass(frozen=True)
class GenerationRecord:
    id: int
    run: str
    run_key: str
    key: str
    step: int
    state: State
    launch_id: int
    launch_token: str
    fence: int
    """Fence of the launch that began it (after a takeover it is finished under a higher one)."""
    save_number: int
    world_size: int
    parent_key: str | None
    commit_seq: int | None
    epoch: int
    manifest_name: str | None
    manifest_digest: str | None
    manifest_bytes: int | None
    nbytes: int | None
    """Tensor bytes, set when durable."""
    stall_seconds: float | None
    """Largest over the ranks."""
    tags: tuple[str, ...]
    pinned: bool
    created_at: datetime
    deadline: datetime | None
    durable_at: datetime | None
    committed_at: datetime | None
    commit_fence: int | None
    """Fence under which it was committed; COMMIT.json records this one."""
    proven_at: datetime | None
    abort_stage: str | None
    abort_rank: int | None
    abort_reason: str | None
    quarantined_at: datetime | None
    quarantine_reason: str | None
    retired_at: datetime | None
    swept_at: datetime | None
    """Last time gc removed its objects."""
    tiers: tuple[str, ...] = ()
    """Uuids of the tiers beside the durable one that held all packs when it became durable, sorted; COMMIT.json
    repeats them."""


@dataclass(frozen=True)
class PackRecord:
    generation_key: str
    """The generation whose folder holds the pack."""
    name: str
    rank: int
    nbytes: int
    header_digest: str


@dataclass(frozen=True)
class RankRecord:
    generation_id: int
    rank: int
    state: RankState
    part_name: str | None
    part_digest: str | None
    nbytes: int | None
    stall_seconds: float | None
    write_seconds: float | None
    retries: int
    error: str | None
    updated_at: datetime
    staged_tier: str | None = None
    """Uuid of the stage that holds its packs."""
    staged_bytes: int | None = None
    staged_seconds: float | None = None
    staged_at: datetime | None = None
    """When it was first reported as staged, and its snapshot's memory was free. None: it never was."""
    durable_at: datetime | None = None
    """When it was reported as durable."""
    replicated_bytes: int | None = None
    """How many bytes of its packs the durable tier holds so far."""


@dataclass(frozen=True)
class RankReport:
    """What one rank of a generation tells (C2). None leaves what was told before."""

    rank: int
    state: RankState
    part_name: str | None = None
    """With the digest, needed for ``durable``."""
    part_digest: str | None = None
    nbytes: int | None = None
    stall_seconds: float | None = None
    write_seconds: float | None = None
    retries: int = 0
    error: str | None = None
    """Needed for ``failed``."""
    staged_tier: str | None = None
    """Uuid of the stage that holds its packs; the catalog need not know it by ``ensure_tier``."""
    staged_bytes: int | None = None
    """Bytes of the packs on the stage."""
    staged_seconds: float | None = None
    """From the first byte to the staged part."""
    replicated_bytes: int | None = None
    """As ``report_progress`` tells it; never lowered."""


@dataclass(frozen=True)
class TierRecord:
    """A place that holds objects of the repository (spec/tiers.md).

    The durable tier needs no row; where it has one, its uuid is the repository's.
    """

    id: int
    uuid: str
    """As its mark, ``tier.json``, says."""
    role: TierRole
    url: str
    """Where it was last opened, for display: no password."""
    host: str | None
    """The only host that a stage can be reached from."""
    created_at: datetime


@dataclass(frozen=True)
class ReplicaPack:
    """A pack that a tier holds: the pack as the manifest names it, and the name of the object there."""

    generation_key: str
    pack: str
    name: str


@dataclass(frozen=True)
class ReplicaRecord:
    """One pack on one tier."""

    generation_key: str
    """The generation whose folder holds the pack."""
    pack: str
    tier: str
    """Its uuid."""
    name: str
    """Of the object there; another one than the pack's after a repair."""
    nbytes: int
    verified_at: datetime
    """When its bytes were last compared with their digests."""


@dataclass(frozen=True)
class EventRecord:
    """One line of history. ``seq`` counts per run from 1."""

    seq: int
    run: str
    generation_id: int | None
    at: datetime
    kind: str
    from_state: str | None
    to_state: str | None
    actor: str
    detail: Mapping[str, Any]
    library: str


@dataclass(frozen=True)
class DurableFacts:
    """What C3 records when a generation becomes durable."""

    manifest_name: str
    manifest_digest: str
    manifest_bytes: int
    nbytes: int
    parent_key: str | None
    packs: Sequence[PackRecord] = field(default_factory=tuple)
    tiers: Sequence[str] = ()
    """Uuids of the tiers beside the durable one that hold all packs by now (``durable_on``)."""


@dataclass(frozen=True)
class AdoptFacts:
    """A valid committed verdict found on storage, and the manifest it names."""

    commit_seq: int
    committed_at: datetime
    commit_fence: int
    epoch: int
    durable: DurableFacts


@dataclass(frozen=True)
class SaveTicket:
    """The answer to C1."""

    generation: GenerationRecord
    created: bool
    """False when the same (launch, n) had begun before: the answer was lost, or another rank came first."""
