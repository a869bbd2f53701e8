"""How one rank begins a save: its number, whether it is to be, and the frozen state on its way to storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ckptfmt.engine.families import Families
from ckptfmt.engine.leases import Lease
from ckptfmt.engine.patterns import Patterns
from ckptfmt.engine.save.context import LaunchContext, SaveOrder
from ckptfmt.engine.save.session import SaveSession
from ckptfmt.engine.save.snapshot import Planner, Snapshot, plan_state, take_snapshot
from ckptfmt.engine.save.waiting import decide, decline
from ckptfmt.engine.transfer import Background
from ckptfmt.errors import InvalidInput
from ckptfmt.flights import Flight, Flights
from ckptfmt.format import layout, verdict
from ckptfmt.pending import PendingSave
from ckptfmt.policy import BusyRule, Decisions, Modes


class Saving:
    """Begins the saves of one launch on this rank, all from the thread that trains.

    ``handle`` makes the handle of a save from its key and its step.
    """

    def __init__(
        self,
        context: LaunchContext,
        flights: Flights,
        lease: Lease,
        *,
        on_busy: BusyRule,
        modes: Modes,
        decisions: Decisions,
        families: Callable[[], Families],
        handle: Callable[[str, int], PendingSave],
    ) -> None:
        self._context = context
        self._flights = flights
        self._lease = lease
        self._on_busy = on_busy
        self._modes = modes
        self._decisions = decisions
        self._families = families
        self._handle = handle
        self._planner = Planner()
        self._next_n = 0

    def prepare(self, state: Any, *, sync: Patterns | None) -> None:
        """Plan the state and touch the arena in the background. Nothing on a rank that does not save."""
        if not self._context.ranks.saves:
            return
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
        self, state: Any, *, step: int, metadata: Any, tags: Sequence[str], sync: Patterns | None
    ) -> PendingSave | None:
        """Freeze ``state`` and start to write it. None if it is skipped, or this rank does not save."""
        if not self._context.ranks.saves:
            _check_step(step, tags)
            return None
        n = self._count(step, tags)
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
        pending = self._handle(order.key, step)
        pending.busy_seconds = busy
        try:  # an interrupt may come at any line of it
            snapshot = self._start(order, state, metadata, pending, sync)
            self._decisions.saved()
            self._lease.last_step = step if self._lease.last_step is None else max(step, self._lease.last_step)
            _freeze(snapshot, pending)
        except BaseException as error:
            under_way = self._flights.call_off(pending, error)
            failure = pending.exception() if under_way and isinstance(error, Exception) else None
            if failure is not None:  # writing meets the same error: it is told once
                raise failure from failure.__cause__
            if not under_way:
                decline(self._context, order, error)
            raise
        return pending

    def _count(self, step: int, tags: Sequence[str]) -> int:
        """The number of this call: it counts on every rank alike, also where its arguments are refused."""
        n, self._next_n = self._next_n, self._next_n + 1
        try:
            _check_step(step, tags)
        except BaseException as error:
            decline(self._context, self._order(n, 0, ()), error)
            raise
        return n

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
        request = order.request(context.commit_timeout * (1 + len(self._flights.pending)))
        if len(context.ranks.members) > 1:
            return decide(context, request, busy=busy)
        return bool(context.coordination.decide(request, busy=busy))

    def _start(
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
            session = SaveSession(self._context, order, snapshot, pending, earlier=self._flights.pending, freed=freed)
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


def _freeze(snapshot: Snapshot, pending: PendingSave) -> None:
    pending.blocked(snapshot.freeze())
    if snapshot.deferral is None:
        pending.advance("frozen")
    else:
        pending.defer(snapshot.deferral)
        snapshot.deferral.start(pending)


def _check_step(step: int, tags: Sequence[str]) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise InvalidInput(f"save(step={step!r}): the step must be an int of at least 0")
    if isinstance(tags, str) or not all(isinstance(tag, str) and tag for tag in tags):
        raise InvalidInput(f"save(tags={tags!r}): give a list of non-empty strings")
