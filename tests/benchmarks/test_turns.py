"""Contenders of a benchmark take turns, and do not wait for one that has failed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.turns import Turns


def test_all_take_turns_in_one_order(tmp_path: Path) -> None:
    done: list[int] = []
    busy: list[int] = []

    def work(place: int) -> None:
        with Turns(tmp_path / "turn", place, 3) as turns:
            for _ in range(4):
                with turns.mine():
                    assert not busy
                    busy.append(place)
                    done.append(place)
                    busy.clear()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, reversed(range(3))))
    assert done == [0, 1, 2] * 4


def test_nobody_waits_for_one_that_has_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Turns(tmp_path / "turn", 0, 2):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="has failed"), Turns(tmp_path / "turn", 1, 2) as turns, turns.mine():
        raise AssertionError("it is not this one's turn")
