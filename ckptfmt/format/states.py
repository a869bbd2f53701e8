"""The states of a generation and the one table of their transitions.

The table drives the code, the SQL triggers (generated from it) and the picture in
``spec/catalog.md``. It is pure data: nothing here touches storage or SQL.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class State(StrEnum):
    """State of a generation, as stored in ``generations.state``."""

    WRITING = "writing"
    DURABLE = "durable"
    COMMITTED = "committed"
    ABORTED = "aborted"
    RETIRED = "retired"
    DELETED = "deleted"


@dataclass(frozen=True)
class Transition:
    """One allowed step. ``name`` is the event kind that records it."""

    name: str
    source: State
    target: State
    repair: bool = False
    """A repair needs evidence from storage: only recover and rebuild take it."""


TRANSITIONS: Final[tuple[Transition, ...]] = (
    Transition("durable", State.WRITING, State.DURABLE),
    Transition("commit", State.DURABLE, State.COMMITTED),
    Transition("abort", State.WRITING, State.ABORTED),
    Transition("abort", State.DURABLE, State.ABORTED),
    Transition("retire", State.COMMITTED, State.RETIRED),
    Transition("delete", State.RETIRED, State.DELETED),
    Transition("delete", State.ABORTED, State.DELETED),
    Transition("adopt", State.ABORTED, State.COMMITTED, repair=True),
    Transition("adopt", State.WRITING, State.COMMITTED, repair=True),
    Transition("adopt", State.DURABLE, State.COMMITTED, repair=True),
)

INITIAL: Final = State.WRITING
OPEN_STATES: Final = frozenset({State.WRITING, State.DURABLE})
"""States of a generation that is still being saved."""
TERMINAL_SAVE_STATES: Final = frozenset(State) - OPEN_STATES


def allowed(source: State, target: State) -> Transition | None:
    """Return the transition from ``source`` to ``target``, or None if there is none.

    Where an ordinary step and a repair join the same two states, it is the ordinary one.
    """
    found = [step for step in TRANSITIONS if (step.source, step.target) == (source, target)]
    return min(found, key=lambda step: step.repair, default=None)


def sources(name: str) -> tuple[State, ...]:
    """Return the states from which the transition called ``name`` may start."""
    return tuple(step.source for step in TRANSITIONS if step.name == name)
