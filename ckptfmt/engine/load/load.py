"""``load``: build a state, or a part of one, from a committed generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ckptfmt.engine.collector import held_back
from ckptfmt.engine.families import Families
from ckptfmt.engine.load.build import Builder, mentions_torch, read_entries, wanted_entries
from ckptfmt.engine.load.names import Selection
from ckptfmt.engine.load.nodes import UNSET, check_depth
from ckptfmt.engine.load.prune import Pruner
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.patterns import Patterns
from ckptfmt.errors import Mismatch
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
    rank: int = 0,
) -> Any:
    """Return the saved state, or the part at ``subtree``, with the tensors that ``keys`` and ``exclude`` select.

    ``NotFound`` (near names) for an unknown subtree, ``Mismatch`` if the patterns match no tensor, ``Corrupt``
    naming tensor, object and offset for damaged bytes.
    """
    with held_back():
        return _load_state(opened, families_for, Selection(keys, exclude), subtree, device, framework, verify, rank)


def _load_state(
    opened: Opened,
    families_for: FamiliesFor,
    selection: Selection,
    subtree: str | None,
    device: Any | None,
    framework: Framework,
    verify: bool,
    rank: int,
) -> Any:
    for tree_of in (opened.common, *opened.slots(rank).values()):
        check_depth(tree_of)
    root = opened.common if subtree is None else _subtree(opened, subtree, rank)
    node = root if selection.everything else Pruner(selection.wants, lambda slot: opened.slot(slot, rank)).prune(root)
    entries = [] if node is UNSET else wanted_entries(opened, [node], rank)
    if not selection.everything and not entries and wanted_entries(opened, [root], rank):
        raise Mismatch(
            f"{opened.name}: no tensor matches {selection}; see `ckptfmt inspect`",
            kind="nothing_loaded",
        )
    # What is left of a tree has this rank's slots in place; the whole still refers to them.
    nodes = [node, *opened.slots(rank).values()] if node is opened.common else [node]
    families = families_for(framework, saved_torch=any(map(mentions_torch, nodes)))
    memory = read_entries(opened, entries, verify=verify)
    return Builder(opened, families, memory, rank=rank, framework=framework, device=device).value(node)


def _subtree(opened: Opened, dotted: str, rank: int) -> tree.Node:
    inlined = Pruner(lambda name: True, lambda slot: opened.slot(slot, rank)).prune(opened.common)
    return tree.subtree(inlined, dotted)
