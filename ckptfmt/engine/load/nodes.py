"""Looking at one node of a saved tree: what it is, and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ckptfmt.errors import FormatError
from ckptfmt.format import tree

UNSET: Final[Any] = object()
"""Stands for a node where nothing is saved."""

_PAIRS_AT: Final[Mapping[str, int | None]] = {
    "dict": None,
    "odict": None,
    "counter": None,
    "state_dict": 0,
    "defaultdict": 1,
}
"""Tags of mappings, and where in their payload the pairs stand (None: they are the payload)."""


def tag_of(node: tree.Node) -> str:
    """The node's tag; ``list`` for an array, ``value`` for what stands for itself."""
    if isinstance(node, list):
        return "list"
    return str(next(iter(node))) if isinstance(node, dict) and len(node) == 1 else "value"


def pairs_of(node: tree.Node) -> list[Any] | None:
    """The [key, child] pairs of a mapping, None for anything else."""
    tag = tag_of(node)
    if tag not in _PAIRS_AT:
        return None
    position = _PAIRS_AT[tag]
    pairs: list[Any] = node[tag] if position is None else node[tag][position]
    return pairs


def with_pairs(node: tree.Node, pairs: list[Any]) -> tree.Node:
    """The mapping ``node`` with other pairs."""
    tag = tag_of(node)
    position = _PAIRS_AT[tag]
    if position is None:
        return {tag: pairs}
    payload = list(node[tag])
    payload[position] = pairs
    return {tag: payload}


def tensor_name(node: tree.Node) -> str | None:
    """Name of the tensor that ``node`` refers to, or None if it is no reference."""
    tag = tag_of(node)
    return tree.split_reference(node[tag])[0] if tag in ("tensor", "array") else None


def describe(node: tree.Node) -> str:
    """What was saved, in words for an error."""
    if node is UNSET:
        return "nothing"
    tag = tag_of(node)
    if tag == "value":
        return f"{type(node).__name__} {node!r:.40}"
    if tag == "list":
        return f"a list of {len(node)}"
    return f"a {node[tag][0]!r}" if tag == "registered" else f"a {tag}"


def state_of(node: tree.Node) -> tree.Node:
    """The state of a live object; any other node is returned as it is."""
    return node["stateful"][3] if node is not UNSET and tag_of(node) == "stateful" else node


def key_of(node: tree.Node) -> Any:
    """The Python key of a mapping's key node."""
    return tree.decode(node, _no_leaf)


def _no_leaf(tag: str, payload: Any) -> Any:
    raise FormatError(f"the state tree holds a {tag} as a mapping's key: load it as a whole")
