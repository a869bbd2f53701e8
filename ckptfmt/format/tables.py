"""The columns that manifests and parts share: tensors, boxes, packs. Whole-table validation.

One list per attribute: 20,000 tensors decode several times faster than with an object for each.
See spec/format-v1.md, "Manifest".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import repeat
from math import prod
from operator import mul
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from ckptfmt.errors import FormatError
from ckptfmt.format import boxes as geometry
from ckptfmt.format.alike import Alike
from ckptfmt.format.checksum import HEX_DIGITS
from ckptfmt.format.dtypes import dtype
from ckptfmt.format.layout import validate_generation_key, validate_plain_name
from ckptfmt.format.naming import NAMED_MAX, shown
from ckptfmt.format.pack import ALIGNMENT, HEADER_BYTES_MAX
from ckptfmt.format.verdict import Count, Hex128, Positive

Kind = Literal["replicated", "sharded", "per_rank"]
Extent = tuple[Count, ...]
Row = Annotated[int, msgspec.Meta(ge=-1, le=2**31)]

DIMENSIONS_MAX: Final = 64
BYTES_MAX: Final = 2**62
CORNERS: Final = [(0,) * dimensions for dimensions in range(DIMENSIONS_MAX + 1)]
"""Where a box that is all of its tensor starts, by number of dimensions."""


class TensorTable(msgspec.Struct):
    """Row i is one tensor: its kind, the rank it belongs to (-1 unless ``per_rank``), element type and global shape."""

    name: list[str] = []
    kind: list[Kind] = []
    rank: list[Row] = []
    dtype: list[str] = []
    shape: list[Extent] = []


class BoxTable(msgspec.Struct):
    """Row j is one stored box of tensor row ``tensor[j]``, rows of one tensor side by side.

    ``start`` and ``size`` are in elements; ``offset`` is absolute, in bytes, in pack row ``pack[j]``;
    ``digests`` are the chunk digests' hex, joined.
    """

    tensor: list[Row] = []
    start: list[Extent] = []
    size: list[Extent] = []
    pack: list[Row] = []
    offset: list[Count] = []
    digests: list[str] = []


class ClaimTable(msgspec.Struct):
    """Row j is a box that a rank holds but does not write: a replica, to be compared by digest."""

    tensor: list[Row] = []
    start: list[Extent] = []
    size: list[Extent] = []
    digests: list[str] = []


class PackRow(msgspec.Struct, frozen=True, kw_only=True):
    """One pack: name within its generation's folder, writing rank, sizes in bytes, digest of the header.

    ``generation`` is None for a pack of the manifest's own folder, else the key of another
    generation of the same run.
    """

    name: str
    rank: Count
    nbytes: Positive
    header_bytes: Positive
    header_digest: Hex128
    generation: Hex128 | None = None


class BoxSizes(NamedTuple):
    """Bytes of each box, and whether every tensor has exactly one box, which is all of it."""

    nbytes: list[int]
    whole: bool


def check_tensors(tensors: TensorTable, distinct: int, what: str) -> list[int]:
    """Check the tensor rows, which have ``distinct`` different names; return the bytes of each tensor."""
    count = len(tensors.name)
    if any(len(column) != count for column in (tensors.kind, tensors.rank, tensors.dtype, tensors.shape)):
        raise FormatError(f"{what}: the columns of its tensors differ in length")
    if tensors.rank.count(-1) == count and "per_rank" not in set(tensors.kind):
        if distinct != count:
            raise FormatError(f"{what}: tensor {_first_twice(tensors)} stands twice")
    else:
        _check_owners(tensors, what)
    if max(map(len, tensors.shape), default=0) > DIMENSIONS_MAX:
        raise FormatError(f"{what}: a tensor has more than {DIMENSIONS_MAX} dimensions")
    sizes = list(map(mul, map(prod, tensors.shape), itemsizes(tensors)))
    if 0 in sizes:
        for shape, nbytes in zip(tensors.shape, sizes, strict=True):
            if nbytes == 0 and prod(n for n in shape if n) > BYTES_MAX:
                raise FormatError(f"{what}: an empty tensor has the absurd shape {list(shape)[:8]}")
    if sum(sizes) > BYTES_MAX:
        raise FormatError(f"{what}: its tensors claim {sum(sizes)} bytes")
    return sizes


def itemsizes(tensors: TensorTable) -> Iterator[int]:
    """Bytes of one element of each tensor. ``FormatError`` for an unknown element type."""
    widths = {name: dtype(name).itemsize for name in set(tensors.dtype)}
    return map(widths.__getitem__, tensors.dtype)


def _check_owners(tensors: TensorTable, what: str) -> None:
    """Check that name and rank together are unique, and that exactly the tensors of kind per_rank belong to a rank."""
    if len(set(zip(tensors.name, tensors.rank, strict=True))) != len(tensors.name):
        raise FormatError(f"{what}: tensor {_first_twice(tensors)} stands twice")
    own = [kind == "per_rank" for kind in tensors.kind]
    if own != [rank >= 0 for rank in tensors.rank]:
        raise FormatError(f"{what}: exactly the tensors of kind per_rank belong to a rank")
    per_rank = {name for name, is_own in zip(tensors.name, own, strict=True) if is_own}
    common = {name for name, is_own in zip(tensors.name, own, strict=True) if not is_own}
    if per_rank & common:
        raise FormatError(f"{what}: tensor {min(per_rank & common)!r} is both per_rank and common to all ranks")


def _first_twice(tensors: TensorTable) -> str:
    seen: set[tuple[str, int]] = set()
    for row in zip(tensors.name, tensors.rank, strict=True):
        if row in seen:
            return repr(row[0])
        seen.add(row)
    return "?"


def check_packs(packs: Sequence[PackRow], what: str) -> None:
    """Check pack rows: plain, unique names and headers that fit."""
    seen = set()
    for pack in packs:
        validate_plain_name(pack.name)
        if pack.generation is not None:
            validate_generation_key(pack.generation)
        if pack.header_bytes > min(pack.nbytes, HEADER_BYTES_MAX + ALIGNMENT):
            raise FormatError(f"{what}: pack {pack.name} has a header of {pack.header_bytes} of {pack.nbytes} bytes")
        if (pack.generation, pack.name) in seen:
            raise FormatError(f"{what}: pack {pack.name} stands twice")
        seen.add((pack.generation, pack.name))


def check_boxes(
    tensors: TensorTable,
    boxes: BoxTable | ClaimTable,
    tensor_bytes: list[int],
    chunk_bytes: int,
    what: str,
    *,
    tiled: bool = False,
) -> BoxSizes:
    """Check rows of boxes or claims against their tensors, whose bytes are known. If they are to be ``tiled``, whether
    those that are no whole tensors lie inside of theirs is left to ``check_tilings``."""
    whole = _check_rows(tensors, boxes, what) and boxes.size == tensors.shape
    if whole or not tiled:
        _check_fit(tensors, boxes, what)
    sizes = tensor_bytes if whole else _box_bytes(tensors, boxes)
    _check_digests(tensors, boxes, sizes, chunk_bytes, what)
    return BoxSizes(sizes, whole)


def check_places(tensors: TensorTable, boxes: BoxTable | ClaimTable, what: str) -> None:
    """Check rows of boxes or claims against their tensors, but for digests."""
    _check_rows(tensors, boxes, what)
    _check_fit(tensors, boxes, what)


def _check_rows(tensors: TensorTable, boxes: BoxTable | ClaimTable, what: str) -> bool:
    """Check that rows name tensors, in order; return whether there is just one for each."""
    count, at = len(boxes.tensor), boxes.tensor
    if any(len(column) != count for column in (boxes.start, boxes.size, boxes.digests)):
        raise FormatError(f"{what}: the columns of its boxes differ in length")
    one_each = count == len(tensors.name) and at == list(range(count))
    if not one_each and at and (min(at) < 0 or max(at) >= len(tensors.name) or at != sorted(at)):
        raise FormatError(f"{what}: boxes must name existing tensors, in the order of the tensors")
    _check_dimensions(tensors, boxes, what)
    return one_each


def _check_dimensions(tensors: TensorTable, boxes: BoxTable | ClaimTable, what: str) -> None:
    """Check that boxes have as many dimensions as their tensors, before anybody multiplies what may be a million."""
    of = list(map(len, tensors.shape))
    expected = list(map(of.__getitem__, boxes.tensor))
    for word, column in (("start", boxes.start), ("size", boxes.size)):
        found = list(map(len, column))
        if found != expected:
            i = next(i for i in range(len(found)) if found[i] != expected[i])
            row = boxes.tensor[i]
            raise FormatError(
                f"{what}: tensor {tensors.name[row]!r}: a box has a {word} of {found[i]} numbers, not one for each of "
                f"the {of[row]} dimensions of the shape {list(tensors.shape[row])}"
            )


SEVERAL: Final = 4
"""With so many boxes for each tensor, on average, it pays to look at those of one tensor together: layers are alike."""


def runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (row, first, last) of each run of equal numbers in an ascending column."""
    first = 0
    while first < len(rows):
        last = bisect_right(rows, rows[first], first)
        yield rows[first], first, last
        first = last


