"""How messages name ranks, and other things of which there may be thousands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

NAMED_MAX: Final = 8
"""So many are named, and the others counted."""


def shown(items: Sequence[object], count: int | None = None) -> str:
    """Return the first of ``items`` and how many more there are: ``0, 1, 2 and 5 more``.

    ``count``: how many there are in all, for who knows that without having them all.
    """
    first = items[:NAMED_MAX]
    more = (len(items) if count is None else count) - len(first)
    return ", ".join(map(str, first)) + (f" and {more} more" if more else "")


def ranks_shown(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, or ``ranks 0, 1, 2 and 5 more``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown(ranks)}"
