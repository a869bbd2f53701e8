"""How the ranks of one launch agree, without collectives on the save path.

A ``Board`` carries small messages between ranks: rows of the catalog, or keys of torch.distributed's store. On it the
ranks agree on what to restore and when to save. A ``Coordination`` brings one save to its verdict; at world size 1 the
catalog's own rows are enough for it (``engine.save.alone``).

No method blocks: each looks once and answers, and the caller looks again after about ``pause`` seconds. Errors cross
ranks as plain text, never as objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ckptfmt.ports.records import GenerationRecord, RankReport

Body = Mapping[str, Any]
"""Plain JSON values."""

COMMON = 0
"""The slot of a message that any rank may be the first to leave: there is one for all of them."""

STORE_GONE: Final = "store_gone"
"""Kind of ``CatalogError`` that says: the board is lost for good, with the process that held it."""


@dataclass(frozen=True)
class SaveRequest:
    """C1: one save, as every rank of the launch asks for it."""

    n: int
    step: int
    key: str
    tags: tuple[str, ...]
    deadline_seconds: float


@dataclass(frozen=True)
class PartReport:
    """One rank's acknowledgement: its part is durable on the durable tier."""

    rank: int
    part_name: str
    part_digest: str
    nbytes: int
    stall_seconds: float
    write_seconds: float
    retries: int
    staged_tier: str | None = None
    """Uuid of the stage that its packs were copied from; None: they were written straight to the durable tier."""
    staged_bytes: int | None = None
    staged_seconds: float | None = None

    def durable(self) -> RankReport:
        """As the catalog is told."""
        return RankReport(
            rank=self.rank,
            state="durable",
            part_name=self.part_name,
            part_digest=self.part_digest,
            nbytes=self.nbytes,
            stall_seconds=self.stall_seconds,
            write_seconds=self.write_seconds,
            retries=self.retries,
            staged_tier=self.staged_tier,
            staged_bytes=self.staged_bytes,
            staged_seconds=self.staged_seconds,
            replicated_bytes=self.staged_bytes,
        )


@dataclass(frozen=True)
class StagedReport:
    """One rank's packs and staged part are on its stage. No acknowledgement.

    ``nbytes`` counts the tensors, ``staged_bytes`` the packs."""

    rank: int
    tier: str
    nbytes: int
    stall_seconds: float
    staged_bytes: int
    staged_seconds: float
    retries: int

    def staged(self) -> RankReport:
        """As the catalog is told."""
        return RankReport(
            rank=self.rank,
            state="staged",
            nbytes=self.nbytes,
            stall_seconds=self.stall_seconds,
            retries=self.retries,
            staged_tier=self.tier,
            staged_bytes=self.staged_bytes,
            staged_seconds=self.staged_seconds,
        )


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank, in words: the class of its error, its text, and the stage of the save."""

    rank: int | None
    """None: of no rank, as when a newer launch took the run."""
    stage: str
    kind: str
    text: str

    @property
    def reason(self) -> str:
        return f"{self.kind}: {self.text}" if self.kind else self.text


class RankFailed(Exception):
    """A save has failed on some rank, or because of one that stayed silent. Never leaves the engine."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        who = "it" if self.failure.rank is None else f"rank {self.failure.rank}"
        return f"{who} failed in stage {self.failure.stage}: {self.failure.reason}"


class Board(Protocol):
    """Messages between the ranks of one launch, each made once and never changed.

    Topics count by themselves ("restore/3/choice"); ``slot`` is the rank a message is from, or ``COMMON``.
    A board that cannot be reached is ``CatalogError``: with ``transient=True``, or of the kind ``STORE_GONE``. Every
    call may be repeated.
    """

    pause: float
    """Seconds after which to look again."""

    def post(self, topic: str, slot: int, body: Body) -> Body:
        """Leave a message unless there is one; return what stands there. Whoever comes first, decides."""

    def peek(self, topic: str, slots: Sequence[int]) -> dict[int, Body]:
        """The messages that are there."""

    def complete(self, topic: str, slots: Sequence[int]) -> dict[int, Body] | None:
        """The messages of all ``slots``, or None while one is missing: cheaper than to ask for each."""

    def forget(self, topic: str, slots: Sequence[int]) -> None:
        """Remove messages that every rank has read."""


class Coordination(Protocol):
    """The meeting place of the ranks that save."""

    pause: float
    settles: bool
    """Whether this rank may give a verdict through the catalog by itself; else it asks the coordinator first."""
    asks_for_all: bool
    """Whether only the coordinator speaks to the catalog, for all ranks."""

    def decide(self, request: SaveRequest, *, busy: bool) -> bool | None:
        """With ``on_busy="skip"``: whether the save begins, once for all ranks. None while that is not known.

        ``busy``: this rank would skip it. ``RankFailed`` as with ``begin``.
        """

    def begin(self, request: SaveRequest) -> GenerationRecord | None:
        """C1: find or insert the generation. None while it is not there, or its folder was not made.

        ``Conflict`` if another rank saves another step as save ``n``, or it was skipped. ``RankFailed`` if a
        rank has failed before it could begin.
        """

    def opened(self, row: GenerationRecord) -> None:
        """The coordinator has made the folder: tell the others."""

    def look(self, row: GenerationRecord) -> GenerationRecord:
        """The generation as it stands now, as far as this rank can know without asking more than it should."""

    def staged(self, row: GenerationRecord, report: StagedReport) -> None:
        """C2a is done on this rank: for people, and for whoever recovers."""

    def progress(self, row: GenerationRecord, rank: int, nbytes: int) -> None:
        """So many bytes of this rank's packs are on the durable tier: for people. ``Conflict`` as with ``report``."""

    def report(self, row: GenerationRecord, part: PartReport) -> None:
        """C2: acknowledge. ``Conflict`` if the generation is no longer ``writing``."""

    def report_failure(self, row: GenerationRecord, failure: Failure) -> None:
        """This rank has failed: the others need not wait for it."""

    def decline(self, request: SaveRequest, failure: Failure) -> None:
        """This rank failed before it could begin save ``n``: the others are not to wait for it until the deadline."""

    def gathered(self, row: GenerationRecord) -> bool:
        """C3, asked by the coordinator: whether every expected rank has acknowledged, and the catalog says so.

        ``RankFailed`` names the one that failed.
        """

    def silent(self, row: GenerationRecord) -> list[int]:
        """The expected ranks that have neither acknowledged nor failed, as far as can be seen."""

    def announce(self, row: GenerationRecord) -> None:
        """The coordinator knows the verdict: ``row`` is committed or aborted."""

    def verdict(self, row: GenerationRecord) -> GenerationRecord | None:
        """The generation in its last state (committed and proven, or aborted), or None while it is under way."""