def _box_bytes(tensors: TensorTable, boxes: BoxTable | ClaimTable) -> list[int]:
    """Bytes of each box."""
    widths, at = list(itemsizes(tensors)), boxes.tensor
    if len(at) < SEVERAL * len(widths):
        return list(map(mul, map(prod, boxes.size), map(widths.__getitem__, at)))
    found: list[int] = []
    bytes_of = Alike(_bytes_of_run)
    for row, first, last in runs(at):
        found += bytes_of((widths[row], boxes.size[first:last]))
    return found


def _bytes_of_run(run: tuple[int, list[Extent]]) -> list[int]:
    width, sizes = run
    if sizes.count(sizes[0]) == len(sizes):  # equal shares
        return [prod(sizes[0]) * width] * len(sizes)
    return list(map(mul, map(prod, sizes), repeat(width)))


def _check_fit(tensors: TensorTable, boxes: BoxTable | ClaimTable, what: str) -> None:
    at = boxes.tensor
    alike = len(at) == len(tensors.name) and at == list(range(len(at)))
    shapes = tensors.shape if alike else list(map(tensors.shape.__getitem__, at))
    if boxes.size == shapes and boxes.start == list(map(CORNERS.__getitem__, map(len, shapes))):
        return
    for shape, start, size in set(zip(shapes, boxes.start, boxes.size, strict=True)):
        if geometry.misfit(shape, start, size) is not None:
            break
    else:
        return
    for i, start, size, shape in zip(boxes.tensor, boxes.start, boxes.size, shapes, strict=True):
        reason = geometry.misfit(shape, start, size)
        if reason is not None:
            raise FormatError(f"{what}: tensor {tensors.name[i]!r}: {reason}")


