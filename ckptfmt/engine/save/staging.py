"""C2a: packs and staged part on the stage; and room for them there.

A save is never lost for want of a stage: without one it goes straight to the durable tier, and says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptfmt.engine.save.patience import Patience
from ckptfmt.engine.save.persist import Written, packs_bytes, write_packs
from ckptfmt.engine.save.snapshot import Snapshot
from ckptfmt.engine.save.stage_keeper import StageKeeper
from ckptfmt.engine.tiers import Tier
from ckptfmt.errors import BackendError, CatalogError, Conflict, NotFound, OutOfSpace
from ckptfmt.format import layout
from ckptfmt.format.part import Part, encode_part
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.coordination import StagedReport
from ckptfmt.ports.records import GenerationRecord

log = logging.getLogger("ckptfmt")

SKIPPED = "stage_skipped"
"""Kind of the event that says: a rank has written straight to the durable tier, for want of a stage."""


@dataclass(frozen=True)
class Staged:
    """What one rank has staged. ``part`` is as it would be acknowledged."""

    tier: Tier
    part: Part
    report: StagedReport


@dataclass(frozen=True)
class Stager:
    """The stage of one rank of a launch."""

    tier: Tier
    keeper: StageKeeper
    catalog: Catalog
    rank: int

    def stage(
        self,
        row: GenerationRecord,
        snapshot: Snapshot,
        patience: Patience,
        make_part: Callable[[Written], Part],
    ) -> Staged | None:
        """Write the snapshot to the stage. None where that cannot be, and all of it can still be written elsewhere."""
        begun: list[str] = []
        self.keeper.begin(row.key)
        try:
            self._make_room(snapshot)
            return self._write(row, snapshot, patience, make_part, begun)
        except (BackendError, CatalogError, Conflict, NotFound) as error:
            self.keeper.drop(row, begun)
            if not snapshot.rewind_all():
                snapshot.drop(error)
                raise
            self._skip(row, error)
            return None
        except BaseException as error:
            snapshot.drop(error)
            raise

    def _make_room(self, snapshot: Snapshot) -> None:
        """Free what may go until the packs fit. ``OutOfSpace`` if they don't."""
        needed, room = packs_bytes(snapshot), self.keeper.room()
        if room is not None and needed > room:
            room = self.keeper.make_room(needed)
        if room is not None and needed > room:
            raise OutOfSpace(
                f"{self.tier.name}: the save needs {needed} bytes, {max(0, room)} may be used",
                needed=needed,
                free=max(0, room),
            )

    def _write(
        self,
        row: GenerationRecord,
        snapshot: Snapshot,
        patience: Patience,
        make_part: Callable[[Written], Part],
        begun: list[str],
    ) -> Staged:
        folder, began = layout.generation_folder(row.run_key, row.key), time.perf_counter()
        backend = self.tier.backend
        backend.make_folder(folder)
        written = write_packs(
            backend,
            folder,
            self.rank,
            snapshot,
            give_up=patience.give_up,
            passing=patience.remember,
            begins=begun.append,
            elsewhere=True,
        )
        stall = snapshot.stall()  # waits for deferred copies, and raises if they are not to be used
        part = make_part(written)
        name = layout.staged_part_name(self.rank)
        begun.append(name)
        backend.create(f"{folder}/{name}", encode_part(part))
        report = StagedReport(
            rank=self.rank,
            tier=self.tier.uuid,
            nbytes=snapshot.plan.tensor_bytes,
            stall_seconds=stall,
            staged_bytes=packs_bytes(snapshot),
            staged_seconds=time.perf_counter() - began,
            retries=written.retries,
        )
        return Staged(self.tier, part, report)

    def _skip(self, row: GenerationRecord, error: Exception) -> None:
        log.warning(
            "generation %d of run %r is written straight to the durable tier, not to the %s: %s",
            row.id,
            row.run,
            self.tier.name,
            error,
        )
        try:
            detail = {"rank": self.rank, "tier": self.tier.uuid, "reason": str(error)[:500]}
            self.catalog.note(row.run, generation_id=row.id, kind=SKIPPED, detail=detail)
        except (CatalogError, Conflict) as silent:
            log.warning("generation %d of run %r: that is not recorded: %s", row.id, row.run, silent)
