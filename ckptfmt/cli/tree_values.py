"""The leaves of a saved state by dotted path, for comparison."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ckptfmt.cli import contents as c
from ckptfmt.engine.load import names
from ckptfmt.engine.opened import Opened
from ckptfmt.format import tree


@dataclass(frozen=True)
class Leaf:
    """One place of a state. Two places are equal if their nodes are, types included: 1, 1.0 and True differ."""

    node: bytes
    text: str
    is_value: bool
    is_tensor: bool


def leaves_of(opened: Opened, *, metadata: bool = True) -> dict[str, Leaf]:
    """Values, references and the kinds of containers; what each rank keeps has its rank beside the path.
    The user's ``metadata`` stands under a path of its own."""
    found: dict[str, Leaf] = {}
    _collect(opened.common, "", found)
    for rank, slots in sorted(opened.manifest.trees.per_rank.items(), key=lambda item: int(item[0])):
        for slot, node in slots.items():
            _collect(node, slot, found, f" (rank {rank})")
    if metadata and opened.manifest.metadata is not None:
        _collect(opened.manifest.metadata, "(metadata)", found)
    return found


def _collect(root: tree.Node, at: str, found: dict[str, Leaf], suffix: str = "") -> None:
    for path, node, is_leaf in names.walk(root, at):
        if c.is_slot(node):
            continue
        if not is_leaf:
            # Only its kind: what a container holds stands at its own paths.
            kind = c.kind_of(node)
            found[f"{path}{suffix}"] = Leaf(kind.encode(), kind, is_value=False, is_tensor=False)
        elif c.is_reference(node):
            found[f"{path}{suffix}"] = Leaf(c.tag_of(node).encode(), c.kind_of(node), is_value=False, is_tensor=True)
        else:
            found[f"{path}{suffix}"] = Leaf(
                msgspec.json.encode(node), c.value_text(node), is_value=True, is_tensor=False
            )
