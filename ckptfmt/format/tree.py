"""The state tree: a nested Python structure as typed JSON, and back, exactly.

A node is a JSON value. ``null``, booleans, strings, integers within 2**53, finite floats and arrays
(Python lists) stand for themselves; all else is an object of one member, ``{tag: payload}``.
Tensors are references to names in the manifest; what they are is the business of ``leaf``. There is
no pickle in either direction. The tags are listed in spec/format-v1.md, "State tree".
"""

from __future__ import annotations

from typing import Any

from ckptfmt.errors import FormatError, UnsupportedValue
from ckptfmt.format.tree_decoder import Decoder
from ckptfmt.format.tree_encoder import Encoder, named
from ckptfmt.format.tree_nodes import (
    DEPTH_MAX,
    INLINE_BYTES_MAX,
    REFERENCE_TAGS,
    DecodeLeaf,
    EncodeLeaf,
    Foreign,
    component,
    join,
    per_rank,
    reference,
    split_reference,
    stateful,
)
from ckptfmt.format.tree_registry import register_tag, register_type
from ckptfmt.format.tree_scalars import Node
from ckptfmt.format.tree_walk import first_tag, references, subtree, unite

__all__ = [
    "DEPTH_MAX",
    "INLINE_BYTES_MAX",
    "REFERENCE_TAGS",
    "Foreign",
    "Node",
    "component",
    "decode",
    "encode",
    "first_tag",
    "join",
    "per_rank",
    "reference",
    "references",
    "register_tag",
    "register_type",
    "split_reference",
    "stateful",
    "subtree",
    "unite",
]


def encode(value: Any, leaf: EncodeLeaf, *, path: str = "") -> Node:
    """Return the node of ``value``.

    ``leaf(path, value)`` is asked about every value that isn't of a built-in or registered type, and
    about long bytes; it returns a node, or None for what isn't its own. ``UnsupportedValue`` names
    path and type of what nobody takes, and of what is nested too deeply or contains itself.
    """
    try:
        return Encoder(leaf).node(value, path, 0)
    except RecursionError:
        raise UnsupportedValue(f"{named(path)} is nested too deeply, or contains itself") from None


def decode(node: Node, leaf: DecodeLeaf, *, lenient: bool = False) -> Any:
    """Return the value of ``node``. ``leaf(tag, payload)`` is asked for references and per-rank slots.

    ``FormatError`` for what is no node. A type unknown here is ``UnsupportedValue``, or with
    ``lenient`` a ``Foreign``.
    """
    try:
        return Decoder(leaf, lenient).node(node, 0)
    except RecursionError:
        raise FormatError("the state tree is nested too deeply") from None
