"""``load``: build a state, or a part of one, from a committed generation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, Literal

from ckptfmt.engine.collector import held_back
from ckptfmt.engine.families import Families
from ckptfmt.engine.load.build import Builder, mentions_torch, read_entries, wanted_entries
from ckptfmt.engine.load.names import Selection
from ckptfmt.engine.load.nodes import UNSET, check_depth
from ckptfmt.engine.load.prune import Pruner
from ckptfmt.engine.load.ranks import RankView, view_for_load
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.patterns import Patterns
from ckptfmt.errors import Mismatch, NotFound
from ckptfmt.format import tree

Framework = Literal["saved", "torch", "numpy"]
FamiliesFor = Callable[..., Families]
"""``connect.families_for``: (framework, saved_torch=) -> Families."""


def load_state(
    opened: Opened,
    families_for: FamiliesFor,
    *,
    subtree: str | None = None,
    keys: Patterns | None = None,
    exclude: Patterns | None = None,
    device: Any | None = None,
    framework: Framework = "saved",
    verify: bool = True,
    rank: int | None = None,
) -> Any:
    """Return the saved state, or the part at ``subtree``, with the tensors that ``keys`` and ``exclude`` select.

    What each rank kept for itself is that of the saved rank ``rank`` (None: of the only one there is). ``NotFound``
    (near names) for an unknown subtree, ``Mismatch`` if the patterns match no tensor, or if several ranks kept
    something and none is named, ``Corrupt`` naming tensor, object and offset for damaged bytes.
    """
    view = view_for_load(opened, rank)
    with held_back():
        return _load_state(view, families_for, Selection(keys, exclude), subtree, device, framework, verify)


def _load_state(
    view: RankView,
    families_for: FamiliesFor,
    selection: Selection,
    subtree: str | None,
    device: Any | None,
    framework: Framework,
    verify: bool,
) -> Any:
    opened = view.opened
    for tree_of in (opened.common, *view.own_trees()):
        check_depth(tree_of)
    root = opened.common if subtree is None else _subtree(view, subtree)
    node = root if selection.everything else _selected(view, selection, root)
    view.require([] if node is UNSET else [node])
    entries = [] if node is UNSET else wanted_entries(view, [node])
    if not selection.everything and not entries and _holds_tensors(view, root):
        raise Mismatch(
            f"{opened.name}: no tensor matches {selection}; see `ckptfmt inspect`",
            kind="nothing_loaded",
        )
    # What is left of a tree has this rank's slots in place; the whole still refers to them.
    nodes = [node, *view.own_trees()] if node is opened.common else [node]
    families = families_for(framework, saved_torch=any(map(mentions_torch, nodes)))
    memory = read_entries(opened, entries, verify=verify)
    return Builder(view, families, memory, framework=framework, device=device).value(node)


def _selected(view: RankView, selection: Selection, root: tree.Node) -> tree.Node:
    """What the patterns leave of ``root``, with the slots that nobody can look into but hold tensors they select."""
    unseen = _selected_unseen(view, selection, root)
    return Pruner(lambda name: selection.wants(name) or name in unseen, view.look).prune(root)


def _selected_unseen(view: RankView, selection: Selection, root: tree.Node) -> set[str]:
    slots = {name for tag, name in tree.references(root) if tag == "per_rank" and view.refusal(tree.per_rank(name))}
    slots = {slot for slot in slots if not selection.excludes(slot)}
    found: set[str] = set()
    for name in (*view.opened.index, *view.opened.manifest.aliases) if slots else ():
        above = slots.intersection(accumulate(name.split("."), "{}.{}".format))
        if above and selection.wants(name):
            found |= above
    return found


def _inlined(view: RankView, node: tree.Node) -> tree.Node:
    """The node with what the rank in view kept in place of its slots."""
    return Pruner(lambda name: True, view.look).prune(node)


def _subtree(view: RankView, dotted: str) -> tree.Node:
    common = view.opened.common
    try:
        return tree.subtree(_inlined(view, common), dotted)
    except NotFound:
        slots = [name for tag, name in tree.references(common) if tag == "per_rank"]
        view.require(tree.per_rank(slot) for slot in slots if _is_below(dotted, slot))
        raise


def _is_below(dotted: str, slot: str) -> bool:
    """A slot is called by its path, and ``~`` where it is the whole state."""
    return slot == "~" or dotted.startswith(f"{slot}.")


def _holds_tensors(view: RankView, node: tree.Node) -> bool:
    return any(tag != "per_rank" for tag, _ in tree.references(_inlined(view, node)))
