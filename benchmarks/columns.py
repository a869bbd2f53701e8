"""Rows of text under each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Row = Sequence[str]


def aligned(rows: Iterable[Row], *, left: int = 1) -> list[str]:
    """One line a row: the first ``left`` columns aligned left, the others, which are figures, right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])]).rstrip()
        for row in rows
    ]
