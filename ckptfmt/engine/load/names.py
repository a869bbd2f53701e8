"""Dotted names of a saved tree: which of them are wanted, and what they are called in the live state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptfmt.engine.load.nodes import items_of, key_of, may_hold, object_of, pairs_of, state_of
from ckptfmt.engine.patterns import Patterns, as_patterns, matches
from ckptfmt.errors import InvalidInput, Mismatch
from ckptfmt.format import tree

Rename = Mapping[str, str] | Callable[[str], str]
Slot = Callable[[tree.Node], tree.Node]
"""Puts what a rank kept in the place of a per-rank slot; any other node, and a slot that nobody can look into, is
returned as it is."""


class Selection:
    """``keys`` and ``exclude`` as one question. ``fnmatchcase`` on dotted names; ``*`` crosses dots."""

    def __init__(self, keys: Patterns | None = None, exclude: Patterns | None = None) -> None:
        self._keys = as_patterns(keys, "keys")
        self._exclude = as_patterns(exclude, "exclude")

    def __str__(self) -> str:
        return f"keys={self._keys}, exclude={self._exclude}"

    @property
    def everything(self) -> bool:
        return self._keys is None and self._exclude is None

    def wants(self, name: str) -> bool:
        if self._keys is not None and not matches(name, self._keys):
            return False
        return not self.excludes(name)

    def excludes(self, name: str) -> bool:
        return self._exclude is not None and matches(name, self._exclude)

    def wants_all(self, path: str, names: Sequence[str]) -> bool:
        """Whether something that is restored as a whole is wanted; ``InvalidInput`` if only a part of it is."""
        if self.everything or self.wants(path):
            return True
        wanted = sum(map(self.wants, names))
        if 0 < wanted < len(names):
            raise InvalidInput(
                f"{path or 'the state'} is restored as a whole, but the patterns select {wanted} of its {len(names)} "
                f"values; select {path!r} itself, or none of it"
            )
        return wanted > 0


def walk(node: tree.Node, path: str = "") -> Iterator[tuple[str, tree.Node, bool]]:
    """Yield (dotted path, node, is a leaf) for ``node`` and everything below, containers first.

    The random state counts as one leaf: nobody wants to read the names of its 600 numbers.
    """
    todo = [(path, node)]
    while todo:
        where, here = todo.pop()
        live = object_of(here) if may_hold(here) else None
        children = None if live is not None and live[0] == "rng" else children_of(here, where)
        yield where, here, children is None
        if children is not None:
            todo += reversed(children)


def children_of(node: tree.Node, path: str) -> list[tuple[str, tree.Node]] | None:
    """The children of a container by path; None for a leaf and for an empty container (which stands for itself)."""
    if not may_hold(node):
        return None
    node = state_of(node)
    pairs = pairs_of(node)
    if pairs is not None:
        return [(tree.join(path, key_of(key)), child) for key, child in pairs] or None
    items = items_of(node)
    return None if items is None else [(tree.join(path, number), child) for number, child in enumerate(items)] or None


def leaf_paths(node: tree.Node, path: str) -> list[str]:
    """Dotted paths of everything below ``node`` that is no container."""
    return [where for where, _, leaf in walk(node, path) if leaf]


@dataclass(frozen=True)
class NodeMap:
    """A saved tree by the names that its places have in the live state."""

    nodes: Mapping[str, tree.Node]
    origins: Mapping[str, str]
    """Live path -> saved path, containers included."""
    leaves: tuple[str, ...]
    """Live paths of all leaves."""
    change: Callable[[str], str]
    """Saved path -> live path."""
    slot: Slot

    def leaves_below(self, node: tree.Node, saved_path: str) -> list[str]:
        """The live paths of the leaves below the saved ``node``."""
        return [self.change(path) for path, _, leaf in _through_slots(node, self.slot, saved_path) if leaf]


def rename_nodes(root: tree.Node, rename: Rename, slot: Slot) -> NodeMap:
    """Rename every place of a saved tree. Two leaves that get one name are a ``Mismatch`` naming both.

    A mapping renames dotted prefixes, the longest that fits: ``{"model": "net", "model.head": "head"}``.
    """
    change = _checked(_by_prefix(rename) if isinstance(rename, Mapping) else rename)
    nodes: dict[str, tree.Node] = {}
    origins: dict[str, str] = {}
    leaves: dict[str, str] = {}
    problems: list[str] = []
    for path, node, leaf in _through_slots(root, slot, ""):
        new = change(path) if path else path
        if not leaf:
            nodes.setdefault(new, node)
            origins.setdefault(new, path)
            continue
        if new in leaves:
            problems.append(f"{leaves[new]} and {path} both become {new}")
        leaves[new] = origins[new] = path
        nodes[new] = node
    if problems:
        raise Mismatch("rename gives several saved values one name; make it one-to-one:", tuple(problems))
    return NodeMap(nodes, origins, tuple(leaves), change, slot)


def _checked(change: Callable[[str], str]) -> Callable[[str], str]:
    def checked(path: str) -> str:
        new = change(path)
        if not isinstance(new, str):
            raise InvalidInput(f"rename({path!r}) returned {new!r}; it must return the live name, a string")
        return new

    return checked


def _through_slots(root: tree.Node, slot: Slot, path: str) -> Iterator[tuple[str, tree.Node, bool]]:
    for where, node, leaf in walk(root, path):
        resolved = slot(node) if leaf else node
        if resolved is node:
            yield where, node, leaf
        else:
            yield from _through_slots(resolved, slot, where)


def _by_prefix(rename: Mapping[str, str]) -> Callable[[str], str]:
    prefixes = sorted(
        ((old.rstrip("."), new.rstrip(".")) for old, new in rename.items()), key=lambda pair: -len(pair[0])
    )

    def change(path: str) -> str:
        for old, new in prefixes:
            if path == old:
                return new
            if not old:
                return f"{new}.{path}" if new else path
            if path.startswith(f"{old}."):
                rest = path[len(old) + 1 :]
                return f"{new}.{rest}" if new else rest
        return path

    return change
