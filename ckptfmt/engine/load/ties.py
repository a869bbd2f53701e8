"""Live tensors that stand under several names: each is filled once."""

from __future__ import annotations

from collections.abc import Hashable

from ckptfmt.engine.load.decisions import Fill


class Ties:
    """Finds the fills of one and the same live tensor."""

    def __init__(self) -> None:
        self.at_address: dict[int, Fill] = {}
        """The first fill of those that begin at one address."""
        self._by_alias: dict[Hashable, Fill] = {}

    def first(self, fill: Fill, alias: Hashable | None) -> Fill:
        """The first fill of this very tensor: ``fill`` itself, unless it is tied to one seen before.

        ``alias`` is what its family says of a tensor without an address; of others that is only asked where several
        begin at one address.
        """
        if fill.address is not None:
            first = self.at_address.setdefault(fill.address, fill)
            if first is fill:
                return fill
            self._by_alias.setdefault(_alias(first), first)
            alias = _alias(fill)
        return fill if alias is None else self._by_alias.setdefault(alias, fill)


def _alias(fill: Fill) -> Hashable | None:
    return fill.family.describe(fill.value, fill.path).alias


def same_bytes(one: Fill, other: Fill) -> bool:
    """Whether two fills of one live tensor bring the same: one stored tensor, or two of equal digests."""
    if (one.start, one.row.dtype) != (other.start, other.row.dtype):
        return False
    if (one.row.name, one.row.rank) == (other.row.name, other.row.rank):
        return True
    return [(box.start, box.digests) for box in one.row.boxes] == [(box.start, box.digests) for box in other.row.boxes]
