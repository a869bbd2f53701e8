"""Which generation a checkpointer restores: the one that is asked for, or the newest that can be read."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptfmt.engine.arena import Arena
from ckptfmt.engine.load.restore import RestoreOptions
from ckptfmt.engine.reports import RestoreReport
from ckptfmt.engine.save.context import LaunchContext
from ckptfmt.errors import (
    AccessDenied,
    BackendError,
    CkptError,
    FormatError,
    NotFound,
    OutOfSpace,
    Unavailable,
)
from ckptfmt.format.states import State
from ckptfmt.reference import At

if TYPE_CHECKING:
    from ckptfmt.generation import Generation
    from ckptfmt.ports.records import GenerationRecord

log = logging.getLogger("ckptfmt")


class Restoring:
    """Restores generations of one run into live states."""

    def __init__(
        self,
        context: LaunchContext,
        *,
        open_row: Callable[[GenerationRecord], Generation],
        open_at: Callable[[At], Generation],
    ) -> None:
        self._context = context
        self._open_row = open_row
        self._open_at = open_at

    def fill(
        self, into: Any, at: At, options: RestoreOptions, *, fallback: bool, arena: Arena | None
    ) -> RestoreReport | None:
        """From the wanted generation; or with ``fallback``, and nothing named by ``at``, the newest that is readable.
        None only if the run never had any and none is named."""
        if at is None and self._never_committed():
            return None  # nothing was ever committed: a fresh start
        if at is not None or not fallback:
            return self._open_at(at).restore_with(into, options, arena=arena)
        unreadable: list[int] = []
        for row in self._newest_first():
            try:
                generation = self._open_row(row)
                if options.host_bytes_max is not None and generation.nbytes > options.host_bytes_max:
                    # What goes through the window cannot be taken back, and an older one must not be mixed with it.
                    generation.require_readable()
                report = generation.restore_with(into, options, arena=arena)
            except CkptError as error:
                if not is_damage(error):
                    raise
                log.error("run %r: generation %d cannot be restored: %s", row.run, row.id, error)
                unreadable.append(row.id)
                continue
            return self._fell_back(report, unreadable) if unreadable else report
        return self._open_at(None).restore_with(into, options, arena=arena)  # raises what the newest one raises

    def _never_committed(self) -> bool:
        run = self._context.site.sql().ensure_run(self._context.run.name, self._context.run.key)
        return run.next_commit_seq == 1

    def _newest_first(self) -> list[GenerationRecord]:
        """What a restore that may fall back tries, in this order."""
        rows = self._context.site.sql().generations(run=self._context.run.name, states=[State.COMMITTED])
        return [row for row in rows if row.quarantined_at is None]

    def _fell_back(self, report: RestoreReport, unreadable: list[int]) -> RestoreReport:
        log.error(
            "run %r: FELL BACK to generation %d (step %d); newer ones that cannot be read: %s",
            report.run,
            report.generation_id,
            report.step,
            unreadable,
        )
        self._context.site.sql().note(
            report.run,
            generation_id=report.generation_id,
            kind="restore_fell_back",
            detail={"unreadable": unreadable},
        )
        return dataclasses.replace(report, fell_back_from=tuple(unreadable))

    def record(self, report: RestoreReport) -> GenerationRecord:
        """Note what this launch continues; returns its row."""
        row = self._context.site.sql().generation(report.generation_id)
        if row is None:
            raise NotFound(f"generation {report.generation_id} has left the catalog during its restore")
        self._context.site.sql().set_restored_from(self._context.launch.id, row.key)
        return row


def is_damage(error: BaseException) -> bool:
    """Whether an error says of a generation that it cannot be read, so that an older one may be tried. Storage that is
    away, forbidden or full says nothing of it: an older one would not fare better."""
    if isinstance(error, Unavailable | AccessDenied | OutOfSpace):
        return False
    return isinstance(error, FormatError | NotFound | BackendError)
