"""How the bytes of live leaves come into the arena: all at once where it holds them all, else unit by unit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfmt.engine.plan import SavePlan
from ckptfmt.engine.save.freeze import FrozenLeaf
from ckptfmt.engine.touch import address_of
from ckptfmt.engine.transfer import copy_memory
from ckptfmt.engine.units import Unit
from ckptfmt.format import checksum
from ckptfmt.ports.arrays import ArrayFamily, Capture, wait_all

Pairs = list[tuple[Any, memoryview]]
Move = tuple[int, int | None, int]
"""(destination address, source address, bytes); the source is None if it is not dense host memory."""


@dataclass(frozen=True)
class UnderWay:
    """Leaves whose copies may not be final yet."""

    capture: Capture
    position: dict[int, int]
    """Leaf index -> pair index in ``capture``."""

    def final(self) -> bool:
        """Whether all are final by now."""
        return all(map(self.capture.ready, self.position.values()))


@dataclass(frozen=True)
class Taken:
    """What became of the leaves that are held whole."""

    under_way: list[UnderWay]
    later: list[UnderWay]
    """The same of leaves that may be copied later."""
    put_off: dict[int, Move]
    """Leaf index -> what is still to be copied from host memory."""


class Copies:
    """The live ``leaves`` of a state, and the ``memory`` that a plan lays them out in."""

    def __init__(self, leaves: Sequence[FrozenLeaf], plan: SavePlan, memory: memoryview) -> None:
        self.leaves = leaves
        self._plan = plan
        self._memory = memory
        self._base = address_of(memory)
        self._tail = b""
        """What the last unit copied shares with the next one of its pack."""

    def copy_held(self, later: Collection[int] = ()) -> Taken:
        """Copy the leaves of all packs that are held whole. Host memory is final on return, but for that of the leaves
        in ``later``, which is left to the caller."""
        for planned in self._plan.packs:
            if planned.arena_offset is not None:
                at = planned.arena_offset
                self._memory[at : at + len(planned.header)] = planned.header
        leaves, base, held = self.leaves, self._base, self._plan.held
        sources = [leaf.spec.address for leaf in map(leaves.__getitem__, held.leaves)]
        moves = list(zip([base + place for place in held.places], sources, held.sizes, strict=True))
        taken = Taken([], [], {})
        try:
            if None in sources or later:
                # Device copies are enqueued first: they proceed while the host copies its own.
                rows = list(zip(held.leaves, held.places, held.sizes, strict=True))
                captured = [row for row, source in zip(rows, sources, strict=True) if source is None]
                self._capture([row for row in captured if row[0] not in later], taken.under_way)
                self._capture([row for row in captured if row[0] in later], taken.later)
                on_host = [(leaf, move) for leaf, move in zip(held.leaves, moves, strict=True) if move[1] is not None]
                taken.put_off.update((leaf, move) for leaf, move in on_host if leaf in later)
                moves = [move for leaf, move in on_host if leaf not in taken.put_off]
            copy_memory(moves)  # type: ignore[arg-type]
        except BaseException as error:
            # Nobody else may get the arena while a device still writes to it.
            wait_all([each.capture.wait for each in (*taken.under_way, *taken.later)], error)
        return taken

    def _capture(self, rows: Sequence[tuple[int, int, int]], begun: list[UnderWay]) -> None:
        """Have the families copy (leaf, place, size) into the arena. What is under way is in ``begun`` even when this
        raises."""
        gathered: dict[int, tuple[ArrayFamily, Pairs, dict[int, int]]] = {}
        for index, place, nbytes in rows:
            leaf = self.leaves[index]
            _, pairs, position = gathered.setdefault(id(leaf.family), (leaf.family, [], {}))
            position[index] = len(pairs)
            pairs.append((leaf.value, self._memory[place : place + nbytes]))
        for family, pairs, position in gathered.values():
            begun.append(UnderWay(family.capture(pairs), position))

    def copy_units(self, units: Sequence[Unit]) -> None:
        """Copy these units, which follow those of the last call. They are final on return."""
        moves: list[tuple[int, int, int]] = []
        whole: dict[int, tuple[ArrayFamily, Pairs]] = {}
        cut: list[tuple[FrozenLeaf, int, memoryview]] = []
        for unit in units:
            image = self._image(unit)
            head = self._plan.packs[unit.pack].header[unit.start : unit.end]
            image[: len(head)] = head
            target = self._base + unit.place - unit.start
            for chunk in unit.chunks:
                leaf = self.leaves[chunk.leaf]
                inner = chunk.number * checksum.CHUNK_BYTES
                source = leaf.spec.address
                if source is not None:
                    moves.append((target + chunk.offset, source + inner, chunk.nbytes))
                    continue
                host = image[chunk.offset - unit.start :][: chunk.nbytes]
                if chunk.nbytes == leaf.spec.nbytes:
                    whole.setdefault(id(leaf.family), (leaf.family, []))[1].append((leaf.value, host))
                else:
                    cut.append((leaf, inner, host))
        captures: list[Capture] = []
        failed: BaseException | None = None
        try:
            for family, pairs in whole.values():
                captures.append(family.capture(pairs))
            for leaf, inner, host in cut:  # one by one: a piece may be a copy of its own
                captures.append(leaf.family.capture([(leaf.family.piece(leaf.value, inner, inner + len(host)), host)]))
            copy_memory(moves)
        except BaseException as error:
            failed = error
        wait_all([capture.wait for capture in captures], failed)
        for unit in units:
            # Not from the live leaf again: chunk and page must show the same bytes, whoever else may be writing there.
            image = self._image(unit)
            if unit.start:
                image[: len(self._tail)] = self._tail
            self._tail = bytes(image[unit.stop - unit.start :])

    def _image(self, unit: Unit) -> memoryview:
        return self._memory[unit.place : unit.place + unit.nbytes]
