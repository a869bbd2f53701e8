"""Ranks that meet on a board, where only the coordinator speaks to the catalog: for many ranks, one connection."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from ckptfmt.engine.save.alone import Alone
from ckptfmt.engine.save.boards import Kept, save_topic
from ckptfmt.engine.save.context import Ranks
from ckptfmt.errors import CatalogError, Conflict
from ckptfmt.format.states import OPEN_STATES
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.coordination import (
    COMMON,
    STORE_GONE,
    Board,
    Body,
    Failure,
    PartReport,
    RankFailed,
    SaveRequest,
    StagedReport,
)
from ckptfmt.ports.records import GenerationRecord, LaunchRecord

T = TypeVar("T")

_STAGED_SECONDS: Final = 2.0
"""How often the coordinator looks who has staged: nobody waits for that."""


class Messages(Alone):
    """The coordinator begins, notes all acknowledgements at once, and posts the verdict; the others read and post."""

    asks_for_all = True

    def __init__(self, catalog: Catalog, launch: LaunchRecord, ranks: Ranks, board: Board) -> None:
        super().__init__(catalog, launch, ranks.members)
        self.pause = board.pause
        self.settles = ranks.is_coordinator
        self._ranks = ranks
        self._board = board
        self._kept = Kept()
        self._staged_after = 0.0
        self._noted: dict[int, set[int]] = {}
        """By save, while it is gathered: the ranks whose stage the catalog knows of."""

    def decide(self, request: SaveRequest, *, busy: bool) -> bool | None:
        """The coordinator decides. Nobody waits for the catalog, which is only told of it."""
        if len(self._members) == 1:
            return super().decide(request, busy=busy)
        if self._ranks.is_coordinator:
            self._kept.add(request.n, "choice", "fault")
            begun = bool(self._post(save_topic(request.n, "choice"), COMMON, {"begun": not busy})["begun"])
            return super().decide(request, busy=not begun)
        found = self._common(save_topic(request.n, "choice"))
        if found is None:
            self._raise_fault(request)
            return None
        return bool(found["begun"])

    def begin(self, request: SaveRequest) -> GenerationRecord | None:
        if self._ranks.is_coordinator:
            self._kept.add(request.n, "fault")
            self._raise_fault(request)
            return super().begin(request)
        found = self._common(save_topic(request.n, "begun"))
        if found is None:
            self._raise_fault(request)
            return None
        row = _row(found)
        if row.step != request.step or row.key != request.key:
            raise Conflict(
                f"save {request.n} of launch {self._launch.id} is at step {row.step} on the coordinator (rank "
                f"{self._ranks.coordinator}), this rank is at step {request.step}: the ranks have diverged",
                kind="step_differs",
            )
        return row

    def opened(self, row: GenerationRecord) -> None:
        self._kept.add(row.save_number, "begun", "staged", "part", "verdict")
        self._post(save_topic(row.save_number, "begun"), COMMON, _body(row))

    def look(self, row: GenerationRecord) -> GenerationRecord:
        return super().look(row) if self._ranks.is_coordinator else self.verdict(row) or row

    def staged(self, row: GenerationRecord, report: StagedReport) -> None:
        self._post(save_topic(row.save_number, "staged"), report.rank, dataclasses.asdict(report))

    def progress(self, row: GenerationRecord, rank: int, nbytes: int) -> None:
        """Messages are made once: only the coordinator's own is told."""
        if self._ranks.is_coordinator:
            super().progress(row, rank, nbytes)

    def report(self, row: GenerationRecord, part: PartReport) -> None:
        self._post(save_topic(row.save_number, "part"), part.rank, dataclasses.asdict(part))

    def report_failure(self, row: GenerationRecord, failure: Failure) -> None:
        self._post(save_topic(row.save_number, "fault"), COMMON, dataclasses.asdict(failure))

    def decline(self, request: SaveRequest, failure: Failure) -> None:
        if self._ranks.is_coordinator:
            self._kept.add(request.n, "fault")
        self._post(save_topic(request.n, "fault"), COMMON, dataclasses.asdict(failure))

    def _common(self, topic: str) -> Body | None:
        """The message that any rank may have been the first to leave."""
        return self._asked(lambda: self._board.peek(topic, [COMMON])).get(COMMON)

    def _post(self, topic: str, slot: int, body: Body) -> Body:
        return self._asked(lambda: self._board.post(topic, slot, body))

    def _asked(self, call: Callable[[], T]) -> T:
        """Without its board a rank has to look after itself, in the catalog."""
        try:
            return call()
        except CatalogError as error:
            self.settles = self.settles or error.kind == STORE_GONE
            raise

    def _raise_fault(self, request: SaveRequest) -> None:
        found = self._common(save_topic(request.n, "fault"))
        if found is not None:
            raise RankFailed(Failure(**found))

    def gathered(self, row: GenerationRecord) -> bool:
        fault = self._common(save_topic(row.save_number, "fault"))
        if fault is not None:
            raise RankFailed(Failure(**fault))
        parts = self._board.complete(save_topic(row.save_number, "part"), self._members)
        if parts is None:
            self._note_staged(row)
            return False
        self._noted.pop(row.save_number, None)
        self._catalog.report_ranks(row.id, [PartReport(**body).durable() for body in parts.values()])
        return True

    def _note_staged(self, row: GenerationRecord) -> None:
        """Tell the catalog who has staged since the last look: should this launch end here, somebody will ask."""
        if time.monotonic() < self._staged_after:
            return
        self._staged_after = time.monotonic() + _STAGED_SECONDS
        noted = self._noted.setdefault(row.save_number, set())
        unknown = [rank for rank in self._members if rank not in noted]
        found = self._board.peek(save_topic(row.save_number, "staged"), unknown)
        if found:
            self._catalog.report_ranks(row.id, [StagedReport(**body).staged() for body in found.values()])
            noted.update(found)

    def silent(self, row: GenerationRecord) -> list[int]:
        heard = self._board.peek(save_topic(row.save_number, "part"), self._members)
        return [rank for rank in self._members if rank not in heard]

    def announce(self, row: GenerationRecord) -> None:
        self._post(save_topic(row.save_number, "verdict"), COMMON, _body(row))
        if row.commit_seq is not None:
            self._kept.forget(row.save_number, self._remove)

    def _remove(self, n: int, what: str) -> None:
        self._board.forget(save_topic(n, what), self._members if what in ("staged", "part") else [COMMON])

    def verdict(self, row: GenerationRecord) -> GenerationRecord | None:
        try:
            found = self._common(save_topic(row.save_number, "verdict"))
        except CatalogError as error:
            if error.kind != STORE_GONE:
                raise
            now = super().look(row)  # not verdict, which would look on the board
            return None if now.state in OPEN_STATES else now
        return None if found is None else _row(found)


def _body(row: GenerationRecord) -> dict[str, Any]:
    return {"row": msgspec.to_builtins(row)}


def _row(body: Body) -> GenerationRecord:
    return msgspec.convert(body["row"], GenerationRecord)
