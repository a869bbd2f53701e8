"""A saved state without its bytes, for objects that have to know what will come."""

from __future__ import annotations

from typing import Any

from ckptfmt.engine.load.nodes import items_of, key_of, pairs_of, state_of, tensor_name
from ckptfmt.engine.load.ranks import RankView
from ckptfmt.format import tree
from ckptfmt.ports.arrays import Outline


def outline_of(node: tree.Node, view: RankView) -> Any:
    """Mappings as dicts, lists and tuples as lists, texts as they are, an ``Outline`` for each tensor; else None."""
    name = tensor_name(node)
    if name is not None:
        row = view.opened.stored.find(name, view.rank)
        return Outline(name, row.dtype, row.shape)
    node = state_of(view.look(node))
    pairs = pairs_of(node)
    if pairs is not None:
        return {key_of(key): outline_of(child, view) for key, child in pairs}
    items = items_of(node)
    if items is not None:
        return [outline_of(item, view) for item in items]
    return node if isinstance(node, str) else None
