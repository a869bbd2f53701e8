"""What changed between two generations: tensors by digest, plain values by value. No pack is read."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfmt.cli import quantities as q
from ckptfmt.cli.output import Page, style
from ckptfmt.cli.tree_values import Leaf, leaves_of
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.reports import GenerationInfo, Report
from ckptfmt.errors import InvalidInput
from ckptfmt.format.checksum import HEX_DIGITS
from ckptfmt.reference import parse_reference

LINES = 40


@dataclass(frozen=True)
class Side(Report):
    """One of the two generations."""

    url: str
    id: int
    run: str
    step: int
    key: str
    nbytes: int


@dataclass(frozen=True)
class TensorChange(Report):
    """One tensor. ``rank`` is -1 unless each rank keeps its own. Old or new facts are None where it is not there."""

    name: str
    rank: int
    change: str
    """``added``, ``removed``, ``dtype``, ``shape``, ``bytes``, ``boxes`` (stored in other boxes: digests cannot tell)
    or ``unchanged``."""
    old_dtype: str | None
    new_dtype: str | None
    old_shape: tuple[int, ...] | None
    new_shape: tuple[int, ...] | None
    old_nbytes: int | None
    new_nbytes: int | None
    chunks: int
    """Chunks of the new one."""
    changed_chunks: int | None
    """How many of them differ; None where digests cannot tell."""


@dataclass(frozen=True)
class ValueChange(Report):
    """One plain value, or the kind of a container, at a dotted path. None: it is not there."""

    path: str
    old: str | None
    new: str | None


@dataclass(frozen=True)
class Comparison(Report):
    """Two generations. ``counts`` has the number of tensors by kind of change."""

    report: str
    old: Side
    new: Side
    equal: bool
    counts: dict[str, int]
    tensors: tuple[TensorChange, ...]
    values: tuple[ValueChange, ...]
    unchanged_values: int


def absolute(new: str, old: str) -> str:
    """``@id`` and ``#run@id`` stand for the repository, and run, of the other reference."""
    reference = parse_reference(old)
    if new.startswith("@"):
        if reference.run is None:
            raise InvalidInput(f"{new!r} needs a run: write {old}#<run>@<id> first, or #<run>{new}")
        return f"{reference.url}#{reference.run}{new}"
    return f"{reference.url}{new}" if new.startswith("#") else new


def compare(old: Opened, new: Opened) -> Comparison:
    """Compare manifests."""
    tensors = _compare_tensors(old, new)
    before, after = leaves_of(old), leaves_of(new)
    values = _compare_values(before, after)
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.change] = counts.get(tensor.change, 0) + 1
    return Comparison(
        report="diff",
        old=_side(old),
        new=_side(new),
        equal=not values and all(tensor.change == "unchanged" for tensor in tensors),
        counts=counts,
        tensors=tensors,
        values=values,
        unchanged_values=sum(1 for path, leaf in after.items() if leaf.is_value and before.get(path) == leaf),
    )


def _side(opened: Opened) -> Side:
    info: GenerationInfo = opened.info
    root = opened.site.backend.url.rstrip("/")
    url = f"{root}/{opened.folder}" if opened.folder else root
    return Side(url, info.id, info.run, info.step, info.key, opened.manifest.nbytes)


