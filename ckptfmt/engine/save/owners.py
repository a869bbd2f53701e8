"""Who writes what several ranks hold: every rank decides for itself, nobody asks, and all come to the same answer.

A box goes to one of its holders, which are the same on each of them. Only what all holders of a box see may count:
the other boxes of exactly these holders. So boxes are shared out among each set of holders by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

from ckptfmt.engine.plan import Roles
from ckptfmt.engine.save.context import Ranks
from ckptfmt.ports.arrays import LeafKind, LeafSpec


def roles_of(leaves: Sequence[tuple[str, LeafSpec]], ranks: Ranks) -> Roles:
    """Share the boxes of ``leaves`` out: largest first, each to the holder that has least, the lowest one of several.

    A pure function: ranks that agree on the boxes of one set of holders agree on who writes them, in whatever order
    their leaves come.
    """
    bare = frozenset([index for index, (_, spec) in enumerate(leaves) if not _has_box(spec)])
    if len(ranks.members) == 1:
        return Roles(frozenset(), bare)
    members = frozenset(ranks.members)
    shared: dict[tuple[int, ...], list[tuple[int, str, tuple[int, ...], int]]] = {}
    saving: dict[tuple[int, ...], tuple[int, ...]] = {(): ranks.members}
    for index, (name, spec) in enumerate(leaves):
        if index in bare or (spec.kind != "replicated" and not spec.holders):
            continue
        holders = saving.get(spec.holders)
        if holders is None:
            holders = saving[spec.holders] = tuple([rank for rank in spec.holders if rank in members])
        if len(holders) > 1:
            shared.setdefault(holders, []).append((-spec.nbytes, name, spec.start, index))
    claims: list[int] = []
    for holders, boxes in shared.items():
        loads = [(0, rank) for rank in holders]
        for minus_bytes, _, _, index in sorted(boxes):
            load, writer = loads[0]
            heapreplace(loads, (load - minus_bytes, writer))
            if writer != ranks.rank:
                claims.append(index)
    return Roles(frozenset(claims), bare)


def stored_kinds(specs: Sequence[LeafSpec], ranks: Ranks) -> list[LeafKind]:
    """The kinds that the manifest tells: ``replicated`` is what *every* rank that saves holds. What only the ranks of
    one mesh hold whole is a sharded tensor that happens to have one box."""
    members = frozenset(ranks.members)
    everyone: dict[tuple[int, ...], bool] = {(): True}
    kinds: list[LeafKind] = []
    for spec in specs:
        by_all = everyone.get(spec.holders)
        if by_all is None:
            by_all = everyone[spec.holders] = members.issubset(spec.holders)
        kinds.append(spec.kind if by_all or spec.kind != "replicated" else "sharded")
    return kinds


def _has_box(spec: LeafSpec) -> bool:
    return spec.nbytes > 0 or 0 in spec.global_shape
