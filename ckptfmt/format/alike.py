"""What was found out about stretches of columns, for the layers of a model are alike, and so are their boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")
V = TypeVar("V")

_KEPT: Final = 16
"""A layer has about so many shapes. With more, each stretch would be compared with too many others."""


class Alike(Generic[T, V]):
    """Answers of ``make`` for values lately met.

    They are compared, not hashed: equal columns hold mostly the same objects, which costs next to nothing, and unequal
    ones differ soon.
    """

    def __init__(self, make: Callable[[T], V]) -> None:
        self._make = make
        self._known: list[tuple[T, V]] = []
        """Latest last."""

    def __call__(self, value: T) -> V:
        for at in range(len(self._known) - 1, -1, -1):
            if self._known[at][0] == value:
                found = self._known.pop(at)
                break
        else:
            found = (value, self._make(value))
            del self._known[: 1 - _KEPT]
        self._known.append(found)
        return found[1]
