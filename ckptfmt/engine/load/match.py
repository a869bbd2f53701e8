"""Hold a live state against a saved tree, before anything is touched.

The walk decides for every saved and every live leaf what will happen to it: filled in place, handed to
an object's ``load_state_dict``, assigned into its container, or reported as a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ckptfmt.engine.families import Families
from ckptfmt.engine.load.decisions import Apply, Assign, Fill, RestorePlan, Setter
from ckptfmt.engine.load.names import NodeMap, Selection, leaf_paths
from ckptfmt.engine.load.nodes import UNSET, describe, items_of, key_of, pairs_of, state_of, tensor_name
from ckptfmt.engine.load.outline import outline_of
from ckptfmt.engine.load.ranks import RankView
from ckptfmt.engine.load.tensors import TensorMatcher
from ckptfmt.errors import InvalidInput
from ckptfmt.format import tree
from ckptfmt.leaves import PerRank, Sharded
from ckptfmt.ports.arrays import Expansion


class Matcher:
    """One walk over a live state and a saved tree."""

    def __init__(
        self,
        view: RankView,
        families: Families,
        expansions: Mapping[int, Expansion],
        *,
        cast: bool,
        selection: Selection,
        renamed: NodeMap | None,
    ) -> None:
        self._view = view
        self._families = families
        self._expansions = expansions
        self._selection = selection
        self._renamed = renamed
        self._used: set[str] = set()
        self.plan = RestorePlan()
        self._tensors = TensorMatcher(view, families, self.plan, cast=cast)

    def run(self, live: Any) -> RestorePlan:
        """Match the whole state. The root must be something that can be changed in place."""
        fillable = isinstance(live, dict | list) or self._families.of(live) is not None
        if not fillable and id(live) not in self._expansions and not isinstance(live, Sharded):
            raise InvalidInput(
                f"restore(into=...) got a {type(live).__name__}, which cannot be changed in place; pass a dict or "
                "list of objects and tensors, a module, or use load()"
            )
        self._visit(self._view.opened.common, live, "", _no_put)
        if self._renamed is not None:
            left = [path for path in self._renamed.leaves if path not in self._used]
            self._report(left, self.plan.unexpected)
        return self.plan

    # -- one place ------------------------------------------------------------------------------
    def _visit(self, node: tree.Node, live: Any, path: str, put: Setter) -> None:
        """Match ``node`` (or ``UNSET``: nothing is saved here) with ``live``; ``put`` replaces it in its container."""
        if self._renamed is not None:
            node = self._renamed.nodes.get(path, UNSET)
        reason = self._view.refusal(node)
        if reason is not None:
            return self._refuse(reason, live, path)
        node = self._view.slot(node)
        if isinstance(live, PerRank):
            return self._visit(node, live.value, path, _marking(put))
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
        if type(live) is tuple and self._holds_live(live):
            return self._tuple(node, live, path, put)
        if isinstance(live, tuple) and self._holds_live(live, tensors=False):
            return self.plan.problems.append(
                f"{path}: a {type(live).__qualname__} is restored as a whole, but this one holds live objects; put "
                "them into the mapping by themselves"
            )
        return self._scalar(node, path, put)

    def _others(
        self, items: Iterable[tuple[Any, Any]], nodes: Iterable[tree.Node], path: str
    ) -> Iterator[tuple[tree.Node, Any, Any, str]]:
        """Settle what is settled at a glance: dense host memory where a whole tensor of this dtype and shape was saved,
        as nearly all of a model is. Yield (node, key, live value, path) of everything else, in order.

        This loop is run for every tensor of a state: it keeps at hand what it needs.
        """
        at_a_glance, everything, wants = self._renamed is None, self._selection.everything, self._selection.wants
        family_of, find, rank = self._families.of, self._view.opened.stored.find, self._view.rank
        fills, loaded, at_address = self.plan.fills, self.plan.loaded, self._tensors.at_address
        prefix = f"{path}." if path else ""
        for (key, live), node in zip(items, nodes, strict=True):
            where = prefix + (key if type(key) is str and key.isascii() else tree.component(key))
            name = tensor_name(node) if at_a_glance and (everything or wants(where)) else None
            family = None if name is None else family_of(live)
            if name is not None and family is not None:
                row = find(name, rank)
                address = family.takes(live, row.dtype, row.shape)
                if address is not None:
                    fill = Fill(where, live, family, row, (0,) * len(row.shape), row.shape, False, address)
                    if at_address.setdefault(address, fill) is fill:
                        fills.append(fill)
                        loaded.append(where)
                    else:
                        self._tensors.add(where, [(fill, None)])
                    continue
            yield node, key, live, where

    def _holds_live(self, value: Any, *, tensors: bool = True) -> bool:
        """Whether a container holds objects (or tensors, or values of this rank's own) that are restored by themselves,
        so that it must not be replaced whole."""
        family = self._families.of(value)
        if isinstance(value, Sharded) or (family is not None and family is not self._families.blob):
            return tensors
        if isinstance(value, PerRank):
            return tensors or self._holds_live(value.value, tensors=False)  # the mark must not be replaced either
        if id(value) in self._expansions:
            return True
        if isinstance(value, dict):
            value = tuple(value.values())
        return isinstance(value, list | tuple) and any(self._holds_live(item, tensors=tensors) for item in value)

    # -- leaves ---------------------------------------------------------------------------------
    def _tensor(self, node: tree.Node, live: Any, path: str, box: Sharded | None) -> None:
        plan = self.plan
        if not self._selection.wants(path):
            return self._skip(path)
        if node is UNSET:
            return plan.missing.append(path)
        self._used.add(path)
        return self._tensors.match(node, live, path, box)

    def _scalar(self, node: tree.Node, path: str, put: Setter, saved_path: str | None = None) -> None:
        if node is UNSET:
            if self._selection.wants(path):
                self.plan.missing.append(path)
            return
        if self._take(node, path, saved_path):
            self.plan.assigns.append(Assign(path, node, put))

    def _take(self, node: tree.Node, path: str, saved_path: str | None = None) -> bool:
        """Whether ``node``, which is restored as a whole, is wanted and to be had; all that stands in it is settled."""
        paths = leaf_paths(node, path) or [path]
        if self._renamed is not None:
            origin = self._renamed.origins.get(path, path) if saved_path is None else saved_path
            self._used.update(self._renamed.leaves_below(node, origin))
        if not self._selection.wants_all(path, paths):
            self._skip(path)
            return False
        refusals = self._view.refusals(node)
        if refusals:
            if self._view.nobody:
                self._skip(path)
            else:
                self.plan.problems.extend(refusals)
            return False
        self.plan.loaded.extend(paths)
        return True

    # -- objects --------------------------------------------------------------------------------
    def _object(self, node: tree.Node, expansion: Expansion, path: str) -> None:
        if node is UNSET and self._renamed is None:
            return self._report(self._live_leaves(expansion.state, path), self.plan.missing)
        state = state_of(node)
        if expansion.live:
            return self._live_object(state, expansion, path)
        if state is UNSET:
            return self.plan.missing.append(path)
        if self._take(node, path) and expansion.apply is not None:
            translate: Callable[[Any], Any] | None = None
            if self._renamed is not None and expansion.rename is not None:
                translate = _renamer(expansion.rename, self._renamed.change)
            made = self._made(state, expansion, translate)
            apply = Apply(path, state, expansion.kind, expansion.apply, expansion.check, translate, made)
            self.plan.applies.append(apply)
        return None

    def _made(self, node: tree.Node, expansion: Expansion, translate: Callable[[Any], Any] | None) -> Mapping[str, Any]:
        """The tensors that the object makes for a part of its state, since nobody else knows how they lie."""
        if expansion.make is None:
            return {}

        def outline() -> Any:
            saved = outline_of(node, self._view)
            return saved if translate is None else translate(saved)

        made = expansion.make(outline)
        self._tensors.build(made)
        return made

    def _live_object(self, node: tree.Node, expansion: Expansion, path: str) -> None:
        """A module: its tensors are filled in place, what else its state holds is applied afterwards."""
        plan = self.plan
        rest: dict[Any, Any] = {}
        missing, settled, assigns = len(plan.missing), plan.settled, len(plan.assigns)
        self._children(node, expansion.state, path, rest.__setitem__, grows=False)
        if len(plan.missing) > missing and plan.settled == settled:
            self._nothing_fits(node, expansion, path)
        apply = expansion.apply
        if apply is not None and len(plan.assigns) > assigns:
            plan.finish.append(lambda: apply(rest))

    def _nothing_fits(self, node: tree.Node, expansion: Expansion, path: str) -> None:
        """Not one name of a module is among those saved for it: a wrong prefix or a wrong model, strict or not."""
        saved = leaf_paths(node, path) if node is not UNSET else []
        if saved and saved != [path]:
            live = self._live_leaves(expansion.state, path)
            self.plan.problems.append(
                f"{path or 'the state'}: not one of its {len(live)} names ({live[0]}, ...) is among the {len(saved)} "
                f"saved ones ({saved[0]}, ...): rename= maps names, keys= leaves the object out"
            )

    # -- containers -----------------------------------------------------------------------------
    def _dict(self, node: tree.Node, live: dict[Any, Any], path: str, put: Setter) -> None:
        if node is UNSET and self._renamed is None:
            return self._report(self._live_leaves(live, path) or [path], self.plan.missing)
        node = state_of(node)
        if node is not UNSET and pairs_of(node) is None:
            if put is _no_put or (live and self._holds_live(live)):
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
        pairs = [] if node is UNSET else pairs_of(node)
        if pairs is None:
            self.plan.problems.append(f"{path or 'the state'}: a mapping here, but saved was {describe(node)}")
            return
        saved = {key if type(key) is str else key_of(key): child for key, child in pairs}
        nodes = [saved.pop(key, UNSET) for key in live]
        for child, key, value, where in self._others(live.items(), nodes, path):
            self._visit(child, value, where, _item_setter(put_item, key))
        origin = path if self._renamed is None else self._renamed.origins.get(path, path)
        for key, child in saved.items():
            where = tree.join(path, key)
            if grows:
                reason, inner = self._view.refusal(child), self._view.look(child)
                setter = _item_setter(put_item, key)
                if reason is not None:
                    self._refuse(reason, None, where)
                else:
                    self._scalar(inner, where, setter if inner is child else _marking(setter), tree.join(origin, key))
            elif self._renamed is None:
                self._report(leaf_paths(self._view.look(child), where) or [where], self.plan.unexpected)

    def _list(self, node: tree.Node, live: list[Any], path: str, put: Setter) -> None:
        if node is UNSET and self._renamed is None:
            return self._report(self._live_leaves(live, path) or [path], self.plan.missing)
        if self._renamed is not None and self._holds_live(live):
            items: list[Any] = [UNSET] * len(live)
        elif not self._holds_live(live):
            whole = slice(None)
            return self._scalar(node, path, _item_setter(live.__setitem__, whole) if isinstance(node, list) else put)
        elif isinstance(node, list) and len(node) == len(live):
            items = node
        else:
            saved = f"a list of {len(node)}" if isinstance(node, list) else describe(node)
            self.plan.problems.append(f"{path or 'the state'}: a list of {len(live)} here, but saved was {saved}")
            return None
        for child, number, value, where in self._others(enumerate(live), items, path):
            self._visit(child, value, where, _item_setter(live.__setitem__, number))
        return None

    def _tuple(self, node: tree.Node, live: tuple[Any, ...], path: str, put: Setter) -> None:
        if node is UNSET and self._renamed is None:
            return self._report(self._live_leaves(live, path), self.plan.missing)
        saved = None if node is UNSET or isinstance(node, list) else items_of(node)
        items = [UNSET] * len(live) if node is UNSET else saved
        if items is None or len(items) != len(live):
            self.plan.problems.append(f"{path}: a tuple of {len(live)} here, but saved was {describe(node)}")
            return None
        new = list(live)
        before = len(self.plan.assigns)
        for child, number, value, where in self._others(enumerate(live), items, path):
            self._visit(child, value, where, _item_setter(new.__setitem__, number))
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

    def _refuse(self, reason: str, live: Any, path: str) -> None:
        """Something is saved for this place, but not to be had: nobody's is wanted, or nobody knows whose."""
        if self._view.nobody or not any(map(self._selection.wants, [path, *self._live_leaves(live, path)])):
            return self._skip(path)
        self._used.add(path)
        return self.plan.problems.append(reason)

    def _skip(self, path: str) -> None:
        self._used.add(path)
        self.plan.skipped.append(path)


def _no_put(value: Any) -> None:
    raise InvalidInput("the root of the state cannot be replaced; pass a dict or list around it")


def _marking(put: Setter) -> Setter:
    return lambda value: put(PerRank(value))


def _renamer(rename: Callable[[Any, Callable[[str], str]], Any], change: Callable[[str], str]) -> Callable[[Any], Any]:
    return lambda saved: rename(saved, change)


def _item_setter(put_item: Callable[[Any, Any], None], key: Any) -> Setter:
    return lambda value: put_item(key, value)
