"""What a generation holds, by the top-level entries of its state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptfmt.cli import quantities as q
from ckptfmt.cli.output import Page, style
from ckptfmt.engine.load import names
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.reports import Report
from ckptfmt.format import tree

VALUE_LENGTH_MAX = 72
_PLAIN = {type(None): "None", bool: "bool", int: "int", float: "float", str: "str"}


@dataclass(frozen=True)
class DtypeTotal(Report):
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Entry(Report):
    """One top-level entry of a state."""

    name: str
    kind: str
    """``module Linear``, ``optimizer AdamW``, ``dict``, ``tensor``, ``int``, ..."""
    tensors: int
    """Stored tensors below it, tied ones once, those of each rank by themselves."""
    nbytes: int
    values: int
    """Plain values below it."""
    dtypes: tuple[str, ...]
    """Element types, those with most bytes first."""
    value: str | None
    """A plain value as Python writes it, cut."""


@dataclass(frozen=True)
class Contents(Report):
    """A whole state. ``nbytes`` counts every stored tensor once."""

    entries: tuple[Entry, ...]
    tensors: int
    aliases: int
    nbytes: int
    dtypes: Mapping[str, DtypeTotal]


def contents_of(opened: Opened) -> Contents:
    """Summarise a manifest; nothing else is read."""
    manifest = opened.manifest
    sizes = opened.index.tensor_bytes
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(manifest.tensors.name):
        rows.setdefault(name, []).append(row)
    totals = _by_dtype(range(len(sizes)), sizes, manifest.tensors.dtype)
    children = names.children_of(opened.common, "")
    top = [("", opened.common)] if children is None else children
    return Contents(
        entries=tuple(_entry(opened, name, node, rows, sizes) for name, node in top),
        tensors=len(sizes),
        aliases=len(manifest.aliases),
        nbytes=sum(sizes),
        dtypes=totals,
    )


def _entry(opened: Opened, name: str, node: tree.Node, rows: Mapping[str, list[int]], sizes: list[int]) -> Entry:
    aliases = opened.manifest.aliases
    own = {row for found in _tensor_names(opened, node) for row in rows.get(aliases.get(found, found), ())}
    leaves = [leaf for part in _through_slots(opened, node) for _, leaf, is_leaf in names.walk(part) if is_leaf]
    values = [leaf for leaf in leaves if not is_reference(leaf) and not is_slot(leaf)]
    return Entry(
        name=name,
        kind=kind_of(node),
        tensors=len(own),
        nbytes=sum(sizes[row] for row in own),
        values=len(values),
        dtypes=tuple(_by_dtype(sorted(own), sizes, opened.manifest.tensors.dtype)),
        value=value_text(node) if values == [node] else None,
    )


def _tensor_names(opened: Opened, node: tree.Node) -> Iterator[str]:
    for part in _through_slots(opened, node):
        for tag, name in tree.references(part):
            if tag != "per_rank":
                yield name


def _through_slots(opened: Opened, node: tree.Node) -> Iterator[tree.Node]:
    """``node``, and what every rank kept in the slots below it."""
    yield node
    for tag, slot in tree.references(node):
        if tag == "per_rank":
            for nodes in opened.manifest.trees.per_rank.values():
                if slot in nodes:
                    yield nodes[slot]


def _by_dtype(rows: Iterable[int], sizes: list[int], dtypes: list[str]) -> dict[str, DtypeTotal]:
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(dtypes[row], []).append(sizes[row])
    totals = {name: DtypeTotal(len(parts), sum(parts)) for name, parts in found.items()}
    return dict(sorted(totals.items(), key=lambda item: (-item[1].nbytes, item[0])))


# -- nodes ------------------------------------------------------------------------------------------
def tag_of(node: tree.Node) -> str:
    """The tag of a node; '' for what stands for itself."""
    return next(iter(node)) if isinstance(node, dict) and len(node) == 1 else ""


def is_reference(node: tree.Node) -> bool:
    return tag_of(node) in tree.REFERENCE_TAGS


def is_slot(node: tree.Node) -> bool:
    return tag_of(node) == "per_rank"


def kind_of(node: tree.Node) -> str:
    """What a node was in Python, in a word or two."""
    if isinstance(node, list):
        return "list"
    tag = tag_of(node)
    if tag == "stateful":
        kind, type_name = node[tag][0], node[tag][1]
        return f"{kind} {str(type_name).rpartition('.')[2]}"
    if tag == "registered":
        return str(node[tag][0])
    if tag in ("stored_bytes", "stored_bytearray"):
        return tag.removeprefix("stored_")
    return {"odict": "OrderedDict", "counter": "Counter", "per_rank": "per rank", "array": "numpy array"}.get(
        tag, tag
    ) or _PLAIN.get(type(node), type(node).__name__)


def value_text(node: tree.Node) -> str:
    """A node without tensors as Python writes its value, cut to one short line."""
    return cut(repr(tree.decode(node, lambda tag, payload: tree.Foreign(tag, payload), lenient=True)))


def cut(text: str, length: int = VALUE_LENGTH_MAX) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def json_value(value: Any) -> Any:
    """A Python value as JSON: what JSON has stays as it is, everything else becomes its ``repr``."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value - value == 0.0 else repr(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return repr(value)


def show_contents(page: Page, contents: Contents, *, limit: int | None = None, indent: int = 2) -> None:
    """A table of the entries; with ``limit`` the small ones are summed up."""
    entries, rest = list(contents.entries), []
    if limit is not None and len(entries) > limit:
        largest = sorted(range(len(entries)), key=lambda i: -entries[i].nbytes)[: limit - 1]
        rest = [entry for i, entry in enumerate(entries) if i not in largest]
        entries = [entries[i] for i in sorted(largest)]
    rows = [
        (
            style(entry.name or "(the state)", "bold"),
            entry.kind,
            f"{entry.tensors:,}" if entry.tensors else q.ABSENT,
            q.size(entry.nbytes) if entry.tensors else q.ABSENT,
            _described(entry),
        )
        for entry in entries
    ]
    if rest:
        tensors, nbytes = sum(entry.tensors for entry in rest), sum(entry.nbytes for entry in rest)
        rows.append((f"{q.count(len(rest), 'more entry', 'more entries')}", "", f"{tensors:,}", q.size(nbytes), ""))
    page.table(("ENTRY", "KIND", ">TENSORS", ">SIZE", ""), rows, indent)


def _described(entry: Entry) -> str:
    if entry.value is not None:
        return f"= {cut(entry.value, 48)}"
    parts = [", ".join(entry.dtypes[:4]) + (", ..." if len(entry.dtypes) > 4 else "")]
    if entry.values:
        parts.append(q.count(entry.values, "value"))
    return " + ".join(part for part in parts if part)
