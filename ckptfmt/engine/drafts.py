"""Which leaves a pack has, and where each of them lies in its file: packs that have no place in host memory yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ckptfmt.format import pack
from ckptfmt.ports.arrays import LeafSpec


@dataclass(frozen=True)
class Draft:
    members: Sequence[int]
    """Leaf indices in file order."""
    layout: pack.PackLayout
    claims: bool
    """Whether its leaves are only hashed: another rank writes them."""
    sync: bool
    """Whether it is written while training is blocked."""


def draft_packs(
    leaves: Sequence[tuple[str, LeafSpec]], written: Sequence[int], claimed: Sequence[int], sync: Collection[int]
) -> list[Draft]:
    """Divide the leaves that are ``written`` into packs, and the ``claimed`` ones; those in ``sync`` come first."""
    entries = [
        pack.PackEntry(
            name=name, dtype=s.dtype, size=s.size, start=s.start, global_shape=s.global_shape, nbytes=s.nbytes
        )
        for name, s in leaves
    ]
    drafts: list[Draft] = []
    for first in (True, False) if sync else (False,):
        mine = [index for index in written if (index in sync) is first]
        for members in _groups(entries, mine):
            drafts.append(Draft(members, pack.layout_pack([entries[index] for index in members]), False, first))
        only_hashed = [index for index in claimed if entries[index].nbytes and (index in sync) is first]
        if only_hashed:
            drafts.append(Draft(only_hashed, _headless([entries[index].nbytes for index in only_hashed]), True, first))
    return drafts


def _headless(sizes: Sequence[int]) -> pack.PackLayout:
    """Leaves back to back, in the order in which they come."""
    stops = list(accumulate(sizes, initial=0))
    return pack.PackLayout(b"", "", tuple(stops[:-1]), stops[-1])


def _groups(entries: Sequence[pack.PackEntry], chosen: Sequence[int]) -> list[list[int]]:
    """Divide the ``chosen`` entries into packs; the members of each in file order.

    Second boxes of a tensor come after all first ones, and so on: then there are about as many packs as a tensor has
    boxes, not as there are tensors of several boxes.
    """
    rounds: list[list[int]] = []
    met: dict[str, int] = {}
    for index in chosen:
        number = met[entries[index].name] = met.get(entries[index].name, -1) + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(index)
    groups: list[list[int]] = []
    for members in rounds:
        order = [members[position] for position in pack.order([entries[index] for index in members])]
        groups += [[order[position] for position in group] for group in pack.split([entries[index] for index in order])]
    return groups
