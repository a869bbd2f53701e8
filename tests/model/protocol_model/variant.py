"""What is explored: which actors take part, which faults may happen, and which rule is broken on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mutant(StrEnum):
    """One rule of the protocol, broken. The explorer has to find what goes wrong."""

    FENCE_ON_ROW = (
        "the fence is compared with the generation's row, not with the run's: a row of the same launch never refuses"
    )
    REPORT_BEFORE_C5 = "a save is reported once C4 is done"
    NO_VERDICT_SLOT = "an aborted generation is swept without closing its verdict slot"
    NO_TOMBSTONE = "a retired generation is deleted without RETIRED.json"
    MANIFEST_FIXED_NAME = "the manifest has one fixed name in place of its digest's"
    NO_HEALING = "a create in place does not complete what a dead writer began"
    NO_GATHER = "a merger does not wait for every rank"
    PROOF_BEFORE_COMMIT = "COMMIT.json is created before C4"
    FAILED_WITHOUT_SWAP = "a save says 'failed' without having won the swap to aborted"
    SETTLE_AFTER_RESTORE = "a new launch restores before it settles what the older one left"
    GRACE_FROM_ROW = "the grace counts from the row's retirement, not from the tombstone"
    CLOSED_BEFORE_TOMBSTONE = "the catalog says that the tombstone is durable before it is"
    ADOPT_BEFORE_HINT = "an adopted generation is called proven before its commit hint is there"
    NO_READER_RULE = "retire ignores registered readers"


class Limit(StrEnum):
    """What the protocol does not promise once the catalog was put back and nobody has noticed yet."""

    FAILED = "a save that was said to have failed stays uncommitted"
    FENCED = "a launch stays fenced"
    SWEPT = "a row that is called committed has its bytes"
    NUMBERED_TWICE = "a commit number is given once"


class Fault(StrEnum):
    """Beside these, every process may stop for ever, or for a while, between any two steps: it is not scheduled."""

    LOST = "an answer is lost: the caller repeats, or gives up"
    LATE = "a PUT or a C4 lands late"
    TORN = "a process dies in the middle of a create in place"
    ROLLBACK = "the catalog is put back to any earlier transaction"
    DEADLINE = "a save is aborted past its deadline, without a fence"


@dataclass(frozen=True)
class Variant:
    """One configuration to explore. ``actors`` are names of ``actors.ROLES``."""

    name: str
    actors: tuple[str, ...]
    faults: frozenset[Fault] = frozenset()
    ranks: int = 2
    parents: int = 1
    """How many different manifests mergers may derive: 2 where the parent can be retired in between."""
    parent_exists: bool = False
    """Whether a committed generation was there before."""
    mutant: Mutant | None = None
    one_late: bool = False
    """At most one request is under way at a time."""
    promised: Limit | None = None
    """Check as if this were promised all the same, to see that it is not."""

    @property
    def every_rank(self) -> int:
        return (1 << self.ranks) - 1

    def has(self, fault: Fault) -> bool:
        return fault in self.faults
