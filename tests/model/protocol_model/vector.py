"""The state of the model: one string of bytes, so that a visited set of millions of them stays small.

Catalog first (it can be put back as a whole), then the store, requests that are still under way, the actors'
program counters, and what only the invariants look at.
"""

from __future__ import annotations

from typing import Final

from ckptfmt.format import states
from ckptfmt.format.states import State

RANKS: Final = 2
GENERATIONS: Final = 3
PARENT, FIRST, SECOND = range(GENERATIONS)
"""A generation that was committed before, the save of launch A, the save of launch B."""

# -- the catalog ------------------------------------------------------------------------------------
FENCE, NEXT_SEQ, EPOCH, HOLD, READERS = range(5)
"""``READERS``: bit g is set while a registered reader has generation g."""
ROW_FIELDS: Final = 9
STATE, ROW_FENCE, ACKS, MANIFEST, SEQ, ROW_EPOCH, C4_NUMBER, PROVEN, CLOSED = range(ROW_FIELDS)
"""``MANIFEST``: content (1, 2; 0 = none). ``C4_NUMBER`` stands for committed_at: which execution of C4 it was.
``CLOSED``: the catalog says that the tombstone is durable; the grace counts from there."""
ROWS: Final = tuple(5 + ROW_FIELDS * g for g in range(GENERATIONS))
CATALOG_BYTES: Final = 5 + ROW_FIELDS * GENERATIONS

# -- the store, per generation ----------------------------------------------------------------------
STORE_FIELDS: Final = 7
PACKS, PARTS, MANIFESTS, TORN_MANIFESTS, COMMIT, HINT, STONE = range(STORE_FIELDS)
"""Packs and parts: bit r is rank r's. Manifests: bit c-1 is the one of content c."""
FOLDERS: Final = tuple(CATALOG_BYTES + STORE_FIELDS * g for g in range(GENERATIONS))
_AFTER_STORE: Final = CATALOG_BYTES + STORE_FIELDS * GENERATIONS

TORN, ABORTED_VERDICT, FIRST_COMMITTED_VERDICT = 1, 2, 3
TORN_LONG: Final = 64
"""COMMIT slot: 0 empty, TORN a beginning that every verdict shares, 2 aborted, 3..63 committed (which facts),
TORN_LONG + v a longer beginning, of verdict v alone."""
STONE_WHOLE: Final = 2

# -- requests that were sent and may land at any time -----------------------------------------------
LATE_FIELDS: Final = 5
LATE_C4, LATE_VERDICT, LATE_MANIFESTS, LATE_PACKS, LATE_PARTS = range(LATE_FIELDS)
"""``LATE_C4``: the fence it was sent with. ``LATE_VERDICT``: the slot value that it brings."""
LATE: Final = tuple(_AFTER_STORE + LATE_FIELDS * g for g in range(GENERATIONS))
_AFTER_LATE: Final = _AFTER_STORE + LATE_FIELDS * GENERATIONS

# -- what only invariants see -----------------------------------------------------------------------
GHOST_FIELDS: Final = 4
REPORTED, FAILED, GIVEN_UP, C4_COUNT = range(GHOST_FIELDS)
"""``REPORTED``: 1 committed with its proof pending, 2 proven. ``GIVEN_UP``: retired on purpose."""
PENDING_REPORT, PROVEN_REPORT = 1, 2
GHOSTS: Final = tuple(_AFTER_LATE + GHOST_FIELDS * g for g in range(GENERATIONS))
_AFTER_GHOSTS: Final = _AFTER_LATE + GHOST_FIELDS * GENERATIONS
FENCE_MAX: Final = _AFTER_GHOSTS
RESTORED: Final = _AFTER_GHOSTS + 1
"""The highest fence of a launch that has restored."""
ROLLED: Final = _AFTER_GHOSTS + 2
"""0 nothing, 1 a copy of the catalog was taken, 2 it was put back."""
BACKUP: Final = _AFTER_GHOSTS + 3
ACTORS: Final = BACKUP + CATALOG_BYTES

# -- actors -----------------------------------------------------------------------------------------
ACTOR_FIELDS: Final = 4
PC, GEN, HELD, NOTE = range(ACTOR_FIELDS)
"""Program counter, generation at hand, fence held, and a value that the program keeps."""

NO_ROW: Final = 0
CODES: Final = {state: number for number, state in enumerate(State, start=1)}
STATES: Final = {number: state for state, number in CODES.items()}
WRITING, DURABLE, COMMITTED, ABORTED, RETIRED, DELETED = (
    CODES[state]
    for state in (State.WRITING, State.DURABLE, State.COMMITTED, State.ABORTED, State.RETIRED, State.DELETED)
)
OPEN: Final = frozenset(CODES[state] for state in states.OPEN_STATES)
INITIAL: Final = CODES[states.INITIAL]
MOVES: Final = {
    (step.name, CODES[step.source]): CODES[step.target]
    for step in states.TRANSITIONS
    if step.source in states.sources(step.name)
}
"""The transition table of the library: no step of the model changes a row's state but through this."""
LEGAL: Final = frozenset(
    (CODES[source], CODES[target]) for source in State for target in State if states.allowed(source, target) is not None
)


def committed_verdict(s: bytes | bytearray, g: int) -> int:
    """The slot value that COMMIT.json of this committed row would be: a pure function of the row."""
    row = ROWS[g]
    facts = ((s[row + SEQ] - 1) * 3 + s[row + ROW_EPOCH] - 1) * 2 + s[row + MANIFEST] - 1
    value = FIRST_COMMITTED_VERDICT + facts * 2 + min(s[row + C4_NUMBER], 2) - 1
    if not FIRST_COMMITTED_VERDICT <= value < TORN_LONG:
        raise AssertionError(f"the model's numbers are too small for verdict {value}")
    return value


def verdict_facts(value: int) -> tuple[int, int, int, int]:
    """(seq, epoch, manifest, number of the C4) of a committed slot value."""
    facts, c4 = divmod(value - FIRST_COMMITTED_VERDICT, 2)
    rest, manifest = divmod(facts, 2)
    seq, epoch = divmod(rest, 3)
    return seq + 1, epoch + 1, manifest + 1, c4 + 1


def proves(value: int) -> bool:
    """Whether a slot holds a committed verdict."""
    return FIRST_COMMITTED_VERDICT <= value < TORN_LONG


def complete(s: bytes | bytearray, g: int, manifest: int, ranks: int) -> bool:
    """Whether the store holds every rank's pack of the generation and this manifest."""
    folder = FOLDERS[g]
    every = (1 << ranks) - 1
    return s[folder + PACKS] == every and manifest > 0 and bool(s[folder + MANIFESTS] >> (manifest - 1) & 1)
