"""Nodes of a state tree that are references or marks, and the names that places in a tree have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckptfmt.errors import FormatError
from ckptfmt.format.tree_scalars import Node

DEPTH_MAX: Final = 128
"""Deepest nesting of values. JSON nests up to three times as deep, which every parser still takes."""
INLINE_BYTES_MAX: Final = 1024
"""Longer ``bytes`` are offered to ``leaf``, to be stored beside the tensors."""
REFERENCE_TAGS: Final = frozenset({"tensor", "array", "stored_bytes", "stored_bytearray"})
"""Tags whose payload names a tensor of the manifest (the last two: bytes stored as one of type uint8)."""

EncodeLeaf = Callable[[str, Any], Node | None]
DecodeLeaf = Callable[[str, Any], Any]

FACTORIES: Final[dict[str, Callable[[], Any]]] = {
    cls.__name__: cls for cls in (int, float, complex, bool, str, bytes, list, dict, set, frozenset, tuple)
}


@dataclass(frozen=True)
class Foreign:
    """A value whose type this process doesn't know: its tag or registered name, and what was stored for it."""

    tag: str
    value: Any


def component(key: Any) -> str:
    """Return how a dict key or list index stands in a dotted path. Always valid Unicode."""
    if type(key) is str:
        return key if key.isascii() else key.encode("utf-8", "backslashreplace").decode("utf-8")
    return str(key) if type(key) is int else repr(key).encode("utf-8", "backslashreplace").decode("utf-8")


def join(path: str, key: Any) -> str:
    """Return the dotted path of the child ``key`` of ``path`` ('' is the root)."""
    return f"{path}.{component(key)}" if path else component(key)


def reference(tag: str, name: str, flags: Sequence[str] = ()) -> Node:
    """Return a node that refers to a tensor of the manifest; ``flags`` are facts for rebuilding the value."""
    return {tag: [name, *flags] if flags else name}


def split_reference(payload: Any) -> tuple[str, tuple[str, ...]]:
    """Return (tensor name, flags) of a reference's payload; ``FormatError`` if it is none."""
    if type(payload) is str:
        return payload, ()
    words = payload if isinstance(payload, list) else [payload]
    if not words or not all(type(word) is str for word in words):
        raise FormatError(f"a reference of the state tree must hold a tensor's name and flags, not {payload!r:.100}")
    return words[0], tuple(words[1:])


def stateful(kind: str, type_name: str, notes: Node, state: Node) -> Node:
    """Return the node of a live object by its encoded ``state``, which it decodes to. ``notes``: node."""
    return {"stateful": [kind, type_name, notes, state]}


def per_rank(slot: str) -> Node:
    """Return the node of a value that every rank keeps for itself, under ``slot`` in its own tree."""
    return {"per_rank": slot}
