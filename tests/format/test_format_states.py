"""The transition table."""

from __future__ import annotations

import pytest

from ckptfmt.format.states import OPEN_STATES, TERMINAL_SAVE_STATES, TRANSITIONS, State, allowed, sources


def test_an_ordinary_step_goes_before_a_repair_of_the_same_pair() -> None:
    step = allowed(State.DURABLE, State.COMMITTED)
    assert step is not None
    assert (step.name, step.repair) == ("commit", False)


@pytest.mark.parametrize("source", State)
@pytest.mark.parametrize("target", State)
def test_exactly_the_pairs_of_the_table_are_allowed(source: State, target: State) -> None:
    step = allowed(source, target)
    in_table = any((row.source, row.target) == (source, target) for row in TRANSITIONS)
    assert (step is not None) == in_table
    if step is not None:
        assert step in TRANSITIONS


def test_nothing_leaves_deleted_and_only_repairs_leave_aborted_for_committed() -> None:
    assert not [row for row in TRANSITIONS if row.source is State.DELETED]
    assert all(row.repair for row in TRANSITIONS if (row.source, row.target) == (State.ABORTED, State.COMMITTED))
    assert sources("commit") == (State.DURABLE,)
    assert frozenset(State) == OPEN_STATES | TERMINAL_SAVE_STATES
