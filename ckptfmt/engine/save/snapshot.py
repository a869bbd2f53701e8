"""The frozen host copy of a state: taken while training is blocked, so nothing here touches SQL, files or sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptfmt.engine.arena import Arena, address_of
from ckptfmt.engine.collector import held_back
from ckptfmt.engine.families import Families
from ckptfmt.engine.plan import SavePlan, Unit, make_plan, signature_of
from ckptfmt.engine.save.freeze import FrozenLeaf, FrozenTree, freeze_metadata, freeze_tree
from ckptfmt.engine.transfer import copy_memory
from ckptfmt.format import tree
from ckptfmt.ports.arrays import ArrayFamily, Capture


class Planner:
    """Keeps the plan of the last structure seen."""

    def __init__(self) -> None:
        self._plan: SavePlan | None = None

    def plan(self, leaves: Sequence[FrozenLeaf]) -> SavePlan:
        named = [(leaf.name, leaf.spec) for leaf in leaves]
        signature = signature_of(named)
        if self._plan is None or self._plan.signature != signature:
            self._plan = make_plan(named, signature)
        return self._plan


@dataclass(frozen=True)
class _Pending:
    """Leaves whose copies may still be under way on a device."""

    capture: Capture
    position: dict[int, int]
    """Leaf index -> pair index in ``capture``."""


class Snapshot:
    """Owns the arena until the save is over. Live values are referenced only until their copies are final.

    Copies from a device may still be under way when it is made: writing begins with what is final, but the caller may
    change the state only after ``freeze`` has returned.
    """

    def __init__(self, frozen: FrozenTree, metadata: tree.Node, plan: SavePlan, arena: Arena, began: float) -> None:
        self.common = frozen.common
        self.per_rank = frozen.per_rank
        self.aliases = frozen.aliases
        self.names_and_specs = [(leaf.name, leaf.spec) for leaf in frozen.leaves]
        self.metadata = metadata
        self.plan = plan
        self._began = began
        self._stall_seconds = 0.0
        self._frozen = threading.Event()
        self._arena = arena
        self._pending: list[_Pending] = []

    def image(self, pack: int) -> memoryview:
        """The pack's file, header included, as it lies in the arena."""
        planned = self.plan.packs[pack]
        return self._arena.view(planned.arena_offset, planned.nbytes)

    def wait_for(self, unit: Unit) -> None:
        """Block until all bytes of ``unit`` are final."""
        for pending in self._pending:
            for leaf in unit.leaves:
                position = pending.position.get(leaf)
                if position is not None:
                    pending.capture.wait_for(position)

    def freeze(self) -> float:
        """Block until every copy is final; returns the stall in seconds. Raises what a device raised."""
        try:
            self.wait()
        finally:
            self._stall_seconds = time.perf_counter() - self._began
            self._frozen.set()
        return self._stall_seconds

    def stall(self) -> float:
        """For how long the save has blocked training, in seconds; waits for ``freeze``."""
        self._frozen.wait()
        return self._stall_seconds

    def wait(self) -> None:
        """Block until every copy is final, and let go of the sources."""
        for pending in self._pending:
            pending.capture.wait()

    def take(self, leaves: Sequence[FrozenLeaf]) -> None:
        """Copy every leaf's bytes to its place in the arena."""
        moves: list[tuple[int, int, int]] = []
        others: dict[int, tuple[ArrayFamily, list[tuple[Any, memoryview]], dict[int, int]]] = {}
        for number, planned in enumerate(self.plan.packs):
            image = self.image(number)
            image[: len(planned.header)] = planned.header
            base = address_of(image)
            for index, offset in zip(planned.leaves, planned.offsets, strict=True):
                leaf = leaves[index]
                nbytes = leaf.spec.nbytes
                if not nbytes:
                    continue
                source = leaf.family.host_address(leaf.value)
                if source is not None:
                    moves.append((base + offset, source, nbytes))
                    continue
                _, pairs, position = others.setdefault(id(leaf.family), (leaf.family, [], {}))
                position[index] = len(pairs)
                pairs.append((leaf.value, image[offset : offset + nbytes]))
        # Device copies are enqueued first: they proceed while the host copies its own.
        self._pending = [_Pending(family.capture(pairs), position) for family, pairs, position in others.values()]
        try:
            copy_memory(moves)
        except BaseException:
            self.wait()  # nobody else may get the arena while a device still writes to it
            raise
        self._arena.mark_touched()


def take_snapshot(state: Any, metadata: Any, *, families: Families, planner: Planner, arena: Arena) -> Snapshot:
    """Begin the snapshot of ``state`` and ``metadata``. On return plain values and host memory are frozen;
    ``Snapshot.freeze`` waits for what devices are still copying.

    Raises ``UnsupportedValue`` (path and type), or ``OutOfSpace`` when host memory cannot hold the snapshot.
    """
    began = time.perf_counter()
    with held_back():
        frozen = freeze_tree(state, families)
        frozen_metadata = freeze_metadata(metadata)
        plan = planner.plan(frozen.leaves)
        arena.reserve(plan.arena_bytes)
        snapshot = Snapshot(frozen, frozen_metadata, plan, arena, began)
        snapshot.take(frozen.leaves)
    return snapshot


def plan_state(state: Any, *, families: Families, planner: Planner) -> SavePlan:
    """Plan a state without copying it, so that the arena can be mapped and touched ahead of the first save."""
    return planner.plan(freeze_tree(state, families).leaves)
