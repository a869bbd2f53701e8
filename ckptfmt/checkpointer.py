"""The async manager of one run: saves that overlap training, restores, and the decision when to save."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptfmt import exits
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.families import Families
from ckptfmt.engine.leases import Lease
from ckptfmt.engine.load.names import Rename
from ckptfmt.engine.load.ranks import RankMap
from ckptfmt.engine.load.restore import RestoreOptions
from ckptfmt.engine.patterns import Patterns
from ckptfmt.engine.reports import GenerationInfo, RestoreReport
from ckptfmt.engine.save.context import LaunchContext
from ckptfmt.engine.save.outcome import find_fenced
from ckptfmt.errors import CkptError, Fenced, InvalidInput
from ckptfmt.flights import Flights
from ckptfmt.pending import PendingSave, log_commit
from ckptfmt.policy import BusyRule, Decisions, Modes
from ckptfmt.reference import At
from ckptfmt.restoring import Restoring
from ckptfmt.saving import Saving

if TYPE_CHECKING:
    from ckptfmt.generation import Generation
    from ckptfmt.ports.records import GenerationRecord

log = logging.getLogger("ckptfmt")


class Checkpointer:
    """Saves and restores one run; made by ``Repository.checkpointer``. A context manager: leaving it drains."""

    def __init__(
        self,
        context: LaunchContext,
        *,
        lease: Lease,
        on_busy: BusyRule,
        modes: Modes,
        decisions: Decisions,
        families: Callable[[], Families],
        open_row: Callable[[GenerationRecord], Generation],
        restoring: Restoring,
        leave: Callable[[], None],
    ) -> None:
        self._context = context
        self._modes = modes
        self._decisions = decisions
        self._families = families
        self._open_row = open_row
        self._restoring = restoring
        self._leave = leave
        self._flights = Flights(lambda: Arena(self._pin), limit=modes.in_flight_max)
        self._last: GenerationRecord | None = None
        self._closed = False
        self._pid = os.getpid()
        self._lease = lease
        lease.on_beat = self._flights.expire_overdue
        self._saving = Saving(
            context,
            self._flights,
            self._lease,
            on_busy=on_busy,
            modes=modes,
            decisions=decisions,
            families=families,
            handle=self._handle,
        )
        exits.register(self)

    # -- what it knows --------------------------------------------------------------------------
    @property
    def preempted(self) -> bool:
        """Whether one of ``preempt_signals`` has arrived: with several ranks at any of them, and told to all at the
        step at which ``should_save`` asks for a save, so that none of them ends alone."""
        return self._decisions.preempted

    @property
    def in_flight(self) -> tuple[PendingSave, ...]:
        """The saves that are neither committed nor failed, oldest first."""
        return self._flights.pending

    @property
    def last_committed(self) -> GenerationInfo | None:
        """The newest committed generation that this checkpointer saved or restored."""
        row = self._flights.newest_row() or self._last  # a callback may not have run yet
        return None if row is None else GenerationInfo.of(row)

    # -- saving ---------------------------------------------------------------------------------
    def should_save(self, step: int) -> bool:
        """Whether to save at the end of ``step``: by steps, seconds, or because of a preemption signal.

        With several ranks it is one decision for all of them, told to each at the same step: call it at every step.
        """
        self._lease.last_step = step
        self._flights.lift()
        return self._decisions.should_save(step)

    def prepare(self, state: Any, *, sync: Patterns | None = None) -> None:
        """Plan the state and touch the arena in the background, so that the first save is as quick as the second.

        Give the ``sync`` of that save: what is written before ``save`` returns needs no host memory.
        """
        self._check_usable()
        self._saving.prepare(state, sync=sync)

    def save(
        self,
        state: Any,
        *,
        step: int,
        metadata: Any = None,
        tags: Sequence[str] = (),
        sync: Patterns | None = None,
    ) -> PendingSave | None:
        """Freeze ``state`` and write it in the background; on return the caller may change everything.

        With ``freeze="deferred"`` an optimizer's ``step`` waits for its own parameters and state; before anything else
        changes those, call ``before_update`` of the handle. Tensors whose names match ``sync`` are written before it
        returns, and take no host memory.

        While ``in_flight_max`` saves are in flight the next one waits for the oldest one's verdict, or with
        ``on_busy="skip"`` returns None: of several ranks, on all of them or on none. None, too, on a rank that does not
        save (``ranks=``). Generations are committed in the order of their saves. Raises the ``SaveFailed`` of an
        earlier save that nobody has seen, ``Fenced`` once a newer launch owns the run,
        ``UnsupportedValue`` naming the path of what cannot be stored, ``OutOfSpace`` if host memory is short.
        """
        self._check_usable()
        return self._saving.save(state, step=step, metadata=metadata, tags=tags, sync=sync)

    def _handle(self, key: str, step: int) -> PendingSave:
        pending = PendingSave(key=key, step=step, run=self._context.run.name, open_generation=self._open_row)
        pending.add_done_callback(self._finished)
        return pending

    def _finished(self, pending: PendingSave) -> None:
        row = pending.row
        if row is None:
            log.error("%s", pending.error)
            fenced = find_fenced(pending.error)
            if fenced is not None:
                self._lease.lost(fenced)
            return
        if self._last is None or (self._last.commit_seq or 0) < (row.commit_seq or 0):
            self._last = row
        if row.commit_fence != self._context.launch.fence:
            self._lease.lost(
                Fenced(
                    f"run {row.run!r}: a newer launch (fence {row.commit_fence}) finished generation {row.id}: this "
                    "process must stop saving to the run"
                )
            )
        if self._context.ranks.is_coordinator:
            log_commit(pending, row, last_step=self._lease.last_step)

    # -- restoring ------------------------------------------------------------------------------
    def restore(
        self,
        into: Any,
        *,
        at: At = None,
        strict: bool = True,
        cast: bool = False,
        keys: Patterns | None = None,
        rename: Rename | None = None,
        fallback: bool = False,
        map: RankMap | None = None,
    ) -> RestoreReport | None:
        """Fill ``into`` from the latest committed generation (or ``at``). None only if the run never had any.

        All or nothing, unless ``host_bytes_max`` is below what is read: then as with ``atomic=False``. What
        ``load_state_dict`` takes (an optimizer's state) is held whole in any case, and counts.

        With ``fallback`` a generation that cannot be read gives way to the one before it: loudly, recorded in the
        catalog, and told in the report. ``Mismatch``, ``Corrupt`` and the rest are as of ``ckptfmt.restore``.
        """
        self._check_usable()

        def prepare() -> tuple[RestoreOptions, Arena | None]:
            self._flights.settle()
            self._flights.prefaulted()
            options = RestoreOptions(
                strict=strict,
                cast=cast,
                keys=keys,
                rename=rename,
                host_bytes_max=self._modes.host_bytes_max,
                rank=self._context.ranks.rank,
                world_size=self._context.ranks.world_size,
                map=map,
            )
            if self._modes.host_bytes_max is None:
                return options, self._flights.idle_arena()
            self._flights.drop_arenas()  # what is read may take all of it
            return options, None

        report = self._restoring.fill(into, at, prepare, fallback=fallback)
        if report is not None:
            self._last = self._restoring.record(report)
            if self._context.ranks.saves:
                self._flights.prefault()
            else:
                self._flights.drop_arenas()  # no snapshot will lie there
        return report

    def _pin(self, memory: memoryview) -> Callable[[], None]:
        return self._families().pin(memory)

    def _check_usable(self) -> None:
        if self._closed:
            raise InvalidInput(f"the checkpointer of run {self._context.run.name!r} is closed; open another one")
        if os.getpid() != self._pid:
            raise InvalidInput(
                f"the checkpointer of run {self._context.run.name!r} belongs to process {self._pid}; a forked child "
                "must not save through it: open the repository again there"
            )

    # -- ending ---------------------------------------------------------------------------------
    def wait(self, timeout: float | None = None) -> None:
        """Wait for the saves in flight. Raises the ``SaveFailed`` of those that failed, or ``TimeoutError``."""
        self._flights.settle(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Drain, release the run's lease and give the memory back. Raises a ``SaveFailed`` that nobody has seen."""
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self._flights.settle(timeout)
        except CkptError:
            self._shut(timeout)
            raise
        self._shut(timeout)  # not after a timeout or an interrupt: a save is still in flight, and exit drains it

    def _shut(self, timeout: float | None = None) -> None:
        self._closed = True
        with ExitStack() as ends:  # from the last to the first, also where an interrupt ends one of them
            ends.callback(exits.forget, self)
            ends.callback(self._flights.drop_arenas)
            ends.callback(self._decisions.close)
            ends.callback(self._lease.close)
            ends.callback(self._leave)
            if self._context.spreader is not None:
                ends.callback(self._context.spreader.close, timeout)
            ends.callback(self._flights.prefaulted)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with exits.body_first(error):
            self.close()
