"""Messages name a few of many ranks, and say how many more there are."""

from __future__ import annotations

import pytest

from ckptfmt.format.naming import NAMED_MAX, ranks_shown, shown


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 2], "ranks 0, 2"),
        (range(NAMED_MAX), "ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        (range(NAMED_MAX + 1), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"),
        (range(2**40), f"ranks 0, 1, 2, 3, 4, 5, 6, 7 and {2**40 - NAMED_MAX} more"),
    ],
)
def test_ranks(ranks: range | list[int], words: str) -> None:
    assert ranks_shown(ranks) == words


def test_who_counts_without_having_them_all() -> None:
    assert shown(["a", "b"], 7) == "a, b and 5 more"
