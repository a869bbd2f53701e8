"""Coordination at world size 1: the catalog's own rows are the meeting place."""

from __future__ import annotations

import time

from ckptfmt.errors import SaveFailed
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.coordination import PartReport

_POLL_SECONDS = 0.02


class Alone:
    """The only rank of its launch: it reports to the catalog and finds its own report there."""

    rank = 0
    world_size = 1

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def is_coordinator(self) -> bool:
        return True

    def report(self, generation_id: int, part: PartReport) -> None:
        self._catalog.report_rank(
            generation_id,
            part.rank,
            state="durable",
            part_name=part.part_name,
            part_digest=part.part_digest,
            nbytes=part.nbytes,
            stall_seconds=part.stall_seconds,
            write_seconds=part.write_seconds,
            retries=part.retries,
        )

    def report_failure(self, generation_id: int, *, stage: str, reason: str) -> None:
        self._catalog.report_rank(generation_id, self.rank, state="failed", error=f"{stage}: {reason}")

    def gather(self, generation_id: int, *, timeout: float) -> list[PartReport]:
        until = time.monotonic() + timeout
        while True:
            rows = self._catalog.ranks(generation_id)
            failed = next((row for row in rows if row.state == "failed"), None)
            if failed is not None:
                raise SaveFailed(
                    f"generation {generation_id}: rank {failed.rank} failed: {failed.error}",
                    stage="persist",
                    rank=failed.rank,
                    generation_id=generation_id,
                )
            if rows and all(row.state == "durable" for row in rows):
                return [
                    PartReport(
                        rank=row.rank,
                        part_name=row.part_name or "",
                        part_digest=row.part_digest or "",
                        nbytes=row.nbytes or 0,
                        stall_seconds=row.stall_seconds or 0.0,
                        write_seconds=row.write_seconds or 0.0,
                        retries=row.retries,
                    )
                    for row in rows
                ]
            if time.monotonic() > until:
                silent = [row.rank for row in rows if row.state != "durable"]
                raise SaveFailed(
                    f"generation {generation_id}: ranks {silent} did not acknowledge in {timeout:.0f} s",
                    stage="persist",
                    rank=silent[0] if silent else None,
                    generation_id=generation_id,
                )
            time.sleep(_POLL_SECONDS)
