"""Recover, run alone from any state that was reached: it ends, leaves nothing open, and has nothing to do twice."""

from __future__ import annotations

from collections.abc import Callable

from protocol_model import vector as v
from protocol_model.actors import ROLES
from protocol_model.environment_steps import rebuild
from protocol_model.loss import PUT_BACK, behind, numbered_twice
from protocol_model.machine import CODE, IDLE, STEPS, Actor, Out, World
from protocol_model.variant import Limit, Variant

_STEPS_MAX = 80


class Alone:
    """Tries recover from a state, once per catalog, store and history."""

    def __init__(self, variant: Variant, of_state: Callable[[bytes], str | None]) -> None:
        self._actors = [
            Actor(name, ROLES[name][0], v.ACTORS + v.ACTOR_FIELDS * at) for at, name in enumerate(("prover", "recover"))
        ]
        self._world = World(variant, tuple(self._actors), alone=True)
        self._of_state = of_state
        self._excuses_numbers = variant.promised is not Limit.NUMBERED_TWICE
        self._known: dict[bytes, str | None] = {}

    @property
    def tried(self) -> int:
        return len(self._known)

    def fault(self, s: bytes) -> str | None:
        """What is broken here, or would be once recover had run alone from here."""
        key = s[: v.LATE[0]] + s[v.GHOSTS[0] : v.BACKUP]
        if key not in self._known:
            self._known[key] = self._of_state(s) or self._try(s)
        return self._known[key]

    def _try(self, s: bytes) -> str | None:
        t = bytearray(s[: v.ACTORS] + bytes(v.ACTOR_FIELDS * len(self._actors)))
        t[v.LATE[0] : v.GHOSTS[0]] = bytes(v.GHOSTS[0] - v.LATE[0])
        if behind(t):
            rebuild(t)
        first = self._run(bytes(t))
        if isinstance(first, str):
            return first
        fault = self._unfinished(first) or self._of_state(first)
        if fault is not None:
            return f"recover was run alone to its end, and then: {fault}"
        second = self._run(first)
        if isinstance(second, str):
            return second
        if self._world_of(second) != self._world_of(first):
            return "recover found something to do the second time"
        return None

    def _run(self, s: bytes) -> bytes | str:
        for actor in self._actors:
            t = bytearray(s)
            t[actor.at + v.PC] = CODE[ROLES[actor.name][3]]
            s = bytes(t)
            for _ in range(_STEPS_MAX):
                if s[actor.at + v.PC] == CODE[IDLE]:
                    break
                out: Out = []
                STEPS[s[actor.at + v.PC]].body(self._world, s, actor, out)
                if not out:
                    return f"recover cannot go on from {STEPS[s[actor.at + v.PC]].name}"
                s = bytes(out[0][1])
            else:
                return "recover does not end"
        return s

    def _unfinished(self, s: bytes) -> str | None:
        for g, (row, folder) in enumerate(zip(v.ROWS, v.FOLDERS, strict=True)):
            passed_over = self._excuses_numbers and numbered_twice(s, g)
            if s[row + v.STATE] in v.OPEN and not passed_over:
                return "a generation of an older launch is still open: recover is wedged"
            unproven = s[row + v.STATE] == v.COMMITTED and not s[row + v.PROVEN]
            # Put back and committed a second time: storage holds the first verdict, or what a dead writer began of it.
            first = v.proves(s[folder + v.COMMIT]) or s[folder + v.COMMIT] >= v.TORN_LONG
            if unproven and not (s[v.ROLLED] == PUT_BACK and first):
                return "a committed generation can never be proven: recover is wedged"
        return None

    @staticmethod
    def _world_of(s: bytes) -> bytes:
        return s[v.FENCE + 1 : v.LATE[0]]
