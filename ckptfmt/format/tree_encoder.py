"""From Python values to nodes of the state tree. See ``tree.encode``."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from ckptfmt.errors import UnsupportedValue
from ckptfmt.format import tree_registry, tree_scalars
from ckptfmt.format.tree_nodes import DEPTH_MAX, FACTORIES, INLINE_BYTES_MAX, EncodeLeaf, component, join
from ckptfmt.format.tree_scalars import Node


def named(path: str) -> str:
    return f"the value at {path!r}" if path else "the state itself"


class Encoder:
    def __init__(self, leaf: EncodeLeaf) -> None:
        self.leaf = leaf
        self._leaf_types: set[type] = set()
        """Types that are nobody's but ``leaf``'s: their values go there at once."""

    def node(self, value: Any, path: str, depth: int) -> Node:
        cls = type(value)
        scalar = tree_scalars.ENCODERS.get(cls)
        if scalar is not None:
            try:
                return scalar(value)
            except TypeError as error:
                raise UnsupportedValue(f"{named(path)} can't be saved: {error}") from error
        container = CONTAINERS.get(cls)
        if container is not None:
            if depth >= DEPTH_MAX:
                raise UnsupportedValue(f"{named(path)} is nested more than {DEPTH_MAX} deep, or contains itself")
            return container(self, value, path, depth + 1)
        return self.other(value, path, depth)

    def other(self, value: Any, path: str, depth: int) -> Node:
        known = tree_registry.for_type(type(value))
        if known is not None:
            if known.tag is not None:
                return {known.tag: known.encode(value)}
            if depth >= DEPTH_MAX:
                raise UnsupportedValue(f"{named(path)} is nested more than {DEPTH_MAX} deep, or contains itself")
            return {"registered": [known.name, self.node(known.encode(value), path, depth + 1)]}
        node = tree_scalars.from_numpy(value)
        if node is None:
            node = self.leaf(path, value)
            if node is not None:
                self._leaf_types.add(type(value))
        if node is None:
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            raise UnsupportedValue(
                f"{named(path)} is of type {name}, which can't be saved: convert it to plain Python or a tensor, "
                f"or teach it with ckptfmt.register_type({type(value).__qualname__}, name=..., encode=..., decode=...)"
            )
        return node

    def items(self, value: Iterable[Any], path: str, depth: int) -> list[Node]:
        nodes = []
        prefix = f"{path}." if path else ""
        for i, item in enumerate(value):
            nodes.append(self.node(item, f"{prefix}{i}", depth))
        return nodes

    def pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Node]:
        nodes: list[Node] = []
        prefix = f"{path}." if path else ""
        leaf, leaf_types = self.leaf, self._leaf_types
        for key, item in value.items():
            if type(key) is str and key.isascii():  # stands for itself, in a path as in the tree
                where, key_node = prefix + key, key
            else:
                where = prefix + component(key)
                key_node = self.node(key, where, depth)
            node = leaf(where, item) if type(item) in leaf_types else None
            nodes.append([key_node, self.node(item, where, depth) if node is None else node])
        return nodes

    def ordered_pairs(self, value: OrderedDict[Any, Any], path: str, depth: int) -> Node:
        attributes = vars(value)
        if not attributes:
            return {"odict": self.pairs(value, path, depth)}
        if set(attributes) != {"_metadata"}:
            raise UnsupportedValue(f"{named(path)} is an OrderedDict with attributes {sorted(attributes)}: remove them")
        metadata = self.node(attributes["_metadata"], join(path, "_metadata"), depth)
        return {"state_dict": [self.pairs(value, path, depth), metadata]}

    def default_pairs(self, value: defaultdict[Any, Any], path: str, depth: int) -> Node:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if factory is not None and FACTORIES.get(str(name)) is not factory:
            raise UnsupportedValue(
                f"{named(path)} is a defaultdict whose factory is not one of {', '.join(FACTORIES)}: save dict(...)"
            )
        return {"defaultdict": [name, self.pairs(value, path, depth)]}

    def unordered(self, value: Iterable[Any], path: str, depth: int) -> list[Node]:
        # A set has no order; sorting by text makes equal sets equal bytes.
        return sorted((self.node(item, path, depth) for item in value), key=msgspec.json.encode)

    def byte_string(self, value: bytes | bytearray, path: str, depth: int) -> Node:
        node = self.leaf(path, value) if len(value) > INLINE_BYTES_MAX else None
        return tree_scalars.inline_bytes(value) if node is None else node


CONTAINERS: Final[dict[type, Callable[[Encoder, Any, str, int], Node]]] = {
    list: Encoder.items,
    dict: lambda coder, value, path, depth: {"dict": coder.pairs(value, path, depth)},
    tuple: lambda coder, value, path, depth: {"tuple": coder.items(value, path, depth)},
    OrderedDict: Encoder.ordered_pairs,
    Counter: lambda coder, value, path, depth: {"counter": coder.pairs(value, path, depth)},
    defaultdict: Encoder.default_pairs,
    deque: lambda coder, value, path, depth: {"deque": [coder.items(value, path, depth), value.maxlen]},
    set: lambda coder, value, path, depth: {"set": coder.unordered(value, path, depth)},
    frozenset: lambda coder, value, path, depth: {"frozenset": coder.unordered(value, path, depth)},
    slice: lambda coder, value, path, depth: {"slice": coder.items((value.start, value.stop, value.step), path, depth)},
    bytes: Encoder.byte_string,
    bytearray: Encoder.byte_string,
}
