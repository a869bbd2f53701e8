"""Medians, ranges, and ratios with an interval that assumes nothing about how the figures are distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A median and the order statistics that enclose the true one (the sign test turned round)."""

    median: float
    low: float
    high: float
    count: int
    coverage: float
    """Probability that the true median lies within; below ``LEVEL`` where there are fewer than six figures."""


def interval(values: Sequence[float]) -> Interval:
    """The narrowest symmetric pair of order statistics that covers at least ``LEVEL``, else the whole range."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        raise ValueError("no figures to take the median of")
    inner = 0
    while inner + 1 < (count + 1) // 2 and _coverage(count, inner + 1) >= LEVEL:
        inner += 1
    return Interval(median(ordered), ordered[inner], ordered[count - 1 - inner], count, _coverage(count, inner))


def _coverage(count: int, cut: int) -> float:
    """Probability that the true median lies between the (cut + 1)th smallest and the (cut + 1)th largest."""
    return 1 - 2 * sum(comb(count, below) for below in range(cut + 1)) / 2**count if count > 1 else 0.0


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """One per pair; ``ValueError`` unless both have as many figures."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def best_of(ways: Mapping[str, Sequence[float]]) -> str:
    """The way with the least median."""
    return min(ways, key=lambda name: median(ways[name]))
