"""The order that brings the boxes of several parts together: those of one tensor side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final, NamedTuple

from ckptfmt.format.part import Part

_STRIPS_FROM: Final = 32
"""With so many parts it pays to look for strips."""
_TALL: Final = 16
"""With so many tensors it pays to take a strip as a whole."""


class _Strip(NamedTuple):
    """Tensors, one after the other, that the same parts have boxes of, each part one behind the other."""

    at: list[int]
    """Where the boxes of the first of these tensors stand."""
    height: int
    """How many tensors."""


class BoxOrder:
    """``rows[i]`` is the row of the i-th box, ascending, and ``at[i]`` where that box stands in the columns, in which
    each part's boxes stand behind those of the one before. Boxes of one row come by part, until that is changed."""

    def __init__(self, parts: Sequence[Part], rows_of: Sequence[Sequence[int]]) -> None:
        import numpy as np  # here: reading a manifest, which begins with this package, needs none

        known: dict[tuple[int, int], Any] = {}
        pieces = []
        for part, rows in zip(parts, rows_of, strict=True):
            table = part.boxes.tensor
            piece = known.get((id(rows), id(table)))
            if piece is None:
                piece = known[id(rows), id(table)] = np.asarray(rows, np.int64)[np.asarray(table, np.int64)]
            pieces.append(piece)
        flat = np.concatenate(pieces)
        if len(flat) and flat.max() < 2**15:
            flat = flat.astype(np.int16)  # which numpy sorts by its digits
        order = np.argsort(flat, kind="stable")
        in_order = flat[order]
        self.rows: list[int] = in_order.tolist()
        self.at: list[int] = order.tolist()
        self._strips = _strips(in_order, order) if len(flat) and len(parts) >= _STRIPS_FROM else []

    def change(self, row: int, first: int, last: int, boxes: Sequence[int]) -> None:
        """Let ``boxes`` stand where the boxes ``first`` up to ``last`` stood, all of them of one row."""
        self.at[first:last] = boxes
        self.rows[first:last] = [row] * len(boxes)
        self._strips = []

    def taken(self, column: Sequence[Any]) -> list[Any]:
        """The items of a column in this order."""
        if not self._strips:
            return list(_picked(column, self.at))
        found: list[Any] = []
        for strip in self._strips:
            if strip.height == 1:
                found += _picked(column, strip.at)
            else:  # to pass along all parts at once is much faster than to jump from one to the next
                pieces = [column[first : first + strip.height] for first in strip.at]
                found += chain.from_iterable(zip(*pieces, strict=True))
        return found


def _strips(rows: Any, at: Any) -> list[_Strip]:
    """All boxes in strips; those that are in no tall one in ones of height 1. None at all if none is tall."""
    import numpy as np

    begins = np.flatnonzero(np.diff(rows, prepend=-1)).tolist()
    runs = [at[first:last] for first, last in zip(begins, [*begins[1:], len(at)], strict=True)]
    found: list[_Strip] = []
    first = 0
    while first < len(runs):
        last = first + 1
        while last < len(runs) and np.array_equal(runs[last - 1] + 1, runs[last]):
            last += 1
        if last - first >= _TALL:
            found.append(_Strip(runs[first].tolist(), last - first))
        else:
            if not found or found[-1].height > 1:
                found.append(_Strip([], 1))
            found[-1].at.extend(chain.from_iterable(run.tolist() for run in runs[first:last]))
        first = last
    return found if any(strip.height > 1 for strip in found) else []


def _picked(column: Sequence[Any], at: Sequence[int]) -> Sequence[Any]:
    return itemgetter(*at)(column) if len(at) > 1 else [column[i] for i in at]
