"""The async manager of one run: saves that overlap training, restores, and the decision when to save."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptfmt import exits
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.families import Families
from ckptfmt.engine.load.names import Rename
from ckptfmt.engine.load.restore import RestoreOptions
from ckptfmt.engine.patterns import Patterns
from ckptfmt.engine.reports import GenerationInfo, RestoreReport, human_bytes
from ckptfmt.engine.save.context import LaunchContext, SaveOrder
from ckptfmt.engine.save.launch import Lease
from ckptfmt.engine.save.outcome import find_fenced
from ckptfmt.engine.save.session import SaveSession
from ckptfmt.engine.save.snapshot import Planner, Snapshot, plan_state, take_snapshot
from ckptfmt.engine.transfer import Background
from ckptfmt.errors import (
    AccessDenied,
    BackendError,
    CatalogError,
    CkptError,
    Fenced,
    FormatError,
    InvalidInput,
    NotFound,
    OutOfSpace,
    Unavailable,
)
from ckptfmt.format import layout, verdict
from ckptfmt.format.states import State
from ckptfmt.pending import PendingSave
from ckptfmt.policy import PreemptionFlag, SavePolicy
from ckptfmt.reference import At

if TYPE_CHECKING:
    from ckptfmt.generation import Generation
    from ckptfmt.ports.catalog import GenerationRecord

log = logging.getLogger("ckptfmt")


class Checkpointer:
    """Saves and restores one run; made by ``Repository.checkpointer``. A context manager: leaving it drains."""

    def __init__(
        self,
        context: LaunchContext,
        *,
        policy: SavePolicy,
        flag: PreemptionFlag,
        families: Callable[[], Families],
        open_row: Callable[[GenerationRecord], Generation],
        open_at: Callable[[At], Generation],
    ) -> None:
        self._context = context
        self._policy = policy
        self._flag = flag
        self._families = families
        self._open_row = open_row
        self._open_at = open_at
        self._arena = Arena(self._pin)
        self._abandoned: list[tuple[Arena, Background]] = []
        """Arenas that a hung writer may still read: they are dropped once it is gone."""
        self._planner = Planner()
        self._preparing: Background | None = None
        self._current: tuple[PendingSave, SaveSession, Background] | None = None
        self._next_n = 0
        self._last: GenerationRecord | None = None
        self._closed = False
        self._pid = os.getpid()
        beat = min(5.0, max(0.05, context.commit_timeout / 4))
        self._lease = Lease(context.site.sql(), context.launch, on_beat=self._watch, beat_seconds=beat)
        exits.register(self)

    # -- what it knows --------------------------------------------------------------------------
    @property
    def preempted(self) -> bool:
        """Whether one of ``preempt_signals`` has arrived."""
        return self._flag.raised

    @property
    def in_flight(self) -> tuple[PendingSave, ...]:
        current = self._current
        return (current[0],) if current is not None and not current[0].done() else ()

    @property
    def last_committed(self) -> GenerationInfo | None:
        """The newest committed generation that this checkpointer saved or restored."""
        current = self._current
        if current is not None and current[0].row is not None:
            return GenerationInfo.of(current[0].row)  # its callback may not have run yet
        return None if self._last is None else GenerationInfo.of(self._last)

    # -- saving ---------------------------------------------------------------------------------
    def should_save(self, step: int) -> bool:
        """Whether to save at the end of ``step``: by steps, seconds, or because of a preemption signal."""
        self._lease.last_step = step
        return self._policy.should_save(step, preempted=self.preempted)

    def prepare(self, state: Any) -> None:
        """Plan the state and touch the arena in the background, so that the first save is as quick as the second."""
        self._check_usable()
        self._join_preparation()
        plan = plan_state(state, families=self._families(), planner=self._planner)
        if not self.in_flight:
            self._arena.reserve(plan.arena_bytes)
            self._prefault()

    def save(self, state: Any, *, step: int, metadata: Any = None, tags: Sequence[str] = ()) -> PendingSave | None:
        """Freeze ``state`` and write it in the background; on return the caller may change everything.

        One save is in flight: the next waits for its verdict, or with ``on_busy="skip"`` returns None. Raises the
        ``SaveFailed`` of an earlier save that nobody has seen, ``Fenced`` once a newer launch owns the run,
        ``UnsupportedValue`` naming the path of what cannot be stored, ``OutOfSpace`` if host memory is short.
        """
        self._check_usable()
        self._check_step(step, tags)
        n, self._next_n = self._next_n, self._next_n + 1
        began = time.perf_counter()
        if self.in_flight and self._policy.on_busy == "skip":
            self._record_skip(n, step)
            return None
        self._join_current()
        self._lease.check()
        self._join_preparation()
        busy = time.perf_counter() - began
        order = SaveOrder(
            n=n,
            step=step,
            key=layout.generation_key(self._context.launch.token, self._context.run.key, n),
            tags=tuple(tags),
            created_at=verdict.timestamp(datetime.now(UTC)),
        )
        pending = PendingSave(key=order.key, step=step, run=self._context.run.name, open_generation=self._open_row)
        snapshot = take_snapshot(state, metadata, families=self._families(), planner=self._planner, arena=self._arena)
        pending.busy_seconds = busy
        session = SaveSession(self._context, order, snapshot, pending)
        thread = Background(session.run, name=f"ckptfmt-save-{self._context.run.name}-{n}")
        pending.add_done_callback(self._finished)
        self._policy.saved(preempted=self.preempted)
        self._lease.last_step = step if self._lease.last_step is None else max(step, self._lease.last_step)
        self._begin(pending, session, thread, snapshot)
        pending.stall_seconds = snapshot.freeze()
        pending.advance("frozen")
        return pending

    def _begin(self, pending: PendingSave, session: SaveSession, thread: Background, snapshot: Snapshot) -> None:
        """Start writing what is final, while a device may still be copying the rest."""
        try:
            thread.start()
        except BaseException:  # no thread, no save: the arena is ours again once the device has ended
            snapshot.wait()
            raise
        self._current = (pending, session, thread)

    def _record_skip(self, n: int, step: int) -> None:
        launch = self._context.launch
        try:
            self._context.site.sql().skip_save(launch.id, n=n, step=step, fence=launch.fence)
        except CatalogError as error:  # a busy catalog is no reason to stop training: nothing was to be saved
            log.warning("run %r: that save %d (step %d) was skipped is not recorded: %s", launch.run, n, step, error)

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
        self._last = row
        if row.commit_fence != self._context.launch.fence:
            self._lease.lost(
                Fenced(
                    f"run {row.run!r}: a newer launch (fence {row.commit_fence}) finished generation {row.id}: this "
                    "process must stop saving to the run"
                )
            )
        lag = 0 if self._lease.last_step is None else max(0, self._lease.last_step - pending.step)
        log.info(
            "%s #%d step %d committed: stall %.0f ms, %s in %.1f s, lag %d steps",
            row.run,
            row.id,
            row.step,
            (row.stall_seconds or 0.0) * 1e3,
            human_bytes(row.nbytes or 0),
            pending.seconds or 0.0,
            lag,
        )

    def _watch(self) -> None:
        """From the lease's heartbeat: a save past its deadline is aborted on behalf of a writer that hangs."""
        current = self._current
        if current is None or current[0].done() or not current[1].overdue:
            return
        # Its writer may still hold the arena: the next save gets another one.
        self._abandoned.append((self._arena, current[2]))
        self._arena, self._planner = Arena(self._pin), Planner()
        current[1].expire()

    def _join_current(self, timeout: float | None = None) -> None:
        """Wait for the save in flight and raise its error if nobody has been told."""
        if self._current is None:
            return
        pending, session, thread = self._current
        pending.wait_done(timeout)
        if not session.overdue:  # a writer that hangs is not waited for: its handle has failed already
            thread.join(timeout)
        self._current = None
        pending.surface()

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
    ) -> RestoreReport | None:
        """Fill ``into`` from the latest committed generation (or ``at``). None only if the run never had any.

        With ``fallback`` a generation that cannot be read gives way to the one before it: loudly, recorded in the
        catalog, and told in the report. ``Mismatch``, ``Corrupt`` and the rest are as of ``ckptfmt.restore``.
        """
        self._check_usable()
        self._join_current()
        self._join_preparation()
        options = RestoreOptions(strict=strict, cast=cast, keys=keys, rename=rename)
        run = self._context.site.sql().ensure_run(self._context.run.name, self._context.run.key)
        if at is None and run.next_commit_seq == 1:
            return None  # nothing was ever committed: a fresh start
        report = self._restore_first(into, at, options, fallback)
        row = self._context.site.sql().generation(report.generation_id)
        if row is None:
            raise NotFound(f"generation {report.generation_id} has left the catalog during its restore")
        self._context.site.sql().set_restored_from(self._context.launch.id, row.key)
        self._last = row
        self._prefault()
        return report

    def _restore_first(self, into: Any, at: At, options: RestoreOptions, fallback: bool) -> RestoreReport:
        """The wanted generation; or with ``fallback``, and nothing named by ``at``, the newest that is readable."""
        if at is not None or not fallback:
            return self._open_at(at).restore_with(into, options, arena=self._arena)
        rows = self._context.site.sql().generations(run=self._context.run.name, states=[State.COMMITTED])
        unreadable: list[int] = []
        for row in rows:
            if row.quarantined_at is not None:
                continue
            try:
                report = self._open_row(row).restore_with(into, options, arena=self._arena)
            except (FormatError, NotFound, BackendError) as error:
                if isinstance(error, Unavailable | AccessDenied | OutOfSpace):
                    raise  # this says nothing of the generation: an older one would not fare better
                log.error("run %r: generation %d cannot be restored: %s", row.run, row.id, error)
                unreadable.append(row.id)
                continue
            return self._fell_back(report, unreadable) if unreadable else report
        return self._open_at(None).restore_with(into, options, arena=self._arena)  # raises what the newest one raises

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

    # -- the arena, ahead of time -----------------------------------------------------------------
    def _prefault(self) -> None:
        self._preparing = Background(self._arena.populate, name="ckptfmt-prepare")
        self._preparing.start()

    def _join_preparation(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

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
        """Wait for the save in flight. Raises its ``SaveFailed``, or ``TimeoutError``."""
        self._join_current(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Drain, release the run's lease and give the memory back. Raises a ``SaveFailed`` that nobody has seen."""
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self._join_current(timeout)
        except CkptError:
            self._shut()
            raise
        self._shut()  # not after a timeout or an interrupt: the save is still in flight, and exit drains it

    def _shut(self) -> None:
        self._closed = True
        self._join_preparation()
        self._lease.close()
        self._flag.close()
        for arena in [self._arena, *(arena for arena, writer in self._abandoned if not writer.alive())]:
            arena.drop()
        exits.forget(self)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with exits.body_first(error):
            self.close()
