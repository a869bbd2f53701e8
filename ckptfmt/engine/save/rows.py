"""Ranks that meet in rows of the catalog: each begins, acknowledges and looks for the verdict by itself."""

from __future__ import annotations

import dataclasses

from ckptfmt.engine.save.alone import Alone
from ckptfmt.engine.save.boards import Kept, save_topic
from ckptfmt.engine.save.context import Ranks
from ckptfmt.engine.save.outcome import REASON_LENGTH_MAX
from ckptfmt.errors import Conflict
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.coordination import COMMON, Board, Failure, RankFailed, SaveRequest
from ckptfmt.ports.records import GenerationRecord, LaunchRecord


class Rows(Alone):
    """Every rank speaks to the catalog. The coordinator opens the folder, and merges and commits."""

    def __init__(self, catalog: Catalog, launch: LaunchRecord, ranks: Ranks, board: Board) -> None:
        super().__init__(catalog, launch, ranks.members)
        self.pause = board.pause
        self._ranks = ranks
        self._board = board
        self._begun: dict[int, GenerationRecord] = {}
        """By number, from the decision to save until its folder is there. One thread writes each."""
        self._kept = Kept()

    def decide(self, request: SaveRequest, *, busy: bool) -> bool | None:
        """Whoever comes first decides: by the row of the save, begun or skipped."""
        if len(self._members) == 1:
            return super().decide(request, busy=busy)
        try:
            if busy:
                self._skip(request)
                return False
            self._begin(request)
        except Conflict as error:
            self._raise_declined(request, error)
            if error.kind == "save_skipped":
                return False
            if error.kind == "save_begun":
                return True
            raise
        return True

    def begin(self, request: SaveRequest) -> GenerationRecord | None:
        try:
            row = self._begun.get(request.n) or self._begin(request)
        except Conflict as error:
            self._raise_declined(request, error)
            raise
        if self._ranks.is_coordinator or self._board.peek(save_topic(request.n, "open"), [COMMON]):
            self._begun.pop(request.n, None)
            return row
        now = self.look(row)
        if now.state is State.WRITING:
            return None
        self._begun.pop(request.n, None)
        return now

    def _begin(self, request: SaveRequest) -> GenerationRecord:
        row = super().begin(request)
        if row is None:
            raise AssertionError("a catalog begins at once")
        self._begun[request.n] = row
        return row

    def opened(self, row: GenerationRecord) -> None:
        self._kept.add(row.save_number, "open")
        self._board.post(save_topic(row.save_number, "open"), COMMON, {"generation": row.id})

    def report_failure(self, row: GenerationRecord, failure: Failure) -> None:
        text = f"{failure.stage}: {failure.reason}"
        try:
            self._catalog.report_rank(row.id, self._ranks.rank, state="failed", error=text)
        except Conflict as error:
            if error.kind not in ("not_writing", "rank_ended"):  # its verdict tells, given or about to be
                raise

    def decline(self, request: SaveRequest, failure: Failure) -> None:
        self._begun.pop(request.n, None)
        if self._ranks.is_coordinator:
            self._kept.add(request.n, "declined")
        self._board.post(save_topic(request.n, "declined"), COMMON, dataclasses.asdict(failure))
        try:
            self._skip(request)
        except Conflict as error:
            if error.kind not in ("save_begun", "step_differs"):
                raise
            row = self._catalog.generation_by_key(request.key)
            if row is not None and row.state is State.WRITING:
                self._catalog.abort(
                    row.id,
                    stage=failure.stage,
                    rank=failure.rank,
                    reason=failure.reason[:REASON_LENGTH_MAX],
                    fence=self._launch.fence,
                )

    def _raise_declined(self, request: SaveRequest, error: Conflict) -> None:
        """Say which rank called save ``n`` off before anybody began it: perhaps it could not even tell its step. Return
        if none did: it was simply skipped, or the ranks have diverged."""
        if error.kind not in ("save_skipped", "step_differs"):
            return
        found = self._board.peek(save_topic(request.n, "declined"), [COMMON]).get(COMMON)
        if found is not None:
            if self._ranks.is_coordinator:
                self._kept.add(request.n, "declined")
            raise RankFailed(Failure(**found))

    def announce(self, row: GenerationRecord) -> None:
        """The row has said it; what was posted for older saves goes."""
        if row.commit_seq is not None:
            self._kept.forget(row.save_number, self._remove)
        else:
            self._kept.add(row.save_number, "declined")  # a rank may have called off what others had begun

    def _remove(self, n: int, what: str) -> None:
        self._board.forget(save_topic(n, what), [COMMON])
