"""Turn a live state into a frozen tree and a list of tensor leaves. No tensor data is touched here.

Between two saves of a training run nearly everything is as it was, so a walk follows the rows of the walk before: every
path, type, element type, shape, address and flag is looked at anew, but only what differs is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ckptfmt.engine.families import Families, is_stateful
from ckptfmt.errors import UnsupportedValue
from ckptfmt.format import tree
from ckptfmt.leaves import Boxes, PerRank, Sharded, Sole
from ckptfmt.ports.arrays import ArrayFamily, Expansion, LeafKind, LeafSpec, Ownership
from ckptfmt.rng import Rng


class FrozenLeaf(msgspec.Struct, frozen=True, gc=False):
    """A tensor to be stored once. ``value`` is live: its bytes are taken by the snapshot."""

    name: str
    spec: LeafSpec
    family: ArrayFamily
    value: Any


Owner = tuple[str, ArrayFamily]
"""The tag of references to a value, and its family."""
Row = tuple[str, str, str, LeafSpec, tree.Node]
"""Of one tensor in the order of the walk: path, tag of its reference, name, what it is, and its node in the tree."""


@dataclass(frozen=True, eq=False)
class Seen:
    """The tensors of one walk, without the tensors. The next walk over an unchanged state returns the same object."""

    rows: list[Row]
    stored: list[int]
    """Which rows are stored: all but the further names of tied tensors."""
    named: list[tuple[str, LeafSpec]]
    """Name and spec of what is stored."""
    aliases: dict[str, str]


_NOTHING: Final = Seen([], [], [], {})


@dataclass(frozen=True)
class FrozenTree:
    """Everything about a state but the tensors' bytes."""

    common: tree.Node
    per_rank: dict[str, tree.Node]
    leaves: list[FrozenLeaf]
    seen: Seen
    mesh: dict[str, int] = field(default_factory=dict)
    """Where this rank stands in the meshes of what is spread over ranks: dimension name -> coordinate. Of two meshes
    with a dimension of one name, the first one that is met tells."""
    owners: list[Ownership] = field(default_factory=list)
    """Of tensors that change only when that is announced."""

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of a leaf: a tied tensor is stored under its first name."""
        return self.seen.aliases


def freeze_tree(state: Any, families: Families, before: Seen | None = None) -> FrozenTree:
    """Encode ``state``; raises ``UnsupportedValue`` naming the path of anything that cannot be stored.

    ``before`` is what the last save has seen: what did not change since is taken from there.
    """
    expansions = families.expand(state)
    freezer = _Freezer(families, expansions, before or _NOTHING)
    common = tree.encode(state, freezer.leaf)
    seen = freezer.seen()
    leaves = freezer.leaves
    if len(seen.stored) < len(leaves):
        leaves = [leaves[index] for index in seen.stored]
    owners = [expansion.owned for expansion in expansions.values() if expansion.owned is not None]
    return FrozenTree(common, freezer.per_rank, leaves, seen, freezer.mesh, owners)


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
    """One walk. While it ``follows`` the walk before, rows come from there, and ``_changed`` has those that differ;
    from the first tensor that stands elsewhere or is of another library, ``_rows`` is a list of its own."""

    def __init__(self, families: Families, expansions: dict[int, Expansion], before: Seen) -> None:
        self._families = families
        self._expansions = expansions
        self._owners: dict[type, Owner | None] = {}
        self._spread: dict[type, Owner] = {}
        """Types of what is spread over ranks."""
        self._kind: LeafKind = "replicated"
        self._before = before
        self._expected = before.rows
        self._changed: dict[int, Row] = {}
        self._rows: list[Row] = []
        self._names: set[str] = set()
        self.leaves: list[FrozenLeaf] = []
        """One for each row, tied ones included."""
        self.per_rank: dict[str, tree.Node] = {}
        self.mesh: dict[str, int] = {}
        self._coordinates: Mapping[str, int] | None = None
        """Of the tensor before."""

    def leaf(self, path: str, value: Any) -> tree.Node | None:
        kind = type(value)
        try:
            owner = self._owners[kind]
        except KeyError:
            owner = self._owners[kind] = self._owner_of(path, value)
        if owner is not None:
            return self._tensor(path, value, owner, None)
        if kind in self._spread:
            return self._boxes(path, value, self._spread[kind])
        if kind is PerRank:
            return self._own_slot(path, lambda: tree.encode(value.value, self.leaf, path=path))
        if kind is Sharded:
            return self._sharded(path, [value])
        if kind is Boxes:
            return self._sharded(path, value.parts)
        if kind is Sole:
            return self._sole(path, value)
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

    def _owner_of(self, path: str, value: Any) -> Owner | None:
        """The tag of references to values of this type, and their family; None also for what is spread over ranks,
        which ``_spread`` then knows."""
        family = self._families.of(value)
        if family is None:
            return None
        if family.boxes(value, path) is not None:
            self._spread[type(value)] = (family.name, family)
            return None
        return (f"stored_{type(value).__name__}" if family is self._families.blob else family.name), family

    def _stateful(self, path: str, expansion: Expansion) -> tree.Node:
        notes = tree.encode(dict(expansion.notes or {}), _nothing, path=path)
        state = tree.encode(expansion.state, self.leaf, path=path)
        return tree.stateful(expansion.kind, expansion.type_name, notes, state)

    def _own_slot(self, path: str, encode: Callable[[], tree.Node]) -> tree.Node:
        if self._kind == "per_rank":
            return encode()
        self._kind = "per_rank"
        try:
            slot = path or "~"
            while slot in self.per_rank:
                slot += "~"
            self.per_rank[slot] = encode()
        finally:
            self._kind = "replicated"
        return tree.per_rank(slot)

    def _sole(self, path: str, value: Sole) -> tree.Node:
        before, self._kind = self._kind, "sharded"
        try:
            return tree.encode(value.value, self.leaf, path=path)
        finally:
            self._kind = before

    def _sharded(self, path: str, parts: Sequence[Sharded]) -> tree.Node:
        """A tensor of which this rank has these boxes: as many leaves, all of one name."""
        first, *others = parts
        owner, spec = self._box(path, first)
        node = self._tensor(path, first.local, owner, spec)
        name = self.leaves[-1].name
        for part in others:
            (tag, family), spec = self._box(path, part)
            self._further_box(path, f"{tag} box", FrozenLeaf(name, spec, family, part.local), node)
        return node

    def _box(self, path: str, value: Sharded) -> tuple[Owner, LeafSpec]:
        owner = self._owner_of(path, value.local)
        if owner is None or owner[1] is self._families.blob:
            raise UnsupportedValue(f"{path}: Sharded holds a {type(value.local).__name__}, not a tensor or array")
        local = owner[1].describe(value.local, path)
        shape, start, size = tuple(value.global_shape), tuple(value.offsets), local.size
        if 0 in shape:  # of no elements at all: everybody holds all of it
            start, size = (0,) * len(shape), shape
        alias = None if local.alias is None or self._kind == "sharded" else (local.alias, shape, start)
        return owner, replace(local, global_shape=shape, start=start, size=size, kind="sharded", alias=alias)

    def _boxes(self, path: str, value: Any, owner: Owner) -> tree.Node:
        """A tensor that is spread over ranks: as many leaves as this rank holds boxes of it, all of one name."""
        tag, family = owner
        if self._kind == "per_rank":
            raise UnsupportedValue(
                f"{path}: PerRank holds a {type(value).__name__}, which is one tensor of all ranks: take it out of "
                "PerRank, or save its to_local() there"
            )
        boxes = family.boxes(value, path) or ()
        (local, spec), *others = boxes
        node = self._tensor(path, local, owner, spec)
        name = self.leaves[-1].name
        for local, spec in others:
            self._further_box(path, f"{tag} box", FrozenLeaf(name, spec, family, local), node)
        coordinates = family.coordinates(value)
        if coordinates is not self._coordinates:  # families have one object for each mesh, and a state few meshes
            self._coordinates = coordinates
            for dimension, coordinate in coordinates.items():
                self.mesh.setdefault(dimension, coordinate)
        return node

    def _further_box(self, path: str, tag: str, leaf: FrozenLeaf, node: tree.Node) -> None:
        """One more leaf of the tensor that came last."""
        index = len(self.leaves)
        row = (path, tag, leaf.name, leaf.spec, node)
        if index < len(self._expected) and self._expected[index][:3] == row[:3]:
            if self._expected[index][3] != leaf.spec:
                self._changed[index] = row
        else:
            if self._expected:
                self._part()
            self._rows.append(row)
        self.leaves.append(leaf)

    def _tensor(self, path: str, value: Any, owner: Owner, spec: LeafSpec | None) -> tree.Node:
        tag, family = owner
        index = len(self.leaves)
        if index >= len(self._expected):
            return self._new(path, value, owner, spec)
        known_path, known_tag, name, known, node = self._expected[index]
        if known_path != path or known_tag != tag:
            return self._new(path, value, owner, spec)
        if spec is None:
            kind = self._kind
            alike = known.kind == kind and not known.holders  # it was no box of a mesh
            spec = family.describe(value, path, known if alike else None)
            if spec.kind != kind:
                spec = self._kept(spec)
        if spec is not known and spec != known:
            node = self._reference(tag, name, spec)
            self._changed[index] = (path, tag, name, spec, node)
            known = spec
        self.leaves.append(FrozenLeaf(name, known, family, value))
        return node

    def _new(self, path: str, value: Any, owner: Owner, spec: LeafSpec | None) -> tree.Node:
        """A tensor that the walk before did not meet here."""
        tag, family = owner
        if self._expected or not self._rows:
            self._part()
        if spec is None:
            spec = family.describe(value, path)
            if spec.kind != self._kind:
                spec = self._kept(spec)
        name = self._unique(path)
        node = self._reference(tag, name, spec)
        self._rows.append((path, tag, name, spec, node))
        self.leaves.append(FrozenLeaf(name, spec, family, value))
        return node

    def _kept(self, spec: LeafSpec) -> LeafSpec:
        """``spec`` under a mark. Of two tied names a sole writer may have but one: all ranks must agree on a tie."""
        return replace(spec, kind=self._kind, alias=None if self._kind == "sharded" else spec.alias)

    def _reference(self, tag: str, name: str, spec: LeafSpec) -> tree.Node:
        return tree.reference(tag, name, spec.flags)

    def _part(self) -> None:
        """Follow the walk before no longer."""
        self._rows = self._followed()
        self._names = {row[2] for row in self._rows}
        self._expected = []

    def _followed(self) -> list[Row]:
        rows = self._expected[: len(self.leaves)]
        for index, row in self._changed.items():
            rows[index] = row
        return rows

    def seen(self) -> Seen:
        """What this walk has met, once it is over; ``before`` itself if all is as it was."""
        followed = bool(self._expected) or not self._rows
        if followed and not self._changed and len(self.leaves) == len(self._expected):
            return self._before
        return _seen(self._followed() if followed else self._rows)

    def _unique(self, path: str) -> str:
        # "__metadata__" is not a tensor's name in a safetensors header; "" would be hard to ask for.
        base = "~" if not path else path.encode("utf-8", "backslashreplace").decode("utf-8")
        name, number = base, 0
        while name in self._names or name == "__metadata__":
            number += 1
            name = f"{base}~{number}"
        self._names.add(name)
        return name


def _seen(rows: list[Row]) -> Seen:
    stored: list[int] = []
    named: list[tuple[str, LeafSpec]] = []
    aliases: dict[str, str] = {}
    first: dict[Hashable, str] = {}
    for index, (_, _, name, spec, _) in enumerate(rows):
        if spec.alias is not None:
            canonical = first.setdefault((spec.alias, spec.kind), name)
            if canonical is not name:
                aliases[name] = canonical
                continue
        stored.append(index)
        named.append((name, spec))
    return Seen(rows, stored, named, aliases)
