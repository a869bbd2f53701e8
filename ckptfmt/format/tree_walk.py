"""Looking at a state tree without rebuilding its values: references, sub-trees, and union over ranks."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from ckptfmt.errors import FormatError, Mismatch, NotFound
from ckptfmt.format import strict_json
from ckptfmt.format.tree_decoder import Decoder, malformed
from ckptfmt.format.tree_nodes import REFERENCE_TAGS, component, split_reference
from ckptfmt.format.tree_scalars import Node

_PAIRS: Final = frozenset({"dict", "odict", "counter"})
_ITEMS: Final = frozenset({"tuple", "set", "frozenset", "slice"})


Mark = tuple[str, Any]
"""(tag, payload) of a reference or of a per-rank slot."""


def marks(node: Node, known: Container[str] = ()) -> list[Mark]:
    """Return every reference and per-rank slot below ``node``, in order, but for references to ``known`` tensors.

    ``FormatError`` for an object that is no node.
    """
    found: list[Mark] = []
    todo: list[Iterator[Any]] = [iter((node,))]
    while todo:
        for item in todo[-1]:
            cls = type(item)
            if cls is list:
                if len(item) == 2 and type(item[0]) is str:  # a key and its value, or as good as that
                    item = item[1]
                    cls = type(item)
                if cls is list:
                    todo.append(iter(item))
                    break
            if cls is not dict:
                continue
            try:
                (tag,) = item
            except ValueError:
                raise FormatError(
                    f"an object of the state tree has {len(item)} members; each has exactly one, its tag"
                ) from None
            payload = item[tag]
            cls = type(payload)
            if tag in REFERENCE_TAGS:
                if payload not in known if cls is str else not _is_flagged(payload) or payload[0] not in known:
                    found.append((tag, payload))
            elif tag == "per_rank":
                found.append((tag, payload))
            elif cls is list or cls is dict:
                todo.append(iter(payload if cls is list else (payload,)))
                break
        else:
            todo.pop()
    return found


def _is_flagged(payload: Any) -> bool:
    """Whether this is a reference with one flag, as parameters have it."""
    return type(payload) is list and len(payload) == 2 and type(payload[0]) is str and type(payload[1]) is str


def mark_name(mark: Mark) -> str:
    """Return the name of the tensor, or of the slot, that a mark refers to. ``FormatError`` for a malformed one."""
    tag, payload = mark
    if type(payload) is str:
        return payload
    if tag == "per_rank":
        raise FormatError(f"a per-rank slot must be a string, not {payload!r:.100}")
    return split_reference(payload)[0]


def parse_node(text: bytes, what: str) -> Node:
    """Return the node of a JSON text. ``FormatError`` names ``what``."""

    def on_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) != 1:
            raise ValueError(f"an object has {len(pairs)} members; each has exactly one, its tag")
        return {pairs[0][0]: pairs[0][1]}

    return strict_json.parse(text, what, on_object=on_object)


def references(node: Node) -> Iterator[tuple[str, str]]:
    """Yield (tag, name) of every reference and (``per_rank``, slot) of every slot below ``node``, in order."""
    for mark in marks(node):
        yield mark[0], mark_name(mark)


def first_tag(text: bytes, names: Iterable[str], tags: Iterable[str]) -> str | None:
    """Return which of ``tags`` the first reference to a tensor of one of ``names`` has; None if there is none.

    For one question only: it searches the text of a node, which takes a fraction of the time of a walk. The text has
    to be as ``msgspec.json.encode`` writes it: names that are spelled in another way are not found. In JSON ``{"`` and
    a name begin an object, never anything within a string, where quotes are escaped.
    """
    words = [msgspec.json.encode(name) for name in names]
    forms = [
        (tag, form % (tag.encode(), word)) for tag in tags for word in words for form in (b'{"%b":%b', b'{"%b":[%b')
    ]
    places = [(text.find(form), tag) for tag, form in forms]
    return min((place for place in places if place[0] >= 0), default=(0, None))[1]


def _inner(node: Node) -> tuple[str, Any]:
    """Return (tag, payload) of the container that ``node`` is, looking through live objects; ('', None) for none."""
    while True:
        if type(node) is list:
            return "list", node
        if type(node) is not dict or len(node) != 1:
            return "", None
        ((tag, payload),) = node.items()
        if tag == "stateful" and type(payload) is list and len(payload) == 4:
            node = payload[3]
        elif tag == "registered" and type(payload) is list and len(payload) == 2:
            node = payload[1]
        else:
            return tag, payload


def _children(node: Node) -> dict[str, Node]:
    """Return the children of a node by their path component; the first of equal components wins."""
    tag, payload = _inner(node)
    if tag in ("state_dict", "deque") and type(payload) is list and payload:
        payload = payload[0]
    if tag == "defaultdict" and type(payload) is list and len(payload) == 2:
        payload = payload[1]
    if type(payload) is not list:
        return {}
    if tag in _PAIRS or tag in ("state_dict", "defaultdict"):
        found: dict[str, Node] = {}
        for pair in payload:
            if type(pair) is list and len(pair) == 2:
                found.setdefault(_component_of(pair[0]), pair[1])
        return found
    if tag == "list" or tag in _ITEMS or tag == "deque":
        return {str(i): item for i, item in enumerate(payload)}
    return {}


def _component_of(key: Node) -> str:
    if type(key) in (str, int):
        return component(key)
    return component(Decoder(lambda tag, payload: split_reference(payload)[0], lenient=True).node(key, 0))


def subtree(node: Node, dotted: str) -> Node:
    """Return the node at the dotted path below ``node`` ('' is ``node`` itself).

    A key that itself holds dots is found where no shorter key leads on. ``NotFound`` lists near names.
    """
    if not dotted:
        return node
    found, misses = _walk(node, dotted, "")
    if found is not None:
        return found[0]
    parent, rest, names = max(misses, key=lambda miss: len(miss[0]))
    near = difflib.get_close_matches(rest, names, n=5, cutoff=0.3) or names[:5]
    where = f"in {parent!r}" if parent else "at the top"
    raise NotFound(f"the state has nothing at {dotted!r}; {where} there is {', '.join(map(repr, near)) or 'nothing'}")


def _walk(node: Node, rest: str, parent: str) -> tuple[tuple[Node] | None, list[tuple[str, str, list[str]]]]:
    children = _children(node)
    if rest in children:
        return (children[rest],), []
    misses = [(parent, rest, list(children))]
    cut = rest.find(".")
    while cut >= 0:
        head, tail = rest[:cut], rest[cut + 1 :]
        if head in children:
            found, more = _walk(children[head], tail, f"{parent}.{head}" if parent else head)
            if found is not None:
                return found, []
            misses += more
        cut = rest.find(".", cut + 1)
    return None, misses


def unite(nodes: Mapping[int, Node]) -> Node:
    """Return one tree for the trees of several ranks, by rank.

    Dicts are merged, the keys of the lowest rank first; lists need equal lengths; every other value
    must be equal on all ranks that have it. ``Mismatch`` lists every path that differs; ``FormatError``
    for what is no node.
    """
    problems: list[str] = []
    try:
        distinct = _distinct(sorted(nodes.items())) if len(nodes) > 1 else list(nodes.items())
        united = _unite(distinct, "", problems)
    except RecursionError:
        raise FormatError("the state tree is nested too deeply") from None
    if problems:
        raise Mismatch("the ranks' states differ; use PerRank for what each rank keeps for itself", tuple(problems))
    return united


def _distinct(nodes: Sequence[tuple[int, Node]]) -> list[tuple[int, Node]]:
    """Each different node once, with the lowest rank that has it: most often there is one."""
    met: set[int] = set()
    texts: set[bytes] = set()
    found = []
    for rank, node in nodes:
        if id(node) in met:
            continue
        met.add(id(node))
        text = msgspec.json.encode(node)
        if text not in texts:
            texts.add(text)
            found.append((rank, node))
    return found


def _unite(nodes: Sequence[tuple[int, Node]], path: str, problems: list[str]) -> Node:
    first_rank, first = nodes[0]
    if all(node == first and _same_types(node, first) for _, node in nodes[1:]):
        return first
    if all(type(node) is list for _, node in nodes):
        if len({len(node) for _, node in nodes}) == 1:
            columns = zip(*(node for _, node in nodes), strict=True)
            ranks = [rank for rank, _ in nodes]
            return [
                _unite(list(zip(ranks, column, strict=True)), _join(path, str(i)), problems)
                for i, column in enumerate(columns)
            ]
    elif all(type(node) is dict and len(node) == 1 and list(node) == list(first) for _, node in nodes):
        ((tag, _),) = first.items()
        payloads = [(rank, node[tag]) for rank, node in nodes]
        if tag in _PAIRS and all(type(payload) is list for _, payload in payloads):
            return {tag: _unite_pairs(payloads, path, problems)}
        if tag in ("tuple", "registered") or (tag in ("state_dict", "stateful", "defaultdict")):
            return {tag: _unite_parts(tag, payloads, path, problems)}
    other_rank, other = next(item for item in nodes[1:] if not (item[1] == first and _same_types(item[1], first)))
    problems.append(f"{path or 'the state'}: rank {first_rank} has {_short(first)}, rank {other_rank} {_short(other)}")
    return first


def _unite_parts(tag: str, payloads: Sequence[tuple[int, Any]], path: str, problems: list[str]) -> Any:
    """Unite the rows of fixed length behind a tag; the part that holds the pairs is merged as pairs."""
    if not all(type(payload) is list for _, payload in payloads):
        raise malformed(tag, "no array")
    lengths = {len(payload) for _, payload in payloads}
    if len(lengths) != 1:
        problems.append(f"{path or 'the state'}: lengths differ over the ranks: {sorted(lengths)}")
        return payloads[0][1]
    pairs_at = {"state_dict": 0, "defaultdict": 1}.get(tag)
    parts = []
    for i in range(lengths.pop()):
        column = [(rank, payload[i]) for rank, payload in payloads]
        where = _join(path, str(i)) if tag == "tuple" else path
        parts.append(_unite_pairs(column, where, problems) if i == pairs_at else _unite(column, where, problems))
    return parts


def _unite_pairs(payloads: Sequence[tuple[int, Any]], path: str, problems: list[str]) -> list[Node]:
    keys: dict[bytes, Node] = {}
    values: dict[bytes, list[tuple[int, Node]]] = {}
    for rank, pairs in payloads:
        if type(pairs) is not list or not all(type(pair) is list and len(pair) == 2 for pair in pairs):
            raise malformed("dict", "an item is no pair")
        for key, value in pairs:
            text = msgspec.json.encode(key)
            keys.setdefault(text, key)
            values.setdefault(text, []).append((rank, value))
    return [[key, _unite(values[text], _join(path, _component_of(key)), problems)] for text, key in keys.items()]


def _same_types(a: Node, b: Node) -> bool:
    # 1 == 1.0 == True in Python, but they are different values of a state, as are 0.0 and -0.0.
    return msgspec.json.encode(a) == msgspec.json.encode(b)


def _short(node: Node) -> str:
    text = msgspec.json.encode(node).decode("utf-8")
    return text if len(text) <= 60 else f"{text[:57]}..."


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
