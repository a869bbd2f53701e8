"""What DCP's planners are told of a generation: metadata as its own writers leave it, made from the manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptfmt.engine.load.nodes import check_depth, key_of, object_of, pairs_of, tag_of
from ckptfmt.engine.load.ranks import RankView
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.stored import Stored
from ckptfmt.errors import Mismatch
from ckptfmt.format import tree
from ckptfmt.torch.dcp.planner_data import kept_in
from ckptfmt.torch.dcp.state import WHOLE, Path, Whole, dotted
from ckptfmt.torch.elements import torch_dtype


@dataclass(frozen=True)
class Value:
    """A value that is no tensor: its node in the state tree, and the mark under which it was saved."""

    node: tree.Node
    mark: type[Whole] | None = None


@dataclass(frozen=True)
class Contents:
    """The flat names of a generation's state, in the order of the state."""

    view: RankView
    tensors: dict[str, Stored] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def metadata(self) -> Metadata:
        found: dict[str, Any] = {
            name: _tensor(self.tensors[name]) if name in self.tensors else BytesStorageMetadata() for name in self.paths
        }
        left = kept_in(self.view.opened)
        return Metadata(state_dict_metadata=found, planner_data=dict(self.paths) if left is None else left)


def contents_of(opened: Opened, rank: int | None) -> Contents:
    """Flatten the state as DCP's planners do. What each rank kept for itself is that of the saved rank ``rank``, and is
    left out if that is None and there are several. ``Mismatch`` if two places of the state get one flat name."""
    if rank is None and len(opened.ranks) == 1:
        rank = opened.ranks[0]
    view = RankView(opened, rank, "name a saved rank with rank=")
    check_depth(opened.common)
    contents = Contents(view)
    if pairs_of(opened.common) is None:
        raise Mismatch(f"{opened.name}: its state is no mapping, and DCP knows no other; use ckptfmt.load")
    _flatten(contents, opened.common, ())
    return contents


def _flatten(contents: Contents, node: tree.Node, path: Path) -> None:
    view = contents.view
    if view.refusal(node) is not None:
        return
    node = view.slot(node)
    live = object_of(node)
    if live is not None:
        if live[1] in WHOLE:
            return _add(contents, path, Value(live[3], WHOLE[live[1]]))
        return _flatten(contents, live[3], path)
    pairs = pairs_of(node)
    if pairs is not None:
        for key, child in pairs:
            _flatten(contents, child, (*path, str(key_of(key))))
    elif isinstance(node, list) and not _is_one_value(node):
        for index, child in enumerate(node):
            _flatten(contents, child, (*path, index))
    elif tag_of(node) == "tensor":
        _add(contents, path, view.opened.stored.find(tree.split_reference(node["tensor"])[0], view.rank))
    else:
        _add(contents, path, Value(node))
    return None


def _add(contents: Contents, path: Path, found: Stored | Value) -> None:
    name = dotted(path)
    if name in contents.paths:
        raise Mismatch(f"{contents.view.opened.name}: {path} and {contents.paths[name]} are both {name!r} to DCP")
    contents.paths[name] = path
    if isinstance(found, Stored):
        contents.tensors[name] = found
    else:
        contents.values[name] = found


def _is_one_value(node: list[Any]) -> bool:
    """As ``state.is_one_value`` says of the list that the node stands for."""
    return not any(
        tag_of(item) == "tensor" or pairs_of(item) is not None or (isinstance(item, list) and not _is_one_value(item))
        for item in node
    )


def _tensor(row: Stored) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)) for box in row.boxes]
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(row.dtype)), torch.Size(row.shape), chunks)
