"""What differs between two checkpoints of which at least one is of another tool: all bytes are read."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ckptfmt.cli import quantities as q
from ckptfmt.cli.comparison import ValueChange
from ckptfmt.cli.contents import cut
from ckptfmt.cli.foreign_place import foreign_path
from ckptfmt.cli.output import Page, style
from ckptfmt.cli.places import opened_place
from ckptfmt.cli.tree_values import leaves_of
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.reports import Report
from ckptfmt.exchange.foreign import open_foreign
from ckptfmt.exchange.foreign_torch import tree_text
from ckptfmt.exchange.generation_source import every_tensor
from ckptfmt.exchange.pieces import SourceTensor

LINES = 40


@dataclass(frozen=True)
class ForeignSide(Report):
    """One of the two. ``kind`` is ``generation`` for one of ours."""

    url: str
    kind: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class ForeignChange(Report):
    """One tensor. Old or new facts are None where it is not there."""

    name: str
    change: str
    """``added``, ``removed``, ``dtype``, ``shape``, ``bytes`` or ``unchanged``."""
    old_dtype: str | None
    new_dtype: str | None
    old_shape: tuple[int, ...] | None
    new_shape: tuple[int, ...] | None
    first_difference: int | None
    """Offset of the first byte that differs, in C order."""


@dataclass(frozen=True)
class ForeignComparison(Report):
    """The two. ``counts`` has the number of tensors by kind of change."""

    report: str
    old: ForeignSide
    new: ForeignSide
    equal: bool
    counts: dict[str, int]
    tensors: tuple[ForeignChange, ...]
    values: tuple[ValueChange, ...]
    unchanged_values: int


@dataclass(frozen=True)
class _Contents:
    side: ForeignSide
    tensors: Mapping[str, SourceTensor]
    values: Mapping[str, str]


@contextmanager
def _contents(url: str, path: Path | None, arguments: Namespace) -> Iterator[_Contents]:
    if path is None:
        with opened_place(arguments, url=url) as place:
            yield _of_generation(place.open(), url)
        return
    with open_foreign(path) as foreign:
        side = ForeignSide(str(foreign.path), foreign.kind, len(foreign.tensors), foreign.nbytes)
        yield _Contents(side, foreign.tensors, foreign.value_texts())


def _of_generation(opened: Opened, url: str) -> _Contents:
    tensors = every_tensor(opened)
    values = {
        path: tree_text(msgspec.json.decode(leaf.node))
        for path, leaf in leaves_of(opened, metadata=False).items()
        if leaf.is_value
    }
    return _Contents(ForeignSide(url, "generation", len(tensors), opened.manifest.nbytes), tensors, values)


def compare_foreign(arguments: Namespace, other: str) -> ForeignComparison:
    """Compare ``arguments.url`` with ``other``, names by names and byte by byte."""
    one = arguments.url
    with (
        _contents(one, foreign_path(one), arguments) as old,
        _contents(other, foreign_path(other), arguments) as new,
    ):
        names = [*new.tensors, *(name for name in old.tensors if name not in new.tensors)]
        tensors = tuple(_change(name, old.tensors.get(name), new.tensors.get(name)) for name in names)
        paths = [*new.values, *(path for path in old.values if path not in new.values)]
        pairs = [(path, old.values.get(path), new.values.get(path)) for path in paths]
        values = tuple(ValueChange(path, _cut(a), _cut(b)) for path, a, b in pairs if a != b)
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.change] = counts.get(tensor.change, 0) + 1
    equal = not values and not counts.keys() - {"unchanged"}
    return ForeignComparison(
        "diff.foreign", old.side, new.side, equal, counts, tensors, values, len(pairs) - len(values)
    )


def _cut(text: str | None) -> str | None:
    return None if text is None else cut(text)


def _change(name: str, old: SourceTensor | None, new: SourceTensor | None) -> ForeignChange:
    first = None
    if old is None or new is None:
        change = "added" if old is None else "removed"
    elif old.dtype != new.dtype:
        change = "dtype"
    elif old.shape != new.shape:
        change = "shape"
    else:
        first = first_difference(old, new)
        change = "unchanged" if first is None else "bytes"
    return ForeignChange(
        name=name,
        change=change,
        old_dtype=None if old is None else old.dtype,
        new_dtype=None if new is None else new.dtype,
        old_shape=None if old is None else old.shape,
        new_shape=None if new is None else new.shape,
        first_difference=first,
    )


def first_difference(old: SourceTensor, new: SourceTensor) -> int | None:
    """Offset of the first byte in which two tensors of one type and shape differ. Pieces may be cut differently."""
    ours, theirs = old.pieces(), new.pieces()
    a = b = memoryview(b"")
    done = 0
    while done < old.nbytes:
        a, b = a or next(ours), b or next(theirs)
        count = min(a.nbytes, b.nbytes)
        same = np.frombuffer(a[:count], np.uint8) == np.frombuffer(b[:count], np.uint8)
        if not same.all():
            return done + int(same.argmin())
        a, b, done = a[count:], b[count:], done + count
    return None


def show_foreign_comparison(page: Page, report: ForeignComparison, *, unchanged: bool) -> None:
    for label, side in (("old", report.old), ("new", report.new)):
        page.line(
            style(f"{label}  {side.url}", "bold"),
            f", {side.kind}, {q.count(side.tensors, 'tensor')}, {q.size(side.nbytes)}",
        )
    page.blank()
    parts = [f"{count:,} {change}" for change, count in sorted(report.counts.items())]
    page.line(f"{q.count(len(report.tensors), 'tensor')}: {', '.join(parts) or 'none'}")
    shown = [one for one in report.tensors if unchanged or one.change != "unchanged"]
    if shown:
        page.table(("TENSOR", "CHANGE", ""), [(one.name, one.change, _told(one)) for one in shown[:LINES]], indent=2)
    if len(shown) > LINES:
        page.line(style(f"  and {len(shown) - LINES} more: --json", "dim"))
    if report.values:
        page.blank()
        rows = [(value.path, value.old or "", "->", value.new or "") for value in report.values[:LINES]]
        page.table(("VALUE", "OLD", "", "NEW"), rows, indent=2)
    if report.equal:
        page.line(style("the two hold the same tensors and values", "green"))


def _told(one: ForeignChange) -> str:
    if one.change == "dtype":
        return f"{one.old_dtype} -> {one.new_dtype}"
    if one.change == "shape":
        return f"{q.shape(one.old_shape or ())} -> {q.shape(one.new_shape or ())}"
    if one.change == "bytes":
        return f"from byte {one.first_difference:,} on"
    return f"{one.new_dtype or one.old_dtype} {q.shape(one.new_shape or one.old_shape or ())}"
