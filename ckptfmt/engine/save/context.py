"""What all saves of one launch have in common, and what one save was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from ckptfmt.engine.site import Site
from ckptfmt.errors import InvalidInput
from ckptfmt.ports.coordination import Coordination, SaveRequest
from ckptfmt.ports.records import LaunchRecord, RunRecord

if TYPE_CHECKING:
    from ckptfmt.engine.save.spreader import Spreader
    from ckptfmt.engine.save.staging import Stager

ReplicaCheck = Literal["full", "off"]


@dataclass(frozen=True)
class Ranks:
    """Which rank of its launch this process is, and which of them save.

    ``members`` are the ranks that save, ascending; a generation has one part of each of them. The lowest one is the
    coordinator: it alone holds the lease, merges and commits. ``replica_check`` says whether the copies of what several
    ranks hold are compared by digest.
    """

    rank: int = 0
    world_size: int = 1
    members: tuple[int, ...] = (0,)
    replica_check: ReplicaCheck = "full"

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise InvalidInput(f"rank={self.rank!r} does not fit world_size={self.world_size!r}: ranks count from 0")
        if not self.members or list(self.members) != sorted(set(self.members)):
            raise InvalidInput(f"ranks={list(self.members)!r}: name the ranks that save, each once and ascending")
        if self.members[0] < 0 or self.members[-1] >= self.world_size:
            raise InvalidInput(f"ranks={list(self.members)!r} do not fit a world of {self.world_size}")
        if self.replica_check not in ("full", "off"):
            raise InvalidInput(f'replica_check={self.replica_check!r}: give "full" or "off"')

    @property
    def coordinator(self) -> int:
        return self.members[0]

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank merges and commits."""
        return self.rank == self.coordinator

    @property
    def saves(self) -> bool:
        """Whether this rank writes anything."""
        return self.rank in self.members

    @property
    def every(self) -> range:
        """All ranks of the launch, also those that do not save."""
        return range(self.world_size)


ALONE: Final = Ranks()
"""The ranks of a launch of one process."""


@dataclass(frozen=True)
class LaunchContext:
    """One launch of one run."""

    site: Site
    run: RunRecord
    launch: LaunchRecord
    ranks: Ranks
    coordination: Coordination
    commit_timeout: float
    stager: Stager | None = None
    """The stage that this rank writes to first."""
    spreader: Spreader | None = None
    """What brings commits to the replicas."""
    bytes_max: int | None = None
    """Of the packs of all generations of the run that are not deleted."""


@dataclass(frozen=True)
class SaveOrder:
    """One save. ``created_at`` is when the snapshot was frozen (RFC 3339)."""

    n: int
    step: int
    key: str
    tags: tuple[str, ...]
    created_at: str

    def request(self, deadline_seconds: float) -> SaveRequest:
        """C1 of it."""
        return SaveRequest(self.n, self.step, self.key, self.tags, deadline_seconds)
