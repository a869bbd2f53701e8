"""Looking at one node of a saved tree: what it is, and what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
_LISTS: Final = frozenset({list})
_TWO: Final = frozenset({2})


def tag_of(node: tree.Node) -> str:
    """The node's tag; ``list`` for an array, ``value`` for what stands for itself."""
    if isinstance(node, list):
        return "list"
    return str(next(iter(node))) if isinstance(node, dict) and len(node) == 1 else "value"


def pairs_of(node: tree.Node) -> list[Any] | None:
    """The [key, child] pairs of a mapping, None for anything else. ``FormatError`` for a malformed mapping."""
    tag = tag_of(node)
    if tag not in _PAIRS_AT:
        return None
    position = _PAIRS_AT[tag]
    payload = node[tag]
    if position is not None:
        payload = _row(payload, tag, 2)[position]
    if type(payload) is not list or not (_LISTS.issuperset(map(type, payload)) and _TWO.issuperset(map(len, payload))):
        raise _malformed(tag)
    return payload


def items_of(node: tree.Node) -> list[Any] | None:
    """The items of a list or tuple, None for anything else."""
    if isinstance(node, list):
        return node
    if tag_of(node) != "tuple":
        return None
    payload = node["tuple"]
    if type(payload) is not list:
        raise _malformed("tuple")
    return payload


def object_of(node: tree.Node) -> list[Any] | None:
    """[kind, type name, notes, state] of a live object, None for anything else."""
    return _row(node["stateful"], "stateful", 4) if tag_of(node) == "stateful" else None


def _row(payload: Any, tag: str, length: int) -> list[Any]:
    if type(payload) is not list or len(payload) != length:
        raise _malformed(tag)
    return payload


def _malformed(tag: str) -> FormatError:
    return FormatError(f"the state tree holds a malformed {tag!r} node; restore another generation")


_DEPTH_MAX: Final = 2 * tree.DEPTH_MAX + 4
"""A state, and the state of an object at its deepest place."""


def check_depth(node: tree.Node) -> None:
    """Raise ``FormatError`` for a tree that is nested more deeply than any writer may: the walks here recurse."""
    level = [node]
    for _ in range(_DEPTH_MAX):
        level = [child for here in level for child in _below(here) if may_hold(child)]
        if not level:
            return
    raise FormatError(f"the state tree is nested more than {tree.DEPTH_MAX} deep")


def may_hold(node: tree.Node) -> bool:
    """Whether there may be something below ``node``; asked of every leaf, so it must cost next to nothing."""
    cls = type(node)
    return cls is list or (cls is dict and "tensor" not in node and "array" not in node)


def _below(node: tree.Node) -> list[tree.Node]:
    pairs = pairs_of(node)
    if pairs is not None:
        return [child for _, child in pairs]
    live = object_of(node)
    return [live[3]] if live is not None else items_of(node) or []


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
    if type(node) is dict and type(payload := node.get("tensor")) is str and len(node) == 1:
        return payload  # asked of every leaf
    tag = tag_of(node)
    return tree.split_reference(node[tag])[0] if tag in ("tensor", "array") else None


def slots_in_registered(root: tree.Node) -> Iterator[str]:
    """The per-rank slots that stand inside values of registered types."""
    todo = [root]
    while todo:
        here = todo.pop()
        if isinstance(here, list):
            todo += here
        elif isinstance(here, dict):
            for tag, payload in here.items():
                if tag != "registered":
                    todo.append(payload)
                else:
                    yield from (name for kind, name in tree.references(payload) if kind == "per_rank")


def describe(node: tree.Node) -> str:
    """What was saved, in words for an error."""
    if node is UNSET:
        return "nothing"
    tag = tag_of(node)
    if tag == "value":
        return f"{type(node).__name__} {node!r:.40}"
    if tag == "list":
        return f"a list of {len(node)}"
    return f"a {tag}"


def state_of(node: tree.Node) -> tree.Node:
    """The state of a live object; any other node is returned as it is."""
    found = None if node is UNSET else object_of(node)
    return node if found is None else found[3]


def key_of(node: tree.Node) -> Any:
    """The Python key of a mapping's key node."""
    if type(node) is str:
        return node
    return tree.decode(node, _no_leaf)


def _no_leaf(tag: str, payload: Any) -> Any:
    raise FormatError(f"the state tree holds a {tag} as a mapping's key: load it as a whole")
