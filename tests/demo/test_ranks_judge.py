"""The judge of the demo of many ranks sees what goes wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from ckptfmt.demo.ranks.judge import TOLERANCE, judge
from ckptfmt.demo.ranks.report import table, view_table
from ckptfmt.errors import DrillFailed

STEPS, EVERY, BATCH = 8, 2, 8
Jobs = tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]], list[list[dict[str, Any]]]]


def loss(step: int) -> float:
    return 11.0 - 0.1 * step


def own(rank: int, step: int) -> dict[str, str]:
    return {"/rng/python": f"{rank} at {step}", "/loader/position": f"{rank} and {step}"}


def steps(rank: int, ranks: int, first: int, last: int, saved_by: int = 4) -> list[dict[str, Any]]:
    share = BATCH // ranks
    source = rank * saved_by // ranks
    events: list[dict[str, Any]] = []
    for step in range(first, last):
        sequences = [BATCH * step + rank * share, share]
        drawn = (source + step / 100).hex()
        events.append({"event": "step", "step": step, "loss": loss(step).hex(), "sequences": sequences, "drawn": drawn})
        if step and step % EVERY == 0:
            common = {"/model/w": str(step), "/model/b": "b", "/tokens": str(step)} if rank == 0 else {}
            events.append({"event": "saving", "step": step, "common": common, "own": own(source, step)})
    return events


def resumed(rank: int, ranks: int, step: int) -> list[dict[str, Any]]:
    common = {"/model/w": str(step), "/model/b": "b", "/tokens": str(step)} if rank == 0 else {}
    report = {"generation": 7, "step": step, "seconds": 0.1 + rank, "amplification": 1.0}
    first = {"event": "resumed", **report, "common": common, "own": own(rank * 4 // ranks, step)}
    return [first, *steps(rank, ranks, step + 1, STEPS)]


def jobs() -> Jobs:
    """Four ranks to the end; four that end in step 6, the last one without a word on it; two that go on from step 4."""
    uninterrupted = [steps(rank, 4, 0, STEPS) for rank in range(4)]
    killed = [steps(rank, 4, 0, 7 if rank < 3 else 6) for rank in range(4)]
    return uninterrupted, killed, [resumed(rank, 2, 4) for rank in range(2)]


def test_equal_trainings_are_equal() -> None:
    found = judge(*jobs())
    assert (found.resumed_generation, found.resumed_step) == (7, 4)
    assert found.values == {"model": 2, "tokens": 1}
    assert found.own_values == 4
    assert (found.difference_before, found.difference_after) == (0.0, 0.0)
    assert found.restore_seconds == 1.1
    assert (found.first_loss, found.last_loss) == (loss(0), loss(STEPS - 1))


def scaled_loss(factor: float) -> Callable[[Jobs], None]:
    def change(given: Jobs) -> None:
        given[2][0][-1]["loss"] = (loss(STEPS - 1) * factor).hex()

    return change


def test_another_order_of_additions_is_told_as_a_number() -> None:
    given = jobs()
    scaled_loss(1 + TOLERANCE / 2)(given)
    assert 0.4 * TOLERANCE < judge(*given).difference_after <= TOLERANCE


def another_loss_before(given: Jobs) -> None:
    given[1][0][1]["loss"] = (loss(1) * 1.01).hex()


def no_number(given: Jobs) -> None:
    given[2][0][-1]["loss"] = float("nan").hex()


def another_value(given: Jobs) -> None:
    given[2][0][0]["common"]["/model/b"] = "c"


def value_absent(given: Jobs) -> None:
    del given[2][0][0]["common"]["/model/w"]


def nothing_saved(given: Jobs) -> None:
    for event in given[1][0]:
        if event["event"] == "saving":
            event["common"] = {}


def own_of_another_rank(given: Jobs) -> None:
    given[2][1][0]["own"] = own(1, 4)


def another_generation(given: Jobs) -> None:
    given[2][1][0]["generation"] = 6


def began_afresh(given: Jobs) -> None:
    del given[2][1][0]


def never_saved(given: Jobs) -> None:
    for rank in given[2]:
        rank[0]["step"] = 3


def step_left_out(given: Jobs) -> None:
    del given[2][0][1]


def ended_early(given: Jobs) -> None:
    for rank in given[2]:
        del rank[-1]


def sequence_read_twice(given: Jobs) -> None:
    given[2][1][-1]["sequences"][0] -= 1


def other_draw(given: Jobs) -> None:
    given[2][1][-1]["drawn"] = (1 + (STEPS - 1) / 100).hex()


def no_progress(given: Jobs) -> None:
    for job in given:
        for rank in job:
            for event in rank:
                event |= {"loss": (5.0).hex()} if event["event"] == "step" else {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (scaled_loss(1 + 2 * TOLERANCE), "after the restart: the loss of step 7 .* allowed is 2e-06"),
        (another_loss_before, "before the kill: the loss of step 1"),
        (no_number, "after the restart: the loss of step 7 is nan"),
        (another_value, "restored step 4: /model/b"),
        (value_absent, "restored step 4: /model/w"),
        (nothing_saved, "restored step 4: no value was saved"),
        (own_of_another_rank, "own of rank 1, from rank 2: /rng/python"),
        (another_generation, "different generations"),
        (began_afresh, "began afresh"),
        (never_saved, "step 3 was restored, and rank 0 had not saved it"),
        (step_left_out, "step 5 was trained by no job"),
        (ended_early, "step 7 was trained by no job"),
        (sequence_read_twice, "step 7: 2 ranks read the sequences"),
        (other_draw, "step 7: rank 1 of 2 drew"),
        (no_progress, "does not fall"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_any_difference_is_named(change: Callable[[Jobs], None], words: str) -> None:
    given = copy.deepcopy(jobs())
    change(given)
    with pytest.raises(DrillFailed, match=words):
        judge(*given)


def test_tables_are_aligned() -> None:
    assert table([("a", "one"), ("long", "two")]) == "  a     one\n  long  two"
    rows = [{"id": 7, "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "seconds": 0.12345, "left": 1}]
    assert view_table([*rows, {"id": 8, "at": None, "seconds": None, "left": 2}], ("id", "at", "seconds")) == (
        "  id  at        seconds\n  7   03:04:05  0.123\n  8   -         -"
    )
