"""Turn a live state into a frozen tree and a list of tensor leaves. No tensor data is touched here."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ckptfmt.engine.families import Families, is_stateful
from ckptfmt.errors import UnsupportedValue
from ckptfmt.format import tree
from ckptfmt.leaves import PerRank, Sharded
from ckptfmt.ports.arrays import ArrayFamily, Expansion, LeafSpec
from ckptfmt.rng import Rng


@dataclass(frozen=True, slots=True)
class FrozenLeaf:
    """A tensor to be stored once. ``value`` is live: its bytes are taken by the snapshot."""

    name: str
    spec: LeafSpec
    family: ArrayFamily
    value: Any


@dataclass(frozen=True)
class FrozenTree:
    """Everything about a state but the tensors' bytes."""

    common: tree.Node
    per_rank: dict[str, tree.Node]
    leaves: list[FrozenLeaf]
    aliases: dict[str, str]
    """Other names of a leaf: a tied tensor is stored under its first name."""


def freeze_tree(state: Any, families: Families) -> FrozenTree:
    """Encode ``state``; raises ``UnsupportedValue`` naming the path of anything that cannot be stored."""
    freezer = _Freezer(families, families.expand(state))
    common = tree.encode(state, freezer.leaf)
    return FrozenTree(common, freezer.per_rank, freezer.leaves, freezer.aliases)


def freeze_metadata(metadata: Any) -> tree.Node:
    """Encode user metadata: plain values only."""

    def refuse(path: str, value: Any) -> None:
        raise UnsupportedValue(
            f"metadata {path or 'root'}: {type(value).__name__} does not belong in metadata; put tensors and large "
            "byte strings into the state"
        )

    return tree.encode({} if metadata is None else metadata, refuse, path="")


def _nothing(path: str, value: Any) -> None:
    """Notes hold plain values only."""


class _Freezer:
    def __init__(self, families: Families, expansions: dict[int, Expansion]) -> None:
        self._families = families
        self._expansions = expansions
        self._names: set[str] = set()
        self._by_alias: dict[Hashable, str] = {}
        self._inside_rank = False
        self.leaves: list[FrozenLeaf] = []
        self.aliases: dict[str, str] = {}
        self.per_rank: dict[str, tree.Node] = {}

    def leaf(self, path: str, value: Any) -> tree.Node | None:
        family = self._families.of(value)
        if family is not None:
            return self._tensor(path, value, family, None)
        kind = type(value)
        if kind is PerRank:
            return self._own_slot(path, lambda: tree.encode(value.value, self.leaf, path=path))
        if kind is Sharded:
            return self._sharded(path, value)
        expansion = self._expansions.get(id(value))
        if expansion is not None:
            if isinstance(value, Rng):  # every rank draws its own numbers
                return self._own_slot(path, lambda: self._stateful(path, expansion))
            return self._stateful(path, expansion)
        if is_stateful(value) or self._families.is_object(value):
            raise UnsupportedValue(
                f"{path}: {kind.__qualname__} stands inside another object's state or in a set; "
                "put it into the saved mapping by itself"
            )
        return None

    def _stateful(self, path: str, expansion: Expansion) -> tree.Node:
        notes = tree.encode(dict(expansion.notes or {}), _nothing, path=path)
        state = tree.encode(expansion.state, self.leaf, path=path)
        return tree.stateful(expansion.kind, expansion.type_name, notes, state)

    def _own_slot(self, path: str, encode: Any) -> tree.Node:
        if self._inside_rank:
            node: tree.Node = encode()
            return node
        self._inside_rank = True
        try:
            slot = path or "~"
            while slot in self.per_rank:
                slot += "~"
            self.per_rank[slot] = encode()
        finally:
            self._inside_rank = False
        return tree.per_rank(slot)

    def _sharded(self, path: str, value: Sharded) -> tree.Node:
        family = self._families.of(value.local)
        if family is None or family is self._families.blob:
            raise UnsupportedValue(f"{path}: Sharded holds a {type(value.local).__name__}, not a tensor or array")
        local = family.describe(value.local, path)
        spec = replace(local, global_shape=tuple(value.global_shape), start=tuple(value.offsets), kind="sharded")
        return self._tensor(path, value.local, family, spec)

    def _tensor(self, path: str, value: Any, family: ArrayFamily, spec: LeafSpec | None) -> tree.Node:
        if spec is None:
            spec = family.describe(value, path)
            if self._inside_rank:
                spec = replace(spec, kind="per_rank")
        name = self._unique(path)
        canonical = self._by_alias.get((spec.alias, spec.kind)) if spec.alias is not None else None
        if canonical is not None:
            self.aliases[name] = canonical
        else:
            if spec.alias is not None:
                self._by_alias[(spec.alias, spec.kind)] = name
            self.leaves.append(FrozenLeaf(name, spec, family, value))
        if family is self._families.blob:
            return tree.reference(f"stored_{type(value).__name__}", name)
        return tree.reference(family.name, name, family.flags(value))

    def _unique(self, path: str) -> str:
        # "__metadata__" is not a tensor's name in a safetensors header; "" would be hard to ask for.
        base = "~" if not path else path.encode("utf-8", "backslashreplace").decode("utf-8")
        name, number = base, 0
        while name in self._names or name == "__metadata__":
            number += 1
            name = f"{base}~{number}"
        self._names.add(name)
        return name
