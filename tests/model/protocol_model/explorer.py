"""Breadth first through every state that can be reached; the first broken promise is one of the shortest."""

from __future__ import annotations

import gc
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from protocol_model import vector as v
from protocol_model.actors import first_state, world_of
from protocol_model.alone import Alone
from protocol_model.invariants import Invariants
from protocol_model.machine import CODE, STEPS, Event, Out, World
from protocol_model.variant import Variant


@dataclass(frozen=True)
class Found:
    """What exploring one variant gave."""

    variant: Variant
    states: int
    transitions: int
    depth: int
    recovers: int
    """Different situations in which recover was run alone."""
    seconds: float
    """Of CPU."""
    broken: str | None = None
    trace: tuple[str, ...] = ()
    """The way to the broken promise, in words."""
    taken: Counter[str] = field(default_factory=Counter)
    """How often each step was taken."""


_SWAP = bytes((0, 2, 1, 3))


class Symmetry:
    """The two ranks of a launch run one program: of two states that differ by their names one is kept."""

    def __init__(self, world: World) -> None:
        self._pairs: list[tuple[int, int, int, tuple[int, ...]]] = []
        for launch in (0, 1):
            ranks = [a for a in world.actors if a.kind == "saver" and a.launch == launch]
            if len(ranks) == 2:
                g = ranks[0].generation
                row, folder, late = v.ROWS[g], v.FOLDERS[g], v.LATE[g]
                bits = (row + v.ACKS, folder + v.PACKS, folder + v.PARTS, late + v.LATE_PACKS, late + v.LATE_PARTS)
                self._pairs.append((launch, ranks[0].at, ranks[1].at, (*bits, v.BACKUP + row + v.ACKS)))

    def canonical(self, t: bytearray, swapped_launches: set[int] | None = None) -> bytes:
        """The state that stands for this one; ``swapped_launches`` gets the launches whose ranks changed names."""
        for launch, first, second, bits in self._pairs:
            one, two = t[first : first + v.ACTOR_FIELDS], t[second : second + v.ACTOR_FIELDS]
            if one < two:
                continue
            mine = [t[at] for at in bits]
            swapped = [_SWAP[value] for value in mine]
            if two < one or swapped < mine:
                t[first : first + v.ACTOR_FIELDS], t[second : second + v.ACTOR_FIELDS] = two, one
                for at, value in zip(bits, swapped, strict=True):
                    t[at] = value
                if swapped_launches is not None:
                    swapped_launches.add(launch)
        return bytes(t)


class Explorer:
    """One variant, explored to its end or to the first broken promise."""

    def __init__(self, variant: Variant) -> None:
        self.world = world_of(variant)
        self._invariants = Invariants(self.world)
        self._symmetry = Symmetry(self.world)
        self.first = self._symmetry.canonical(bytearray(first_state(self.world)))
        self._alone = Alone(variant, self._invariants.of_generations)

    def successors(self, s: bytes) -> Out:
        out: Out = []
        for actor in self.world.actors:
            STEPS[s[actor.at + v.PC]].body(self.world, s, actor, out)
        return out

    def explore(self) -> Found:
        began = time.process_time()
        first = self.first
        parents: dict[bytes, bytes] = {first: first}
        level, depth, transitions = [first], 0, 0
        shared = v.LATE[0]
        taken: Counter[str] = Counter()

        def found(broken: str | None = None, trace: tuple[str, ...] = ()) -> Found:
            seconds = time.process_time() - began
            tried = self._alone.tried
            return Found(self.world.variant, len(parents), transitions, depth, tried, seconds, broken, trace, taken)

        while level:
            following: list[bytes] = []
            for s in level:
                for event, raw in self.successors(s):
                    transitions += 1
                    taken[event.step] += 1
                    broken = None
                    if raw[:shared] != s[:shared]:
                        broken = self._invariants.of_transition(s, event, raw) or self._fenced_commit(s, event, raw)
                    t = self._symmetry.canonical(raw)
                    if t not in parents:
                        parents[t] = s
                        following.append(t)
                        broken = broken or self._alone.fault(t) or self._invariants.of_readers(t)
                    if broken is not None:
                        return found(broken, self._trace(parents, s, t))
            level = following
            depth += bool(level)
        return found()

    def _fenced_commit(self, s: bytes, event: Event, t: bytearray) -> str | None:
        for g, row in enumerate(v.ROWS):
            if t[row + v.SEQ] and not s[row + v.SEQ] and event.step in ("commit", "land"):
                late = s[v.LATE[g] + v.LATE_C4]
                actor = next(a for a in self.world.actors if a.name == event.actor)
                return self._invariants.of_fence(s, late if event.step == "land" else s[actor.at + v.HELD])
        return None

    # -- in words ---------------------------------------------------------------------------------
    def _trace(self, parents: dict[bytes, bytes], s: bytes, t: bytes) -> tuple[str, ...]:
        path = [t, s]
        while parents[path[-1]] != path[-1]:
            path.append(parents[path[-1]])
        path.reverse()
        renamed: set[int] = set()
        words = []
        for number, (before, after) in enumerate(pairwise(path), start=1):
            event, swapped = self._between(before, after)
            words.append(f"{number}. {describe(event, renamed)}")
            renamed ^= swapped
        return tuple(words)

    def _between(self, s: bytes, t: bytes) -> tuple[Event, set[int]]:
        for event, raw in self.successors(s):
            swapped: set[int] = set()
            if self._symmetry.canonical(raw, swapped) == t:
                return event, swapped
        raise AssertionError("a transition of the trace cannot be found again")


def describe(event: Event, renamed: set[int] | None = None) -> str:
    """One transition in words. ``renamed``: launches whose ranks go by each other's names at this point."""
    name = {-1: "", v.PARENT: "the parent", v.FIRST: "A's save", v.SECOND: "B's save"}[event.generation]
    actor = event.actor
    if renamed and event.launch in renamed and actor[1:] in (".0", ".1"):
        actor = f"{actor[0]}.{1 - event.rank}"
    return f"{actor} {STEPS[CODE[event.step]].words.format(g=name)}: {event.outcome}"


def explore(variant: Variant) -> Found:
    """Millions of small objects without a cycle among them: the collector would only look at them in vain."""
    gc.disable()
    try:
        return Explorer(variant).explore()
    finally:
        gc.enable()