# -- tensors ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Stored:
    """A row of a manifest: what it takes to tell two tensors apart."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    digests: tuple[str, ...]
    nbytes: int

    @property
    def chunks(self) -> int:
        return sum(len(text) // HEX_DIGITS for text in self.digests)


def _stored(opened: Opened) -> dict[tuple[str, int], _Stored]:
    """Rows by (name, rank); tied names stand for the tensor that they are tied to."""
    manifest, sizes = opened.manifest, opened.index.tensor_bytes
    table, boxes = manifest.tensors, manifest.boxes
    parts: list[list[int]] = [[] for _ in table.name]
    for number, row in enumerate(boxes.tensor):
        parts[row].append(number)
    found = {}
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(table.name):
        rows.setdefault(name, []).append(row)
    for name in [*rows, *manifest.aliases]:
        for row in rows[manifest.aliases.get(name, name)]:
            extents = tuple((tuple(boxes.start[j]), tuple(boxes.size[j])) for j in parts[row])
            digests = tuple(boxes.digests[j] for j in parts[row])
            shape = tuple(table.shape[row])
            found[name, table.rank[row]] = _Stored(table.dtype[row], shape, extents, digests, sizes[row])
    return found


def _compare_tensors(old: Opened, new: Opened) -> tuple[TensorChange, ...]:
    before, after = _stored(old), _stored(new)
    rules = [(side.manifest.chunk_bytes, side.manifest.digest_algorithm) for side in (old, new)]
    same_chunks = rules[0] == rules[1]
    names = [*after, *(key for key in before if key not in after)]
    return tuple(
        _change(name, rank, before.get((name, rank)), after.get((name, rank)), same_chunks) for name, rank in names
    )


def _change(name: str, rank: int, old: _Stored | None, new: _Stored | None, same_chunks: bool) -> TensorChange:
    changed: int | None = None
    if old is None or new is None:
        change = "added" if old is None else "removed"
    elif old.dtype != new.dtype:
        change = "dtype"
    elif old.shape != new.shape:
        change = "shape"
    elif old.boxes != new.boxes or not same_chunks:
        change = "boxes"
    else:
        changed = sum(_changed_chunks(a, b) for a, b in zip(old.digests, new.digests, strict=True))
        change = "bytes" if changed else "unchanged"
    return TensorChange(
        name=name,
        rank=rank,
        change=change,
        old_dtype=None if old is None else old.dtype,
        new_dtype=None if new is None else new.dtype,
        old_shape=None if old is None else old.shape,
        new_shape=None if new is None else new.shape,
        old_nbytes=None if old is None else old.nbytes,
        new_nbytes=None if new is None else new.nbytes,
        chunks=0 if new is None else new.chunks,
        changed_chunks=changed,
    )


def _changed_chunks(old: str, new: str) -> int:
    if old == new:
        return 0
    return sum(old[at : at + HEX_DIGITS] != new[at : at + HEX_DIGITS] for at in range(0, len(new), HEX_DIGITS))


# -- values -----------------------------------------------------------------------------------------
def _compare_values(old: dict[str, Leaf], new: dict[str, Leaf]) -> tuple[ValueChange, ...]:
    paths = [*new, *(path for path in old if path not in new)]
    changes = []
    for path in paths:
        before, after = old.get(path), new.get(path)
        if before == after or _is_tensor_story(before, after):
            continue
        changes.append(
            ValueChange(path, None if before is None else before.text, None if after is None else after.text)
        )
    return tuple(changes)


def _is_tensor_story(old: Leaf | None, new: Leaf | None) -> bool:
    """A tensor that came, went or changed stands among the tensors already."""
    return all(leaf is None or leaf.is_tensor for leaf in (old, new)) and (old is None or new is None)


# -- page -------------------------------------------------------------------------------------------
_STYLES = {"added": "green", "removed": "red", "unchanged": "dim"}


def show_comparison(page: Page, report: Comparison, *, unchanged: bool) -> None:
    for label, side in (("old", report.old), ("new", report.new)):
        page.line(
            style(f"{label}  #{side.id} of run {side.run}, step {side.step}", "bold"),
            f", {q.size(side.nbytes)}  ",
            style(side.key, "dim"),
        )
    shown = [t for t in report.tensors if unchanged or t.change != "unchanged"]
    page.blank()
    page.line(_counted(report))
    if shown:
        page.table(("TENSOR", "CHANGE", ">SIZE", ""), map(_tensor_row, shown[: None if unchanged else LINES]), indent=2)
    if not unchanged and len(shown) > LINES:
        page.line(style(f"  and {len(shown) - LINES} more: --json", "dim"))
    if report.values:
        page.blank()
        page.line(f"{q.count(len(report.values), 'value')} changed, {report.unchanged_values:,} did not:")
        rows = [
            (value.path or "(the state)", value.old or "", "->", value.new or "") for value in report.values[:LINES]
        ]
        page.table(("VALUE", "OLD", "", "NEW"), rows, indent=2)
        if len(report.values) > LINES:
            page.line(style(f"  and {len(report.values) - LINES} more: --json", "dim"))
    elif report.unchanged_values:
        page.line(f"{q.count(report.unchanged_values, 'value')}, none changed")
    if report.equal:
        page.line(style("the two hold the same state", "green"))


def _counted(report: Comparison) -> str:
    order = ("bytes", "dtype", "shape", "boxes", "added", "removed", "unchanged")
    words = {"bytes": "changed", "dtype": "of another dtype", "shape": "of another shape", "boxes": "in other boxes"}
    parts = [f"{report.counts[kind]:,} {words.get(kind, kind)}" for kind in order if report.counts.get(kind)]
    return f"{q.count(len(report.tensors), 'tensor')}: {', '.join(parts) or 'none'}"


def _tensor_row(tensor: TensorChange) -> tuple[str, str, str, str]:
    name = tensor.name if tensor.rank < 0 else f"{tensor.name} (rank {tensor.rank})"
    size = tensor.old_nbytes if tensor.new_nbytes is None else tensor.new_nbytes
    described = {
        "dtype": f"{tensor.old_dtype} -> {tensor.new_dtype}",
        "shape": f"{q.shape(tensor.old_shape or ())} -> {q.shape(tensor.new_shape or ())}",
        "bytes": f"{tensor.changed_chunks:,} of {q.count(tensor.chunks, 'chunk')}" if tensor.changed_chunks else "",
        "boxes": "stored in other boxes or chunks: digests cannot tell",
    }.get(
        tensor.change, f"{tensor.new_dtype or tensor.old_dtype} {q.shape(tensor.new_shape or tensor.old_shape or ())}"
    )
    return name, style(tensor.change, _STYLES.get(tensor.change, "yellow")), q.size(size), described
