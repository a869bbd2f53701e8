"""Medians, their intervals, and what counts as a goal that is met."""

from __future__ import annotations

import random

import pytest

from benchmarks.goals import Goal, goals_of
from benchmarks.pairs import best_of, interval, ratios
from benchmarks.plan import LIMITS
from benchmarks.samples import Samples


@pytest.mark.parametrize(
    ("count", "low", "high", "coverage"),
    # Conover, Practical Nonparametric Statistics: order statistics around the median by the binomial distribution.
    [(1, 1, 1, 0.0), (5, 1, 5, 0.9375), (6, 1, 6, 0.96875), (9, 2, 8, 0.9609375), (10, 2, 9, 0.978515625)],
)
def test_the_interval_is_that_of_the_sign_test(count: int, low: int, high: int, coverage: float) -> None:
    found = interval(random.Random(count).sample(range(1, count + 1), count))
    assert (found.low, found.high, found.coverage) == (low, high, coverage)
    assert found.median == (count + 1) / 2
    assert found.count == count


def test_an_interval_covers_the_median_as_often_as_it_says() -> None:
    draws = random.Random(7)
    hits = sum(
        found.low <= 0.5 <= found.high for found in (interval([draws.random() for _ in range(9)]) for _ in range(4000))
    )
    assert 0.945 < hits / 4000 < 0.975


def test_pairs_must_match() -> None:
    assert ratios([2.0, 9.0], [4.0, 3.0]) == [0.5, 3.0]
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no figures"):
        interval([])


def test_the_best_way_has_the_least_median() -> None:
    assert best_of({"a": [1.0, 9.0, 9.0], "b": [5.0, 5.0, 5.0]}) == "b"


def test_a_goal_is_met_by_the_lower_end_of_its_interval() -> None:
    values = [0.9, 1.0, 1.2, 1.2, 1.2, 1.2, 1.3, 1.3, 1.3]
    assert Goal(1, "", "", 1.2, interval(values)).clear
    near = Goal(1, "", "", 1.0, interval(values))
    assert near.met
    assert not near.clear
    assert not Goal(1, "", "", 0.95, interval(values)).met


def save(stall: float, durable: float) -> dict[str, float]:
    return {"stall": stall, "durable": durable, "after_stall": durable - stall, "cpu_after_stall": 0.4}


def test_goals_take_the_best_limit_and_leave_first_saves_out() -> None:
    samples = Samples()
    for _ in range(3):
        limits = {
            "copy": {"slow": [9.0] * 2, "quick": [0.1] * 2},
            "write": {"1": [5.0] * 2, "4": [0.5] * 2},
            "hashed_cpu": [0.2] * 2,
        }
        samples.add("saves train", LIMITS, limits)
        first = save(50.0, 90.0)
        samples.add("saves train", "ckptfmt", {"saves": [first, save(0.12, 0.66), save(0.12, 0.66)]})
        for name in ("DCP async", "DCP async, cached", "safetensors"):
            samples.add("saves train", name, {"saves": [first, save(0.24, 1.0), save(0.24, 1.0)]})
    found = {goal.text: goal for goal in goals_of(samples)}
    assert found["stall / best raw copy"].found.median == pytest.approx(1.2)
    assert found["committed / (raw copy + raw write)"].found.median == pytest.approx(1.1)
    assert found["stall / DCP async"].found.median == pytest.approx(0.5)
    assert not found["stall / DCP async"].met
    assert found["CPU from frozen / raw write and hash"].found.median == pytest.approx(2.0)
    assert found["committed / safetensors + fsync"].met