def _check_digests(
    tensors: TensorTable, boxes: BoxTable | ClaimTable, sizes: Sequence[int], chunk_bytes: int, what: str
) -> None:
    one_each = min(sizes, default=0) > 0 and max(sizes) <= chunk_bytes
    if not one_each or set(map(len, boxes.digests)) != {HEX_DIGITS}:
        expected = [-(-nbytes // chunk_bytes) * HEX_DIGITS for nbytes in sizes]
        for i, digests, digits in zip(boxes.tensor, boxes.digests, expected, strict=True):
            if len(digests) != digits:
                raise FormatError(
                    f"{what}: tensor {tensors.name[i]!r}: {len(digests)} hex digits are not the digests "
                    f"of {digits // HEX_DIGITS} chunks"
                )
    if "".join(boxes.digests).encode("utf-8").translate(None, b"0123456789abcdef"):
        raise FormatError(f"{what}: a digest holds other characters than lower-case hex digits")


_Case = tuple[Extent, list[Extent], list[Extent]]
"""A shape, and where its boxes start, and their sizes."""


def check_tilings(tensors: TensorTable, boxes: BoxTable, packs: Sequence[PackRow], what: str) -> None:
    """Check that the boxes of every tensor hold each of its elements exactly once."""
    fault = Alike(_untiled)
    first = 0
    for row, shape in enumerate(tensors.shape):
        last = bisect_right(boxes.tensor, row, first)
        starts, sizes = boxes.start[first:last], boxes.size[first:last]
        reason = fault((shape, starts, sizes))
        if reason is not None:
            writers = [packs[pack].rank for pack in boxes.pack[first:last]]
            raise FormatError(
                f"{what}: tensor {tensors.name[row]!r}: {reason}{_by_whom(shape, starts, sizes, writers)}"
            )
        first = last


def _untiled(case: _Case) -> str | None:
    if _are_slabs(*case):
        return None
    tiling = geometry.check_tiling(case[0], list(zip(case[1], case[2], strict=True)))
    return tiling.reason or ("a box is stored twice" if tiling.replicas else None)


def _are_slabs(shape: Extent, starts: Sequence[Extent], sizes: Sequence[Extent]) -> bool:
    """Whether the boxes cut a tensor along its first dimension only, and stand in this order: by far the most common
    layout, which needs no search. False also where that can't be told."""
    dimensions = len(shape)
    if not dimensions or not starts or {*map(len, starts), *map(len, sizes)} != {dimensions}:
        return False
    corner, rest = CORNERS[dimensions - 1], shape[1:]
    at = 0
    for start, size in zip(starts, sizes, strict=True):
        if start[0] != at or start[1:] != corner or size[1:] != rest or not size[0]:
            return False
        at += size[0]
    return at == shape[0]


def _by_whom(shape: Extent, starts: Sequence[Extent], sizes: Sequence[Extent], writers: Sequence[int]) -> str:
    """Name the ranks that wrote the first two boxes that overlap, or else all boxes."""
    if len(set(writers)) < 2:
        return ""
    rows = sorted(zip(starts, sizes, writers, strict=True))[: geometry.IRREGULAR_MAX]
    fit = [row for row in rows if geometry.misfit(shape, row[0], row[1]) is None]
    for i, (start, size, writer) in enumerate(fit):
        for other_start, other_size, other in fit[:i]:
            if geometry.intersect((start, size), (other_start, other_size)) is not None:
                return f"; ranks {other} and {writer} wrote boxes that overlap"
    boxes = [f"{list(start)}+{list(size)} by rank {writer}" for start, size, writer in rows[:NAMED_MAX]]
    return f"; written: {shown(boxes, len(rows))}"


def check_aliases(names: Container[str], aliases: Mapping[str, str], what: str) -> None:
    """Check that each alias is of one of ``names``, those of the stored tensors, and none of them itself."""
    for other, name in aliases.items():
        if name not in names:
            raise FormatError(f"{what}: {other!r} is an alias of {name!r}, which does not exist")
        if other in names:
            raise FormatError(f"{what}: {other!r} is both a tensor and an alias of {name!r}")
