"""The async manager of one run: saves that overlap training, restores, and the decision when to save."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptfmt import exits
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.families import Families
from ckptfmt.engine.load.names import Rename
from ckptfmt.engine.load.ranks import RankMap
from ckptfmt.engine.load.restore import RestoreOptions
from ckptfmt.engine.patterns import Patterns
from ckptfmt.engine.reports import GenerationInfo, RestoreReport
from ckptfmt.engine.save.context import LaunchContext, SaveOrder
from ckptfmt.engine.save.launch import Lease
from ckptfmt.engine.save.outcome import find_fenced
from ckptfmt.engine.save.session import SaveSession
from ckptfmt.engine.save.snapshot import Planner, Snapshot, plan_state, take_snapshot
from ckptfmt.engine.save.waiting import decide, decline
from ckptfmt.engine.transfer import Background
from ckptfmt.errors import CkptError, Fenced, InvalidInput
from ckptfmt.flights import Flight, Flights
from ckptfmt.format import layout, verdict
from ckptfmt.pending import PendingSave, log_commit
from ckptfmt.policy import BusyRule, Decisions, Modes
from ckptfmt.reference import At
from ckptfmt.restoring import Restoring

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
        on_busy: BusyRule,
        modes: Modes,
        decisions: Decisions,
        families: Callable[[], Families],
        open_row: Callable[[GenerationRecord], Generation],
        restoring: Restoring,
        leave: Callable[[], None],
    ) -> None:
        self._context = context
        self._on_busy = on_busy
        self._modes = modes
        self._decisions = decisions
        self._families = families
        self._open_row = open_row
        self._restoring = restoring
        self._leave = leave
        self._planner = Planner()
        self._flights = Flights(lambda: Arena(self._pin), limit=modes.in_flight_max)
        self._next_n = 0
        self._last: GenerationRecord | None = None
        self._closed = False
        self._pid = os.getpid()
        beat = min(5.0, max(0.05, context.commit_timeout / 4))
        self._lease = Lease(
            context.site.sql(),
            context.launch,
            on_beat=self._flights.expire_overdue,
            beat_seconds=beat,
            holds=context.ranks.is_coordinator,
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
        self._flights.prefaulted()
        self._flights.land()
        plan = plan_state(
            state,
            families=self._families(),
            planner=self._planner,
            ranks=self._context.ranks,
            sync=sync,
            host_bytes_max=self._modes.arena_bytes_max,
            deferred=self._modes.freeze == "deferred",
        )
        if not self._flights.full:
            self._flights.prefault(plan.arena_bytes)

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
        self._check_step(step, tags)
        if not self._context.ranks.saves:
            return None
        n, self._next_n = self._next_n, self._next_n + 1
        began = time.perf_counter()
        order = self._order(n, step, tags)
        try:
            if self._on_busy == "skip" and not self._begins(order):
                return None
            self._flights.before_update()
            self._flights.make_room()
            self._lease.check()
            self._flights.prefaulted()
        except BaseException as error:
            decline(self._context, order, error)
            raise
        busy = time.perf_counter() - began
        if busy > 0.001:
            order = self._order(n, step, tags)  # its time is that of the freeze
        pending = PendingSave(key=order.key, step=step, run=self._context.run.name, open_generation=self._open_row)
        pending.busy_seconds = busy
        pending.add_done_callback(self._finished)
        try:  # an interrupt may come at any line of it
            snapshot = self._begin(order, state, metadata, pending, sync)
            self._decisions.saved()
            self._lease.last_step = step if self._lease.last_step is None else max(step, self._lease.last_step)
            self._freeze(snapshot, pending)
        except BaseException as error:
            under_way = self._flights.call_off(pending, error)
            failure = pending.exception() if under_way and isinstance(error, Exception) else None
            if failure is not None:  # writing meets the same error: it is told once
                raise failure from failure.__cause__
            if not under_way:
                decline(self._context, order, error)
            raise
        return pending

    def _freeze(self, snapshot: Snapshot, pending: PendingSave) -> None:
        pending.blocked(snapshot.freeze())
        if snapshot.deferral is None:
            pending.advance("frozen")
        else:
            pending.defer(snapshot.deferral)
            snapshot.deferral.start(pending)

    def _begin(
        self, order: SaveOrder, state: Any, metadata: Any, pending: PendingSave, sync: Patterns | None
    ) -> Snapshot:
        """Take the snapshot and start to write what is final, while a device may still be copying the rest."""
        arena = self._flights.take_arena()
        try:
            snapshot = take_snapshot(
                state,
                metadata,
                families=self._families(),
                planner=self._planner,
                arena=arena,
                ranks=self._context.ranks,
                sync=sync,
                host_bytes_max=self._modes.arena_bytes_max,
                deferred=self._modes.freeze == "deferred",
            )
            freed = partial(self._flights.freed, arena)
            session = SaveSession(self._context, order, snapshot, pending, earlier=self.in_flight, freed=freed)
            thread = Background(session.run, name=f"ckptfmt-save-{pending.run}-{order.n}")
        except BaseException:
            self._flights.give_back(arena)
            raise
        try:
            self._flights.start(Flight(pending, session, thread, arena))
        except RuntimeError:  # no thread, no save: the arena is ours again once the device has ended
            snapshot.wait()
            self._flights.give_back(arena)
            raise
        return snapshot

    def _order(self, n: int, step: int, tags: Sequence[str]) -> SaveOrder:
        return SaveOrder(
            n=n,
            step=step,
            key=layout.generation_key(self._context.launch.token, self._context.run.key, n),
            tags=tuple(tags),
            created_at=verdict.timestamp(datetime.now(UTC)),
        )

    def _begins(self, order: SaveOrder) -> bool:
        """With ``on_busy="skip"``: whether the save begins, on all ranks that save or on none."""
        context, busy = self._context, self._flights.full
        request = order.request(context.commit_timeout * (1 + len(self.in_flight)))
        if len(context.ranks.members) > 1:
            return decide(context, request, busy=busy)
        return bool(context.coordination.decide(request, busy=busy))

    def _check_step(self, step: int, tags: Sequence[str]) -> None:
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise InvalidInput(f"save(step={step!r}): the step must be an int of at least 0")
        if isinstance(tags, str) or not all(isinstance(tag, str) and tag for tag in tags):
            raise InvalidInput(f"save(tags={tags!r}): give a list of non-empty strings")

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
        if self._modes.host_bytes_max is not None:
            self._flights.drop_arenas()  # what is read may take all of it
        arena = self._flights.idle_arena() if self._modes.host_bytes_max is None else None
        report = self._restoring.fill(into, at, options, fallback=fallback, arena=arena)
        if report is not None:
            self._last = self._restoring.record(report)
            self._flights.prefault()
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
        self._flights.prefaulted()
        if self._context.spreader is not None:
            self._context.spreader.close(timeout)
        self._leave()
        self._lease.close()
        self._decisions.close()
        self._flights.drop_arenas()
        exits.forget(self)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with exits.body_first(error):
            self.close()
