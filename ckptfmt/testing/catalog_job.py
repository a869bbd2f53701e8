"""A job driven by hand: what the catalog suites use to bring generations into a wanted state."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from ckptfmt.format.states import State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import (
    AdoptFacts,
    DurableFacts,
    GenerationRecord,
    LaunchRecord,
    LaunchRequest,
    PackRecord,
    ReplicaPack,
)

REPOSITORY = "6f0f6f1c-9f0e-4b55-8c0f-000000000001"
COPY = "6f0f6f1c-9f0e-4b55-8c0f-0000000000c1"
"""A replica."""
OTHER_REPOSITORY = "6f0f6f1c-9f0e-4b55-8c0f-000000000002"


class MakeCatalog(Protocol):
    """Opens a new catalog object on the one database of the test, which it creates at the first call."""

    def __call__(self, *, repository: str = REPOSITORY, mode: str = "w") -> Catalog: ...


RawSql = Callable[[str, Mapping[str, Any]], list[tuple[Any, ...]]]
"""Runs one plain SQL statement with ``:name`` parameters, past the catalog under test, and commits.

Values may be aware datetimes, to be given in the database's own form. Raises if the database refuses.
"""


def request(host: str = "node1", pid: int = 100, *, world_size: int = 1, token: str | None = None) -> LaunchRequest:
    """A launch request of a process of its own; the token is random unless given."""
    return LaunchRequest(
        token=token or secrets.token_hex(16),
        host=host,
        pid=pid,
        boot_id=f"boot-{host}",
        pid_started=f"started-{pid}",
        world_size=world_size,
    )


@dataclass
class Job:
    """One launch of a run. ``begin`` to ``proven`` take a generation as far as their name says."""

    catalog: Catalog
    run: str
    launch: LaunchRecord
    saves: int = 0
    begun: list[int] = field(default_factory=list)

    @classmethod
    def start(
        cls, catalog: Catalog, run: str = "llama", *, world_size: int = 1, displace: int | None = None, pid: int = 100
    ) -> Job:
        catalog.ensure_run(run, f"{run}-key")
        wanted = request(pid=pid, world_size=world_size)
        return cls(catalog, run, catalog.acquire_launch(run, wanted, lease_seconds=60, displace=displace))

    @property
    def fence(self) -> int:
        return self.launch.fence

    @property
    def ranks(self) -> range:
        return range(self.launch.world_size)

    def key(self, n: int) -> str:
        return f"{self.launch.token}-{n}"

    def begin(
        self, step: int = 0, *, tags: Sequence[str] = (), deadline_seconds: float | None = 600.0
    ) -> GenerationRecord:
        n = self.saves
        self.saves += 1
        ticket = self.catalog.begin_save(
            self.launch.id,
            n=n,
            step=step,
            key=self.key(n),
            ranks=self.ranks,
            deadline_seconds=deadline_seconds,
            fence=self.fence,
            token=self.launch.token,
            tags=tags,
        )
        assert ticket.created
        self.begun.append(ticket.generation.id)
        return ticket.generation

    def written(self, step: int = 0, **kw: Any) -> GenerationRecord:
        """Still ``writing``, with every rank durable."""
        generation = self.begin(step, **kw)
        for rank in self.ranks:
            self.report(generation.id, rank)
        return generation

    def report(self, generation_id: int, rank: int) -> None:
        self.catalog.report_rank(
            generation_id,
            rank,
            state="durable",
            part_name=f"r{rank:05d}.part.json",
            part_digest=f"part-{generation_id}-{rank}",
            nbytes=1000 + rank,
            stall_seconds=0.25 + rank,
            write_seconds=2.0 + rank,
            retries=rank,
        )

    def facts(self, generation: GenerationRecord, *, parent_key: str | None = None) -> DurableFacts:
        packs = [
            PackRecord(generation.key, f"r{rank:05d}-p000.safetensors", rank, 1000 + rank, f"header-{rank}")
            for rank in self.ranks
        ]
        digest = f"digest-{generation.key}"
        return DurableFacts(f"manifest-{digest}.json.zst", digest, 321, 987, parent_key, packs)

    def durable(self, step: int = 0, **kw: Any) -> GenerationRecord:
        generation = self.written(step, **kw)
        return self.catalog.mark_durable(generation.id, self.facts(generation), fence=self.fence)

    def committed(self, step: int = 0, **kw: Any) -> GenerationRecord:
        return self.catalog.commit(self.durable(step, **kw).id, fence=self.fence)

    def proven(self, step: int = 0, **kw: Any) -> GenerationRecord:
        return self.catalog.set_proven(self.committed(step, **kw).id)

    def noted(self, generation: GenerationRecord, tier: str = COPY) -> GenerationRecord:
        """All its packs are on the tier, which becomes a replica if it is not known."""
        if tier not in {known.uuid for known in self.catalog.tiers()}:
            self.catalog.ensure_tier(tier, role="replica", url="s3://copy/ckpts", host=None)
        packs = [ReplicaPack(pack.generation_key, pack.name, pack.name) for pack in self.catalog.packs(generation.id)]
        self.catalog.note_replicas(generation.id, tier, packs)
        return generation

    def replicated(self, generation: GenerationRecord, tier: str = COPY) -> GenerationRecord:
        """The tier holds it whole."""
        self.noted(generation, tier)
        self.catalog.mark_replicated(generation.id, tier)
        return generation

    def aborted(self, step: int = 0, **kw: Any) -> GenerationRecord:
        generation = self.begin(step, **kw)
        return self.catalog.abort(generation.id, stage="persist", rank=0, reason="disk full", fence=self.fence)

    def retired(self, step: int = 0) -> GenerationRecord:
        """Makes a newer generation first, for the newest is never retired."""
        generation = self.proven(step)
        self.proven(step + 1)
        return self.catalog.retire(generation.id)

    def in_state(self, state: State) -> GenerationRecord:
        """A generation in ``state``: written if writing, proven if committed."""
        if state is State.DELETED:
            return self.catalog.mark_swept(self.retired().id)
        if state is State.COMMITTED:
            generation = self.proven()
            self.proven(1)
            return generation
        ways = {
            State.WRITING: self.written,
            State.DURABLE: self.durable,
            State.ABORTED: self.aborted,
            State.RETIRED: self.retired,
        }
        return ways[state]()

    def verdict(self, generation: GenerationRecord, *, commit_seq: int = 50, epoch: int = 1) -> AdoptFacts:
        """What a COMMIT.json of the generation would say."""
        return AdoptFacts(
            commit_seq=commit_seq,
            committed_at=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
            commit_fence=self.fence,
            epoch=epoch,
            durable=self.facts(generation),
        )

    def taken_over(self) -> Job:
        """A newer launch of the same run."""
        return Job.start(self.catalog, self.run, displace=self.launch.id, pid=200)


def require(record: GenerationRecord | None) -> GenerationRecord:
    """The record, which the test expects to be there."""
    assert record is not None
    return record
