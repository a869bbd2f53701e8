"""What must hold in every state, and for every transition. Each returns the broken promise in words, or None."""

from __future__ import annotations

from protocol_model import vector as v
from protocol_model.loss import PUT_BACK, contradicts
from protocol_model.machine import CODE, Event, World
from protocol_model.read_steps import READING
from protocol_model.variant import Limit


class Invariants:
    """The promises of spec/commit-protocol.md for one world."""

    def __init__(self, world: World) -> None:
        self._ranks = world.variant.ranks
        self._promised = world.variant.promised
        reading = {CODE[name] for name in READING}
        self._readers = [a for a in world.actors if a.kind in ("reader", "looker", "prover_reader")]
        self._reading = reading

    def of_readers(self, s: bytes) -> str | None:
        for a in self._readers:
            g = s[a.at + v.GEN]
            # Retired, put back, and opened: the objects that are gone are missing by name when they are read.
            given_up = a.kind != "prover_reader" and s[v.GHOSTS[g] + v.GIVEN_UP] and self._put_back(s)
            if s[a.at + v.PC] in self._reading and not self._packs_whole(s, g) and not given_up:
                return f"{a.name} reads a generation that lacks a rank's data"
        return None

    def of_generations(self, s: bytes) -> str | None:
        """Looks at catalog, store and history alone."""
        for g in range(v.GENERATIONS):
            fault = self._of_generation(s, g)
            if fault is not None:
                return fault
        return None

    def _packs_whole(self, s: bytes, g: int) -> bool:
        return s[v.FOLDERS[g] + v.PACKS] == (1 << self._ranks) - 1

    def _of_generation(self, s: bytes, g: int) -> str | None:
        row, folder, ghost = v.ROWS[g], v.FOLDERS[g], v.GHOSTS[g]
        slot = s[folder + v.COMMIT]
        proven = v.proves(slot)
        openable = proven and not s[folder + v.STONE]
        if openable and not v.complete(s, g, v.verdict_facts(slot)[2], self._ranks):
            return "storage proves a generation whose data is not all there"
        committed = s[row + v.STATE] == v.COMMITTED and not (self._put_back(s, Limit.SWEPT) and contradicts(s, g))
        if committed and not v.complete(s, g, s[row + v.MANIFEST], self._ranks):
            return "the catalog calls a generation committed whose data is not all there"
        if s[ghost + v.FAILED] and (s[row + v.SEQ] or proven) and not self._put_back(s, Limit.FAILED):
            return "a save was said to have failed and is committed"
        if proven and s[row + v.SEQ] == 0 and not self._put_back(s):
            return "storage proves a generation that was never committed"
        return self._of_report(s, g, openable) if s[ghost + v.REPORTED] and not s[ghost + v.GIVEN_UP] else None

    def _of_report(self, s: bytes, g: int, openable: bool) -> str | None:
        if s[v.ROWS[g] + v.STATE] != v.COMMITTED and not self._put_back(s):
            return "a reported save is not committed in the catalog"
        if s[v.GHOSTS[g] + v.REPORTED] == v.PROVEN_REPORT and not (openable and s[v.FOLDERS[g] + v.HINT]):
            return "a save reported as proven cannot be opened by proof"
        return None

    def _put_back(self, s: bytes, limit: Limit | None = None) -> bool:
        """Whether what only the catalog held may be forgotten, and this is a limit of what is promised then."""
        return s[v.ROLLED] == PUT_BACK and (limit is None or limit is not self._promised)

    def of_transition(self, s: bytes, event: Event, t: bytes | bytearray) -> str | None:
        """``s`` to ``t``; only the steps that may break something are looked at."""
        if event.step == "put_back":
            return None
        for g in range(v.GENERATIONS):
            row, folder = v.ROWS[g], v.FOLDERS[g]
            old, new = s[row + v.STATE], t[row + v.STATE]
            if old != new and event.step != "rebuild":
                if (old, new) not in v.LEGAL and (old, new) != (v.NO_ROW, v.INITIAL):
                    return f"the table has no step from {v.STATES.get(old, 'nothing')} to {v.STATES[new]}"
                if new == v.COMMITTED and event.step in ("commit", "land"):
                    fault = self._of_commit(s, g, t)
                    if fault is not None:
                        return fault
            slot = s[folder + v.COMMIT]
            if v.ABORTED_VERDICT <= slot < v.TORN_LONG and t[folder + v.COMMIT] != slot:
                return "the verdict on a generation was changed"
            if s[folder + v.STONE] == v.STONE_WHOLE and t[folder + v.STONE] != v.STONE_WHOLE:
                return "a tombstone was changed"
            if s[row + v.SEQ] and s[row + v.MANIFEST] != t[row + v.MANIFEST]:
                return "the manifest of a committed generation was changed"
        return None

    def _of_commit(self, s: bytes, g: int, t: bytes | bytearray) -> str | None:
        # Forgotten with the catalog: the newer launch, or that this very save was committed before.
        forgotten = self._put_back(s, Limit.FENCED) and (s[v.FENCE] < s[v.FENCE_MAX] or s[v.GHOSTS[g] + v.C4_COUNT])
        if t[v.ROWS[g] + v.ROW_FENCE] < s[v.RESTORED] and not forgotten:
            return "a save was committed after a newer launch had restored"
        return None

    def of_fence(self, s: bytes, fence: int) -> str | None:
        """C4 took effect, sent with ``fence``."""
        forgotten = self._put_back(s, Limit.FENCED) and s[v.FENCE] < s[v.FENCE_MAX]
        return "a fenced launch committed" if fence != s[v.FENCE_MAX] and not forgotten else None
