"""Hold a live state against a saved tree, before anything is touched.

The walk decides for every saved and every live leaf what will happen to it: filled in place, handed to
an object's ``load_state_dict``, assigned into its container, or reported as a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptfmt.engine.families import Families
from ckptfmt.engine.load.names import NodeMap, Selection, leaf_paths
from ckptfmt.engine.opened import Opened
from ckptfmt.errors import InvalidInput
from ckptfmt.format import tree
from ckptfmt.format.index import TensorEntry
from ckptfmt.leaves import PerRank, Sharded
from ckptfmt.ports.arrays import ArrayFamily, Expansion

Setter = Callable[[Any], None]


@dataclass(frozen=True)
class Fill:
    """A live tensor that takes the bytes of a stored one."""

    path: str
    value: Any
    family: ArrayFamily
    row: TensorEntry
    start: tuple[int, ...]
    size: tuple[int, ...]
    cast: bool


@dataclass(frozen=True)
class Assign:
    """A value that is built from ``node`` and put into its container."""

    path: str
    node: tree.Node
    put: Setter


@dataclass(frozen=True)
class Apply:
    """An object that is handed its rebuilt state."""

    path: str
    node: tree.Node
    kind: str
    apply: Setter
    check: Setter | None
    """Raises ``Mismatch`` if ``apply`` would refuse the state; touches nothing."""


@dataclass
class RestorePlan:
    """What a restore will do. Nothing has been changed while this is made."""

    fills: list[Fill] = field(default_factory=list)
    assigns: list[Assign] = field(default_factory=list)
    applies: list[Apply] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)
    """Rebuilds immutable containers, innermost first, after the assigns."""
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


_UNSET: Any = object()
_DICTS = ("dict", "odict", "state_dict", "defaultdict", "counter")
_LISTS = ("list", "tuple")


class Matcher:
    """One walk over a live state and a saved tree."""

    def __init__(
        self,
        opened: Opened,
        families: Families,
        expansions: Mapping[int, Expansion],
        *,
        rank: int,
        cast: bool,
        selection: Selection,
        renamed: NodeMap | None,
    ) -> None:
        self._opened = opened
        self._families = families
        self._expansions = expansions
        self._rank = rank
        self._cast = cast
        self._selection = selection
        self._renamed = renamed
        self._used: set[str] = set()
        self.plan = RestorePlan()

    def run(self, live: Any) -> RestorePlan:
        """Match the whole state. The root must be something that can be changed in place."""
        fillable = isinstance(live, dict | list) or self._families.of(live) is not None
        if not fillable and id(live) not in self._expansions and not isinstance(live, Sharded):
            raise InvalidInput(
                f"restore(into=...) got a {type(live).__name__}, which cannot be changed in place; pass a dict or "
                "list of objects and tensors, a module, or use load()"
            )
        self._visit(self._opened.common, live, "", _no_put)
        if self._renamed is not None:
            left = [path for path in self._renamed.leaves if path not in self._used]
            self._report(left, self.plan.unexpected)
        return self.plan

    # -- one place ------------------------------------------------------------------------------
    def _visit(self, node: tree.Node, live: Any, path: str, put: Setter) -> None:
        """Match ``node`` (or ``_UNSET``: nothing is saved here) with ``live``; ``put`` replaces it in its container."""
        if self._renamed is not None:
            node = self._renamed.nodes.get(path, _UNSET)
        node = self._own_rank(node)
        if isinstance(live, PerRank):
            return self._visit(node, live.value, path, lambda value: put(PerRank(value)))
        if isinstance(live, Sharded):
            return self._tensor(node, live.local, path, live)
        family = self._families.of(live)
        if family is not None and family is not self._families.blob:
            return self._tensor(node, live, path, None)
        expansion = self._expansions.get(id(live))
        if expansion is not None:
            return self._object(node, expansion, path)
        if isinstance(live, dict):
            return self._dict(node, live, path, put)
        if isinstance(live, list):
            return self._list(node, live, path, put)
        if isinstance(live, tuple) and self._holds_live(live):
            return self._tuple(node, live, path, put)
        return self._scalar(node, path, put)

    def _own_rank(self, node: tree.Node) -> tree.Node:
        return self._opened.slot(node, self._rank)

    def _holds_live(self, value: Any) -> bool:
        """Whether a container holds tensors or objects that can be filled, so that it must not be replaced whole."""
        if isinstance(value, dict):
            return any(self._holds_live(item) for item in value.values())
        if isinstance(value, list | tuple) and self._families.of(value) is None:
            return any(self._holds_live(item) for item in value)
        if isinstance(value, PerRank):
            return self._holds_live(value.value)
        family = self._families.of(value)
        tensor = family is not None and family is not self._families.blob
        return tensor or isinstance(value, Sharded) or id(value) in self._expansions

    # -- leaves ---------------------------------------------------------------------------------
    def _tensor(self, node: tree.Node, live: Any, path: str, box: Sharded | None) -> None:
        plan = self.plan
        if not self._selection.wants(path):
            return self._skip(path)
        if node is _UNSET:
            return plan.missing.append(path)
        self._used.add(path)
        name = tensor_name(node)
        family = self._families.of(live)
        if name is None or family is None:
            plan.problems.append(f"{path}: a tensor here, but saved was {describe(node)}")
            return None
        reason = family.check_fillable(live, path)
        if reason is not None:
            plan.problems.append(reason)
            return None
        row = self._opened.tensor(name, self._rank)
        spec = family.describe(live, path)
        whole = spec.global_shape if box is None else tuple(box.global_shape)
        start = spec.start if box is None else tuple(box.offsets)
        if whole != row.shape:
            plan.problems.append(f"{path}: saved shape {list(row.shape)}, live shape {list(whole)}")
            return None
        cast = spec.dtype != row.dtype
        if cast and not self._cast:
            plan.problems.append(f"{path}: saved dtype {row.dtype}, live dtype {spec.dtype} (cast=True converts)")
            return None
        plan.fills.append(Fill(path, live, family, row, start, spec.size, cast))
        plan.loaded.append(path)
        if cast:
            plan.cast.append(path)
        return None

    def _scalar(self, node: tree.Node, path: str, put: Setter) -> None:
        if node is _UNSET:
            if self._selection.wants(path):
                self.plan.missing.append(path)
            return
        paths = leaf_paths(node, path) or [path]
        if self._selection.wants_all(path, paths) is False:
            return self._skip(path)
        self._used.update(paths)
        self.plan.assigns.append(Assign(path, node, put))
        self.plan.loaded.extend(paths)

    # -- objects --------------------------------------------------------------------------------
    def _object(self, node: tree.Node, expansion: Expansion, path: str) -> None:
        if node is _UNSET and self._renamed is None:
            return self._report(self._live_leaves(expansion.state, path), self.plan.missing)
        state = node
        if node is not _UNSET and tag_of(node) == "stateful":
            state = node["stateful"][3]
        if expansion.live:
            return self._live_object(state, expansion, path)
        if node is _UNSET:
            return self.plan.missing.append(path)
        paths = leaf_paths(state, path)
        if self._selection.wants_all(path, paths) is False:
            return self._skip(path)
        self._used.update(paths)
        if expansion.apply is not None:
            self.plan.applies.append(Apply(path, state, expansion.kind, expansion.apply, expansion.check))
        self.plan.loaded.extend(paths or [path])
        return None

    def _live_object(self, node: tree.Node, expansion: Expansion, path: str) -> None:
        """A module: its tensors are filled in place, what else its state holds is applied afterwards."""
        rest: dict[Any, Any] = {}
        before = len(self.plan.assigns)
        self._children(node, expansion.state, path, rest.__setitem__, grows=False)
        apply = expansion.apply
        if apply is not None and len(self.plan.assigns) > before:
            self.plan.finish.append(lambda: apply(rest))

    # -- containers -----------------------------------------------------------------------------
    def _dict(self, node: tree.Node, live: dict[Any, Any], path: str, put: Setter) -> None:
        if node is _UNSET and self._renamed is None:
            return self._report(self._live_leaves(live, path) or [path], self.plan.missing)
        if node is not _UNSET and tag_of(node) == "stateful":
            node = node["stateful"][3]
        if node is not _UNSET and tag_of(node) not in _DICTS:
            if live and self._holds_live(live):
                self.plan.problems.append(f"{path or 'the state'}: a mapping here, but saved was {describe(node)}")
                return None
            return self._scalar(node, path, put)
        # An empty mapping stands for "whatever was saved".
        self._children(node, live, path, live.__setitem__, grows=not live)
        return None

    def _children(
        self,
        node: tree.Node,
        live: Mapping[Any, Any],
        path: str,
        put_item: Callable[[Any, Any], None],
        *,
        grows: bool,
    ) -> None:
        saved = {} if node is _UNSET else self._pairs(node, path)
        if saved is None:
            return
        for key, value in live.items():
            self._visit(saved.pop(key, _UNSET), value, tree.join(path, key), _item_setter(put_item, key))
        for key, child in saved.items():
            where = tree.join(path, key)
            if grows:
                self._scalar(self._own_rank(child), where, _item_setter(put_item, key))
            elif self._renamed is None:
                self._report(leaf_paths(self._own_rank(child), where) or [where], self.plan.unexpected)

    def _pairs(self, node: tree.Node, path: str) -> dict[Any, tree.Node] | None:
        tag = tag_of(node)
        if tag not in _DICTS:
            self.plan.problems.append(f"{path or 'the state'}: a mapping here, but saved was {describe(node)}")
            return None
        payload = node[tag]
        pairs = payload[0] if tag == "state_dict" else payload[1] if tag == "defaultdict" else payload
        return {tree.decode(key, _no_leaf): child for key, child in pairs}

    def _list(self, node: tree.Node, live: list[Any], path: str, put: Setter) -> None:
        if node is _UNSET and self._renamed is None:
            return self._report(self._live_leaves(live, path) or [path], self.plan.missing)
        if self._renamed is not None and self._holds_live(live):
            items: list[Any] = [_UNSET] * len(live)
        elif not self._holds_live(live):
            whole = slice(None)
            return self._scalar(node, path, _item_setter(live.__setitem__, whole) if isinstance(node, list) else put)
        elif isinstance(node, list) and len(node) == len(live):
            items = node
        else:
            saved = f"a list of {len(node)}" if isinstance(node, list) else describe(node)
            self.plan.problems.append(f"{path or 'the state'}: a list of {len(live)} here, but saved was {saved}")
            return None
        for number, (child, value) in enumerate(zip(items, list(live), strict=True)):
            self._visit(child, value, tree.join(path, number), _item_setter(live.__setitem__, number))
        return None

    def _tuple(self, node: tree.Node, live: tuple[Any, ...], path: str, put: Setter) -> None:
        if node is _UNSET and self._renamed is None:
            return self._report(self._live_leaves(live, path), self.plan.missing)
        items = node["tuple"] if node is not _UNSET and tag_of(node) == "tuple" else [_UNSET] * len(live)
        if len(items) != len(live) or (node is not _UNSET and tag_of(node) != "tuple"):
            self.plan.problems.append(f"{path}: a tuple of {len(live)} here, but saved was {describe(node)}")
            return None
        new = list(live)
        before = len(self.plan.assigns)
        for number, (child, value) in enumerate(zip(items, live, strict=True)):
            self._visit(child, value, tree.join(path, number), _item_setter(new.__setitem__, number))
        if len(self.plan.assigns) > before:
            self.plan.finish.append(lambda: put(tuple(new)))
        return None

    # -- reporting ------------------------------------------------------------------------------
    def _live_leaves(self, value: Any, path: str) -> list[str]:
        expansion = self._expansions.get(id(value))
        if expansion is not None:
            value = expansion.state
        if isinstance(value, PerRank):
            value = value.value
        if isinstance(value, dict):
            return [leaf for key, item in value.items() for leaf in self._live_leaves(item, tree.join(path, key))]
        if isinstance(value, list | tuple) and self._families.of(value) is None:
            return [leaf for n, item in enumerate(value) for leaf in self._live_leaves(item, tree.join(path, n))]
        return [path]

    def _report(self, paths: list[str], into: list[str]) -> None:
        for path in paths:
            if self._selection.wants(path):
                into.append(path)
            else:
                self._skip(path)

    def _skip(self, path: str) -> None:
        self._used.add(path)
        self.plan.skipped.append(path)


def _no_put(value: Any) -> None:
    raise InvalidInput("the root of the state cannot be replaced; pass a dict or list around it")


def _item_setter(put_item: Callable[[Any, Any], None], key: Any) -> Setter:
    return lambda value: put_item(key, value)


def _no_leaf(tag: str, payload: Any) -> Any:
    raise InvalidInput(f"a {tag} cannot be a mapping's key")


def tag_of(node: tree.Node) -> str:
    """The node's tag; ``list`` for an array, ``value`` for what stands for itself."""
    if isinstance(node, list):
        return "list"
    return str(next(iter(node))) if isinstance(node, dict) and len(node) == 1 else "value"


def tensor_name(node: tree.Node) -> str | None:
    """Name of the tensor that ``node`` refers to, or None if it is no reference."""
    tag = tag_of(node)
    return tree.split_reference(node[tag])[0] if tag in ("tensor", "array") else None


def describe(node: tree.Node) -> str:
    tag = tag_of(node)
    if tag == "value":
        return "nothing" if node is _UNSET else f"{type(node).__name__} {node!r:.40}"
    return f"a {tag}"
