"""The frozen host copy of a state: taken while training is blocked, so nothing here touches SQL, files or sockets."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypedDict, Unpack

from ckptfmt.engine.arena import Arena
from ckptfmt.engine.collector import held_back
from ckptfmt.engine.families import Families
from ckptfmt.engine.patterns import Patterns, as_patterns, matches
from ckptfmt.engine.plan import (
    ALL_WRITTEN,
    IN_BACKGROUND,
    NOT_COMPARED,
    PackPlan,
    SavePlan,
    Signature,
    check_host_bytes_max,
    make_plan,
    signature_of,
)
from ckptfmt.engine.save.context import ALONE, Ranks
from ckptfmt.engine.save.copies import Copies, Move, UnderWay
from ckptfmt.engine.save.deferral import Deferral, Watch, watch_owned
from ckptfmt.engine.save.freeze import FrozenTree, Seen, freeze_metadata, freeze_tree
from ckptfmt.engine.save.owners import roles_of
from ckptfmt.engine.save.replicas import Digests, comparison_of, take_digests
from ckptfmt.engine.save.window import Window
from ckptfmt.engine.transfer import copy_memory
from ckptfmt.engine.units import Unit
from ckptfmt.errors import CkptError
from ckptfmt.format import tree
from ckptfmt.ports.arrays import wait_all

log = logging.getLogger("ckptfmt")


class Manner(TypedDict, total=False):
    """How a state is saved: what ``Planner.plan`` is told beside the state."""

    ranks: Ranks
    sync: Patterns | None
    host_bytes_max: int | None
    deferred: bool


class Planner:
    """Keeps what the last save has seen, and the plans of that structure, one for each manner to save it."""

    def __init__(self) -> None:
        self._seen: Seen | None = None
        self._ranks: Ranks | None = None
        self._signature: Signature = ()
        self._roles = ALL_WRITTEN
        self._at_once = IN_BACKGROUND
        self._plans: dict[tuple[Hashable, ...], SavePlan] = {}

    def freeze(self, state: Any, families: Families) -> FrozenTree:
        return freeze_tree(state, families, self._seen)

    def plan(
        self,
        frozen: FrozenTree,
        *,
        ranks: Ranks = ALONE,
        sync: Patterns | None = None,
        host_bytes_max: int | None = None,
        deferred: bool = False,
    ) -> SavePlan:
        """What several of ``ranks`` hold is written by one of them; of the others' copies only the digests are taken.
        Tensors whose names match ``sync`` are not held in memory but written while training is blocked. With a
        ``host_bytes_max`` (bytes) below the state nothing is held whole: what is written makes room for the rest. If
        ``deferred``, training shall not be blocked for what may be copied later.

        Raises ``InvalidInput`` for patterns or limits that cannot be meant."""
        check_host_bytes_max(host_bytes_max)
        chosen = _chosen(frozen, as_patterns(sync, "sync"))
        self._follow(frozen.seen, ranks)
        comparison = IN_BACKGROUND if deferred else self._at_once
        if ranks.replica_check == "off":
            comparison = NOT_COMPARED
        key = (chosen, host_bytes_max, self._roles, comparison)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make_plan(
                frozen.seen.named, sync=chosen, host_bytes_max=host_bytes_max, roles=self._roles, comparison=comparison
            )
        return plan

    def _follow(self, seen: Seen, ranks: Ranks) -> None:
        """Share out anew who writes what, if the structure or the ranks differ from those of the last save."""
        if seen is self._seen and ranks is self._ranks:
            return
        signature = signature_of(seen.named)
        if self._signature != signature:
            self._signature, self._plans, self._ranks = signature, {}, None
        if ranks is not self._ranks:
            self._roles = roles_of(seen.named, ranks)
            self._at_once = comparison_of(seen.named, self._roles)
        self._seen, self._ranks = seen, ranks


class Snapshot:
    """Owns the arena until the save is over. Live values are referenced only until their copies are final.

    Packs are held whole, or pass through a window of the arena: then ``freeze`` copies as the writers make room.
    Copies may still be under way when it is made: writing begins with what is final, but the caller may
    change the state only after ``freeze`` has returned.
    """

    def __init__(self, frozen: FrozenTree, metadata: tree.Node, plan: SavePlan, arena: Arena, began: float) -> None:
        self.common = frozen.common
        self.per_rank = frozen.per_rank
        self.aliases = frozen.aliases
        self.mesh = frozen.mesh
        self.names_and_specs = frozen.seen.named
        self.metadata = metadata
        self.plan = plan
        self.digests: Digests = {}
        """Of leaves that are in no pack, but compared: those of their chunks."""
        self._began = began
        self._stall_seconds = 0.0
        self._frozen = threading.Event()
        self._unfrozen: BaseException | None = None
        """Why the state never was frozen as a whole."""
        self._arena = arena
        self._memory = arena.view(0, plan.arena_bytes)
        self._copies: Copies | None = Copies(frozen.leaves, plan, self._memory)
        self._under_way: list[UnderWay] = []
        self._later: list[UnderWay] = []
        self._put_off: frozenset[int] = frozenset()
        self.deferral: Deferral | None = None
        """What ``freeze`` leaves to be copied beside training; to be started after it."""
        self._window = Window(plan.passing)

    # -- the side that copies -------------------------------------------------------------------
    def take(self, watches: Mapping[int, Sequence[Watch]]) -> None:
        """Copy the leaves of the packs that are held whole, and take the digests of those that are not copied; host
        memory is final on return, but for that of the leaves in ``watches``."""
        if self._copies is None:
            raise AssertionError("a snapshot is taken once")
        taken = self._copies.copy_held(watches.keys())
        self._under_way, self._later, self._put_off = taken.under_way, taken.later, frozenset(taken.put_off)
        try:
            self._later = [each for each in taken.later if not each.final()]
            if self.plan.hashed:
                self.digests = take_digests(self._copies.leaves, self.plan.hashed, self._memory[self.plan.hash_window])
        except BaseException as error:
            wait_all([each.capture.wait for each in (*self._under_way, *self._later)], error)
        if self._later or self._put_off:
            self.deferral = Deferral(
                partial(self._copy_later, list(taken.put_off.values())),
                [each.capture for each in self._later],
                on_host=[watch for leaf in taken.put_off for watch in watches[leaf]],
                on_device=[watch for each in self._later for leaf in each.position for watch in watches[leaf]],
            )
        if not self.plan.passing:
            self._copies = None
            if self.deferral is None:
                self._arena.mark_touched(self.plan.arena_bytes)

    def _copy_later(self, moves: Sequence[Move]) -> None:
        copy_memory(moves)  # type: ignore[arg-type]
        self._arena.mark_touched(self.plan.arena_bytes)

    def freeze(self) -> float:
        """Block until every copy that is not deferred is final and the synchronous part is written; returns the stall
        so far in seconds.

        Raises what a copy raised: the save fails then; and ``CkptError`` if the save fails while this waits for it.
        """
        try:
            self._pass_window()
            self._settle()
            self._window.wait_written(self.plan.sync_turns)
        except BaseException as error:
            self.drop(error)
            raise
        finally:
            self._copies = None
            self._stall_seconds = time.perf_counter() - self._began
            self._frozen.set()
        return self._stall_seconds

    def _pass_window(self) -> None:
        while self._copies is not None:
            units = self._window.next_units()
            if not units:
                self._arena.mark_touched(self.plan.arena_bytes)
                return
            self._copies.copy_units(units)
            self._window.copied(len(units))

    def _settle(self) -> None:
        wait_all([each.capture.wait for each in self._under_way])

    def stall(self) -> float:
        """For how long the save has blocked training, in seconds; waits until all of the state is frozen. Raises why
        the copies are not to be used: ask before they are acknowledged."""
        self._frozen.wait()
        if self._unfrozen is not None:
            raise CkptError(f"the state was not frozen: {self._unfrozen!r}") from self._unfrozen
        if self.deferral is None:
            return self._stall_seconds
        self.deferral.wait()
        return self._stall_seconds + self.deferral.blocked_seconds

    # -- the side that writes -------------------------------------------------------------------
    @contextmanager
    def lend(self, unit: Unit) -> Iterator[memoryview]:
        """The bytes ``start`` to ``end`` of a unit, once they are final: it counts as written when the block ends.

        An error in the block is the whole pack's: whoever waits for another unit of it gets an error, too.
        """
        try:
            self._wait_for(unit)
            yield self._memory[unit.place : unit.place + unit.nbytes]
        except BaseException as error:
            self._window.break_off(error)
            raise
        if unit.turn is not None:
            self._window.wrote(unit.turn)

    def _wait_for(self, unit: Unit) -> None:
        if unit.turn is not None:
            self._window.wait_copied(unit.turn)
            return
        if self.deferral is not None and not unit.leaves.isdisjoint(self._put_off):
            self.deferral.wait_for_host()
        for each in (*self._under_way, *self._later):
            for leaf in unit.leaves:
                position = each.position.get(leaf)
                if position is not None:
                    each.capture.wait_for(position)

    def rewind(self, planned: PackPlan) -> bool:
        """Whether a pack that failed can be written again: all its bytes must still be here."""
        return self._window.rewind(planned.units)

    def rewind_all(self) -> bool:
        """Whether all packs can be written once more, to another place."""
        return all(self.rewind(planned) for planned in self.plan.packs)

    def drop(self, cause: BaseException | None = None) -> None:
        """Nobody will write what has not been written yet: lets go of whoever waits for room or for ``freeze``."""
        if not self._frozen.is_set():
            self._unfrozen = self._unfrozen or cause or CkptError("the save was given up")
            self._frozen.set()
        self._window.close(cause)
        if self.deferral is not None:
            self.deferral.call_off(cause or CkptError("the save was given up"))

    def wait(self) -> None:
        """For the end of a save, good or bad: ``drop``, then block until copies under way are final, and let go of
        the sources."""
        self.drop()
        try:
            wait_all([each.capture.wait for each in (*self._under_way, *self._later)])
        finally:
            if self.deferral is not None:
                self.deferral.settle()
            self._memory = memoryview(b"")  # the arena may be another snapshot's from here on


def take_snapshot(
    state: Any, metadata: Any, *, families: Families, planner: Planner, arena: Arena, **manner: Unpack[Manner]
) -> Snapshot:
    """Begin the snapshot of ``state`` and ``metadata``. ``Snapshot.freeze``, once the writer runs, ends it.

    The ``manner`` is what ``Planner.plan`` takes. If ``deferred``, what optimizers own may still have to be copied:
    ``Snapshot.deferral`` does that.
    Raises ``UnsupportedValue`` (path and type), ``InvalidInput`` for patterns or limits that cannot be meant, or
    ``OutOfSpace`` when host memory cannot hold the snapshot.
    """
    began = time.perf_counter()
    with held_back():
        frozen = planner.freeze(state, families)
        frozen_metadata = freeze_metadata(metadata)
        plan = planner.plan(frozen, **manner)
        if plan.passing:
            arena.trim(plan.arena_bytes)
        arena.reserve(plan.arena_bytes)
        snapshot = Snapshot(frozen, frozen_metadata, plan, arena, began)
        snapshot.take(watch_owned(frozen.leaves, frozen.owners, families) if manner.get("deferred") else {})
    return snapshot


def plan_state(state: Any, *, families: Families, planner: Planner, **manner: Unpack[Manner]) -> SavePlan:
    """Plan a state without copying it, so that the arena can be mapped and touched ahead of the first save. The
    ``manner`` is what ``Planner.plan`` takes."""
    return planner.plan(planner.freeze(state, families), **manner)


def _chosen(frozen: FrozenTree, patterns: Sequence[str] | None) -> frozenset[int]:
    """Indices of the leaves that have a name which matches."""
    if patterns is None:
        return frozenset()
    also = {stored for alias, stored in frozen.aliases.items() if matches(alias, patterns)}
    chosen = frozenset(
        index for index, leaf in enumerate(frozen.leaves) if leaf.name in also or matches(leaf.name, patterns)
    )
    if not chosen:
        log.warning("sync=%r matches no tensor of this state: all of it is held in host memory", patterns)
    return chosen
