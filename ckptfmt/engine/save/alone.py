"""Coordination at world size 1: the catalog's own rows are the meeting place."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from ckptfmt.errors import CatalogError, NotFound
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.coordination import Failure, PartReport, RankFailed, SaveRequest, StagedReport
from ckptfmt.ports.records import GenerationRecord, LaunchRecord

log = logging.getLogger("ckptfmt")


class Alone:
    """The only rank of its launch that saves: it reports to the catalog and finds its own report there."""

    pause = 0.02
    settles = True
    asks_for_all = False

    def __init__(self, catalog: Catalog, launch: LaunchRecord, members: Sequence[int] = (0,)) -> None:
        self._catalog = catalog
        self._launch = launch
        self._members = tuple(members)

    def decide(self, request: SaveRequest, *, busy: bool) -> bool | None:
        if busy:
            try:
                self._skip(request)
            except CatalogError as error:  # a busy catalog is no reason to stop training: nothing was to be saved
                told = "run %r: that save %d (step %d) was skipped is not recorded: %s"
                log.warning(told, self._launch.run, request.n, request.step, error)
        return not busy

    def _skip(self, request: SaveRequest) -> None:
        launch = self._launch
        self._catalog.skip_save(launch.id, n=request.n, step=request.step, fence=launch.fence, token=launch.token)

    def begin(self, request: SaveRequest) -> GenerationRecord | None:
        launch = self._launch
        ticket = self._catalog.begin_save(
            launch.id,
            n=request.n,
            step=request.step,
            key=request.key,
            ranks=self._members,
            deadline_seconds=request.deadline_seconds,
            fence=launch.fence,
            token=launch.token,
            tags=request.tags,
        )
        return ticket.generation

    def opened(self, row: GenerationRecord) -> None:
        """Nobody waits for it."""

    def look(self, row: GenerationRecord) -> GenerationRecord:
        now = self._catalog.generation(row.id)
        if now is None:
            raise NotFound(f"generation {row.id} (run {row.run!r}, step {row.step}) is gone from the catalog")
        return now

    def staged(self, row: GenerationRecord, report: StagedReport) -> None:
        self._catalog.report_rank(row.id, **dataclasses.asdict(report.staged()))

    def progress(self, row: GenerationRecord, rank: int, nbytes: int) -> None:
        self._catalog.report_progress(row.id, rank, nbytes)

    def report(self, row: GenerationRecord, part: PartReport) -> None:
        self._catalog.report_rank(row.id, **dataclasses.asdict(part.durable()))

    def report_failure(self, row: GenerationRecord, failure: Failure) -> None:
        """Nobody waits for it: the row gets its verdict at once."""

    def decline(self, request: SaveRequest, failure: Failure) -> None:
        """Nobody waits for it."""

    def gathered(self, row: GenerationRecord) -> bool:
        ranks = self._catalog.ranks(row.id)
        failed = next((rank for rank in ranks if rank.state == "failed"), None)
        if failed is not None:
            raise RankFailed(Failure(failed.rank, "persist", "", failed.error or "it failed"))
        if ranks and all(rank.state == "durable" for rank in ranks):
            return True
        now = self.look(row)
        if now.state is not State.WRITING:
            raise ended(now)
        return False

    def silent(self, row: GenerationRecord) -> list[int]:
        return [rank.rank for rank in self._catalog.ranks(row.id) if rank.state not in ("durable", "failed")]

    def announce(self, row: GenerationRecord) -> None:
        """Nobody waits for it."""

    def verdict(self, row: GenerationRecord) -> GenerationRecord | None:
        now = self.look(row)
        return None if now.state in (State.WRITING, State.DURABLE) else now


def ended(row: GenerationRecord) -> RankFailed:
    """What a rank raises that finds its generation no longer ``writing``."""
    reason = (
        f"generation {row.id} is {row.state}: {row.abort_reason}"
        if row.abort_reason
        else f"generation {row.id} is {row.state}"
    )
    return RankFailed(Failure(row.abort_rank, row.abort_stage or "persist", "", reason))
