"""Ranks that meet in rows of the catalog: each begins, acknowledges and looks for the verdict by itself."""

from __future__ import annotations

import dataclasses

from ckptfmt.engine.save.alone import Alone
from ckptfmt.engine.save.boards import SAVES_KEPT, save_topic
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

    def decide(self, request: SaveRequest, *, busy: bool) -> bool | None:
        """Whoever comes first decides: by the row of the save, begun or skipped."""
        try:
            if busy:
                return super().decide(request, busy=True)
            self._begin(request)
        except Conflict as error:
            if error.kind == "save_skipped":
                self._raise_declined(request)
                return False
            if error.kind == "save_begun":
                return True
            raise
        return True

    def begin(self, request: SaveRequest) -> GenerationRecord | None:
        try:
            row = self._begun.get(request.n) or self._begin(request)
        except Conflict as error:
            if error.kind == "save_skipped":
                self._raise_declined(request)
            raise
        if self._ranks.is_coordinator or self._board.peek(save_topic(request.n, "open"), [COMMON]):
            self._begun.pop(request.n, None)
            return row
        now = self.look(row)
        return now if now.state is not State.WRITING else None

    def _begin(self, request: SaveRequest) -> GenerationRecord:
        row = super().begin(request)
        if row is None:
            raise AssertionError("a catalog begins at once")
        self._begun = {n: kept for n, kept in self._begun.items() if n > request.n - SAVES_KEPT}
        self._begun[request.n] = row
        return row

    def opened(self, row: GenerationRecord) -> None:
        self._board.post(save_topic(row.save_number, "open"), COMMON, {"generation": row.id})

    def report_failure(self, row: GenerationRecord, failure: Failure) -> None:
        text = f"{failure.stage}: {failure.reason}"
        try:
            self._catalog.report_rank(row.id, self._ranks.rank, state="failed", error=text)
        except Conflict as error:
            if error.kind != "not_writing":  # it has its verdict, which tells
                raise

    def decline(self, request: SaveRequest, failure: Failure) -> None:
        launch = self._launch
        self._board.post(save_topic(request.n, "declined"), COMMON, dataclasses.asdict(failure))
        try:
            self._catalog.skip_save(launch.id, n=request.n, step=request.step, fence=launch.fence, token=launch.token)
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
                    fence=launch.fence,
                )

    def _raise_declined(self, request: SaveRequest) -> None:
        """Save ``n`` was called off by a rank before anybody began it: say by which. None: it was simply skipped."""
        found = self._board.peek(save_topic(request.n, "declined"), [COMMON]).get(COMMON)
        if found is not None:
            raise RankFailed(Failure(**found))

    def announce(self, row: GenerationRecord) -> None:
        """The row has said it; what was posted for an older save goes."""
        if row.save_number >= SAVES_KEPT:
            self._board.forget(save_topic(row.save_number - SAVES_KEPT, "open"), [COMMON])
