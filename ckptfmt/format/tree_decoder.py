"""From nodes of the state tree to Python values. See ``tree.decode``."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

from ckptfmt.errors import FormatError, UnsupportedValue
from ckptfmt.format import tree_registry, tree_scalars
from ckptfmt.format.tree_nodes import DEPTH_MAX, FACTORIES, REFERENCE_TAGS, DecodeLeaf, Foreign
from ckptfmt.format.tree_scalars import Node


def malformed(tag: str, why: object = "") -> FormatError:
    return FormatError(f"the state tree holds a malformed {tag!r} node{f': {why}' if str(why) else ''}")


class Decoder:
    def __init__(self, leaf: DecodeLeaf, lenient: bool) -> None:
        self.leaf = leaf
        self.lenient = lenient

    def node(self, node: Node, depth: int) -> Any:
        cls = type(node)
        if cls is list:
            return self.items(node, "list", depth)
        if cls is not dict:
            if cls in (str, int, float, bool, type(None)):
                return node
            raise FormatError(f"the state tree holds a {cls.__name__}, which is no JSON")
        if len(node) != 1:
            raise FormatError(f"an object of the state tree has {len(node)} members; each has exactly one, its tag")
        ((tag, payload),) = node.items()
        if tag in REFERENCE_TAGS or tag == "per_rank":
            return self.leaf(tag, payload)
        container = REBUILDERS.get(tag)
        if container is not None:
            return container(self, payload, depth)
        return self.scalar(tag, payload)

    def scalar(self, tag: str, payload: Any) -> Any:
        convert = tree_scalars.DECODERS.get(tag)
        if convert is None:
            known = tree_registry.for_tag(tag)
            if known is None:
                if self.lenient:
                    return Foreign(tag, payload)
                raise UnsupportedValue(
                    f"the state holds a value with the tag {tag!r}, unknown here: import the library it belongs to "
                    f"({tag.partition('.')[0]}), or upgrade ckptfmt"
                )
            convert = known.decode
        try:
            return convert(payload)
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            raise malformed(tag, error) from error

    def items(self, payload: Any, tag: str, depth: int) -> list[Any]:
        if type(payload) is not list:
            raise malformed(tag, "no array")
        if depth >= DEPTH_MAX:
            raise FormatError(f"the state tree is nested more than {DEPTH_MAX} deep")
        values = []
        for node in payload:
            values.append(self.node(node, depth + 1))
        return values

    def fill(self, into: dict[Any, Any], payload: Any, tag: str, depth: int) -> Any:
        if type(payload) is not list:
            raise malformed(tag, "no array of pairs")
        if depth >= DEPTH_MAX:
            raise FormatError(f"the state tree is nested more than {DEPTH_MAX} deep")
        for pair in payload:
            if type(pair) is not list or len(pair) != 2:
                raise malformed(tag, "an item is no pair")
            key = pair[0]
            if type(key) is not str:  # nearly every key is one and stands for itself
                key = self.node(key, depth + 1)
            try:
                twice = key in into
            except TypeError:
                raise malformed(tag, "a key is not hashable") from None
            if twice:
                raise malformed(tag, f"the key {key!r:.100} stands twice")
            into[key] = self.node(pair[1], depth + 1)
        return into

    def row(self, payload: Any, tag: str, length: int) -> list[Any]:
        if type(payload) is not list or len(payload) != length:
            raise malformed(tag, f"no array of {length}")
        return payload

    def state_dict(self, payload: Any, depth: int) -> OrderedDict[Any, Any]:
        pairs, metadata = self.row(payload, "state_dict", 2)
        value: OrderedDict[Any, Any] = self.fill(OrderedDict(), pairs, "state_dict", depth)
        value._metadata = self.node(metadata, depth + 1)  # type: ignore[attr-defined]
        return value

    def default_dict(self, payload: Any, depth: int) -> defaultdict[Any, Any]:
        name, pairs = self.row(payload, "defaultdict", 2)
        if name is not None and name not in FACTORIES:
            raise malformed("defaultdict", f"factory {name!r}")
        value: defaultdict[Any, Any] = defaultdict(None if name is None else FACTORIES[name])
        return self.fill(value, pairs, "defaultdict", depth)  # type: ignore[no-any-return]

    def bounded(self, payload: Any, depth: int) -> deque[Any]:
        items, length_max = self.row(payload, "deque", 2)
        if length_max is not None and (type(length_max) is not int or not 0 <= length_max <= tree_scalars.INT_MAX):
            raise malformed("deque", "length")
        values = self.items(items, "deque", depth)
        if length_max is not None and len(values) > length_max:
            raise malformed("deque", "more items than its length allows")
        return deque(values, length_max)

    def unique(self, payload: Any, tag: str, depth: int) -> set[Any]:
        values = self.items(payload, tag, depth)
        try:
            distinct = set(values)
        except TypeError:
            raise malformed(tag, "an item is not hashable") from None
        if len(distinct) != len(values):
            raise malformed(tag, "an item stands twice")
        return distinct

    def slice_of(self, payload: Any, depth: int) -> slice:
        return slice(*self.items(self.row(payload, "slice", 3), "slice", depth))

    def stateful(self, payload: Any, depth: int) -> Any:
        kind, type_name, _notes, state = self.row(payload, "stateful", 4)
        if type(kind) is not str or type(type_name) is not str:
            raise malformed("stateful", "kind and type must be strings")
        return self.node(state, depth)

    def registered(self, payload: Any, depth: int) -> Any:
        name, inner = self.row(payload, "registered", 2)
        if type(name) is not str:
            raise malformed("registered", "the name must be a string")
        if depth >= DEPTH_MAX:
            raise FormatError(f"the state tree is nested more than {DEPTH_MAX} deep")
        value = self.node(inner, depth + 1)
        known = tree_registry.for_name(name)
        if known is not None:
            return known.decode(value)
        if self.lenient:
            return Foreign(name, value)
        raise UnsupportedValue(
            f"the state holds a value of the registered type {name!r}, unknown here: call "
            f"ckptfmt.register_type(cls, name={name!r}, encode=..., decode=...) before loading"
        )


REBUILDERS: Final[dict[str, Callable[[Decoder, Any, int], Any]]] = {
    "dict": lambda coder, payload, depth: coder.fill({}, payload, "dict", depth),
    "odict": lambda coder, payload, depth: coder.fill(OrderedDict(), payload, "odict", depth),
    "counter": lambda coder, payload, depth: coder.fill(Counter(), payload, "counter", depth),
    "state_dict": Decoder.state_dict,
    "defaultdict": Decoder.default_dict,
    "deque": Decoder.bounded,
    "tuple": lambda coder, payload, depth: tuple(coder.items(payload, "tuple", depth)),
    "set": lambda coder, payload, depth: coder.unique(payload, "set", depth),
    "frozenset": lambda coder, payload, depth: frozenset(coder.unique(payload, "frozenset", depth)),
    "slice": Decoder.slice_of,
    "stateful": Decoder.stateful,
    "registered": Decoder.registered,
}
