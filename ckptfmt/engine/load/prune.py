"""Leaving tensors out of a saved tree, by name."""

from __future__ import annotations

from collections.abc import Callable

from ckptfmt.engine.load.names import Slot
from ckptfmt.engine.load.nodes import UNSET, items_of, object_of, pairs_of, tag_of, with_pairs
from ckptfmt.errors import InvalidInput
from ckptfmt.format import tree

Keep = Callable[[str], bool]


class Pruner:
    """Takes the tensors that ``keep`` refuses out of a tree; per-rank slots are put in place.

    A tensor leaves its mapping. A list, or any other container that is no mapping, goes as a whole: it stays if all of
    its tensors are wanted (or it has none), leaves if none is, and is ``InvalidInput`` in between, since the
    positions of the rest would shift. Mappings inside a list lose their own tensors and stay.
    A slot that nobody can look into is kept or refused as a tensor of its name would be.
    """

    def __init__(self, keep: Keep, slot: Slot) -> None:
        self._keep = keep
        self._slot = slot

    def prune(self, node: tree.Node) -> tree.Node:
        """The node without the refused tensors, or ``UNSET`` if nothing is left of it."""
        node = self._slot(node)
        tag = tag_of(node)
        if tag == "per_rank":
            return node if self._keep(node[tag]) else UNSET
        if tag in tree.REFERENCE_TAGS:
            return node if self._keep(tree.split_reference(node[tag])[0]) else UNSET
        pairs = pairs_of(node)
        if pairs is not None:
            pruned = [[key, self.prune(child)] for key, child in pairs]
            return with_pairs(node, [pair for pair in pruned if pair[1] is not UNSET])
        live = object_of(node)
        if live is not None:
            kind, type_name, notes, state = live
            inner = self.prune(state)
            return UNSET if inner is UNSET else {tag: [kind, type_name, notes, inner]}
        items = items_of(node)
        if items is not None:
            return self._items(items, tag)
        return node if self._wanted(node, tag) else UNSET

    def _items(self, before: list[tree.Node], tag: str) -> tree.Node:
        after = [self.prune(item) for item in before]
        if not any(item is UNSET for item in after):
            return after if tag == "list" else {tag: after}
        if all(item is UNSET or not self._names(item) for item in after):
            return UNSET
        gone = next(self._names(old)[0] for old, new in zip(before, after, strict=True) if new is UNSET)
        raise _shifts(gone, tag)

    def _wanted(self, node: tree.Node, tag: str) -> bool:
        names = self._names(node)
        refused = [name for name in names if not self._keep(name)]
        if refused and len(refused) < len(names):
            raise _shifts(refused[0], tag)
        return not refused

    def _names(self, node: tree.Node) -> list[str]:
        """The tensors below ``node``, those in per-rank slots included."""
        found: list[str] = []
        todo = [node]
        while todo:
            for tag, name in tree.references(todo.pop()):
                inner = self._slot(tree.per_rank(name)) if tag == "per_rank" else None
                if inner is None or tag_of(inner) == "per_rank":
                    found.append(name)
                else:
                    todo.append(inner)
        return found


def _shifts(name: str, tag: str) -> InvalidInput:
    return InvalidInput(
        f"the patterns leave out {name!r}, an item of a {tag}, so that the positions of the others would shift; select "
        f"the whole {tag}, or none of it"
    )
