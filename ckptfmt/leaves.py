"""Marks that a user puts around a value to say what it is to the other ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptfmt.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class PerRank:
    """A value of which every rank keeps its own, under the same name (for example a data loader's position)."""

    value: Any


@dataclass(frozen=True, eq=False)
class Sharded:
    """This rank's box of a tensor that is spread over the ranks.

    ``local`` is a tensor or array; the whole has ``global_shape`` (elements per dimension), and
    ``local`` begins at ``offsets`` in it. The boxes of all ranks must hold every element; where several
    ranks give the same box, its bytes must be equal. A rank that holds nothing of the tensor gives a
    ``local`` of no elements, with any offsets. Raises ``InvalidInput`` unless the box has the same number
    of dimensions as the whole, no negative number occurs, and the box lies inside.
    """

    local: Any
    global_shape: Sequence[int]
    offsets: Sequence[int]

    def __post_init__(self) -> None:
        shape = getattr(self.local, "shape", None)
        if shape is None:
            raise InvalidInput(
                f"Sharded(local=...): {type(self.local).__name__} has no shape; pass the tensor or array held here"
            )
        size = tuple(shape)
        whole = _dimensions("global_shape", self.global_shape)
        start = _dimensions("offsets", self.offsets)
        if not len(size) == len(whole) == len(start):
            raise InvalidInput(
                f"Sharded: local has {len(size)} dimensions, global_shape {len(whole)} and offsets {len(start)}; "
                "all three must be equal"
            )
        for axis, (first, count, total) in enumerate(zip(start, size, whole, strict=True)):
            if first + count > total:
                raise InvalidInput(
                    f"Sharded: on axis {axis} the box covers {first}..{first + count}, outside the global "
                    f"extent {total}; check offsets {start} and local shape {size}"
                )
        # Tuples of plain ints: what was checked cannot change afterwards.
        object.__setattr__(self, "global_shape", whole)
        object.__setattr__(self, "offsets", start)


@dataclass(frozen=True, eq=False)
class Boxes:
    """Several boxes of one tensor on this rank, at least one. For planners; users mark each tensor ``Sharded``."""

    parts: Sequence[Sharded]

    @property
    def local(self) -> Any:
        return self.parts[0].local


@dataclass(frozen=True, eq=False)
class Sole:
    """A value whose tensors this rank alone writes, though they belong to the state of all ranks: for planners that
    have shared out who writes what. ``make`` is called where a save can still be declined if it fails."""

    make: Callable[[], Any]

    @cached_property
    def value(self) -> Any:
        return self.make()


def _dimensions(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        numbers = tuple(operator.index(value) for value in values)
    except TypeError:
        raise InvalidInput(f"Sharded({name}={values!r}): must be a sequence of whole numbers") from None
    if any(isinstance(value, bool) for value in values) or any(number < 0 for number in numbers):
        raise InvalidInput(f"Sharded({name}={values!r}): must hold whole numbers that are not negative")
    return numbers
