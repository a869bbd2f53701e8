"""Whose own values a rank gets back: what each saved rank kept by itself, seen from a rank of today."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

from ckptfmt.engine.load.nodes import slots_in_registered
from ckptfmt.engine.opened import Opened
from ckptfmt.errors import InvalidInput, Mismatch
from ckptfmt.format import tree
from ckptfmt.format.naming import ranks_shown, shown

RankMap = Mapping[int, int | None] | Callable[[int], int | None]
"""Rank of today -> the saved rank whose own values it gets; None: nobody's, it goes on with those that it has."""


class RankView:
    """A generation as one rank sees it.

    ``rank`` is the saved rank whose own values stand in the slots; None if nobody has said whose do: then a slot that
    is needed is a ``Mismatch`` with ``advice``. With ``nobody`` it was said that none are to be taken.
    """

    def __init__(self, opened: Opened, rank: int | None, advice: str, *, nobody: bool = False) -> None:
        self.opened = opened
        self.rank = rank
        self.nobody = nobody
        self._advice = advice

    def refusal(self, node: tree.Node) -> str | None:
        """Why ``node`` cannot be seen, naming its path: it is a slot, and nobody said whose, or that rank kept none.
        None for every other node."""
        if not isinstance(node, dict) or "per_rank" not in node:
            return None
        slot = node["per_rank"]
        if self.rank is None:
            return f"{slot}: kept by {self._keepers(slot)} for itself; {self._advice}"
        if slot in self.opened.slots(self.rank):
            return None
        keepers = ranks_shown(self.opened.keepers(slot))
        return f"{slot}: saved rank {self.rank} kept none, only {keepers} did; {self._advice}"

    def _keepers(self, slot: str) -> str:
        """Who kept something under ``slot``, in words."""
        keepers = self.opened.keepers(slot)
        if len(keepers) == len(self.opened.ranks):
            return f"each of {self.opened.ranks_text}"
        return ("" if len(keepers) == 1 else "each of the ") + ranks_shown(keepers)

    def slot(self, node: tree.Node) -> tree.Node:
        """What stands where ``node`` is a slot; any other node is returned as it is."""
        if not isinstance(node, dict) or "per_rank" not in node:
            return node
        self.require([node])
        return self.opened.slots(self.rank or 0)[node["per_rank"]]

    def look(self, node: tree.Node) -> tree.Node:
        """As ``slot``, but a slot that cannot be seen is returned as it is."""
        return node if self.refusal(node) is not None else self.slot(node)

    def require(self, nodes: Iterable[tree.Node]) -> None:
        """``Mismatch`` that lists every slot among and below ``nodes`` that cannot be seen."""
        problems = tuple(dict.fromkeys(problem for node in nodes for problem in self.refusals(node)))
        if problems:
            raise Mismatch(
                f"{self.opened.name}: it is not told whose of the saved ranks' own values to take:",
                problems,
                kind="rank_not_chosen",
            )

    def refusals(self, node: tree.Node) -> list[str]:
        """What ``refusal`` says of every slot that ``node`` is or holds, each once."""
        if not self._has_slots:
            return []
        slots = dict.fromkeys(name for tag, name in tree.references(node) if tag == "per_rank")
        return [problem for name in slots if (problem := self.refusal(tree.per_rank(name))) is not None]

    @cached_property
    def _has_slots(self) -> bool:
        return bool(self.opened.keepers())

    @cached_property
    def marked(self) -> frozenset[str]:
        """The slots inside values of registered types."""
        return frozenset(slots_in_registered(self.opened.common))

    def own_trees(self) -> list[tree.Node]:
        """Everything that the rank in view kept."""
        return [] if self.rank is None else list(self.opened.slots(self.rank).values())


def view_for_load(opened: Opened, rank: int | None) -> RankView:
    """What ``load`` builds: the state of ``rank``; None is the only one that kept values, or nobody's own values."""
    keepers = opened.keepers() if rank is None else []
    if len(keepers) == 1:
        rank = keepers[0]
    if rank is not None:
        rank = _saved(opened, rank, "rank=")
    return RankView(opened, rank, "name one with rank=, or leave the values out with keys= or exclude=")


def view_for_restore(opened: Opened, *, rank: int, world_size: int, map: RankMap | None) -> RankView:
    """What ``restore`` fills a live state of rank ``rank`` of ``world_size`` with.

    The own values of the same rank at the same world size; else those that ``map`` names, never anybody's by default.
    """
    if map is not None:
        mapped = _mapped(opened, rank, map)
        advice = "choose other ranks with map=, or leave it out with keys="
        return RankView(opened, mapped, advice, nobody=mapped is None)
    if world_size == len(opened.ranks) and rank in opened.ranks:
        return RankView(opened, rank, "choose another rank with map=, or leave it out with keys=")
    return RankView(
        opened,
        None,
        f"here is rank {rank} of {world_size}: say whose value each rank gets with map= (a function or mapping: rank "
        "-> saved rank), or leave it out with keys=",
    )


def _mapped(opened: Opened, rank: int, map: RankMap) -> int | None:
    if not isinstance(map, Mapping):
        saved, what = map(rank), f"map({rank})="
    elif rank in map:
        saved, what = map[rank], f"map[{rank}]="
    else:
        raise InvalidInput(f"map= says nothing of rank {rank}, only of {shown(list(map)) or 'none'}")
    return None if saved is None else _saved(opened, saved, what)


def _saved(opened: Opened, rank: int, what: str) -> int:
    try:
        number = operator.index(rank)
    except TypeError:
        number = -1
    if isinstance(rank, bool) or number not in opened.ranks:
        raise InvalidInput(f"{what}{rank!r}: {opened.name} was saved by {opened.ranks_text}, counted from 0")
    return number
