"""Where boxes lie in packs: each in the data, and no two of them on one byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, islice, pairwise
from operator import add, le, not_
from typing import NoReturn

from ckptfmt.errors import FormatError
from ckptfmt.format import tables
from ckptfmt.format.tables import BoxTable, PackRow, TensorTable, runs


def check_extents(
    tensors: TensorTable, boxes: BoxTable, sizes: Sequence[int], packs: Sequence[PackRow], what: str
) -> None:
    """Check that every box's bytes lie in its pack's data, and that no two boxes share a byte."""
    if len(boxes.pack) != len(sizes) or len(boxes.offset) != len(sizes):
        raise FormatError(f"{what}: the columns of its boxes differ in length")
    if boxes.pack and (min(boxes.pack) < 0 or max(boxes.pack) >= len(packs)):
        raise FormatError(f"{what}: a box names a pack that does not exist")
    if not _lie_apart(boxes, sizes, packs):
        _explain_extents(tensors, boxes, sizes, packs, what)


def _lie_apart(boxes: BoxTable, sizes: Sequence[int], packs: Sequence[PackRow]) -> bool:
    """Whether all boxes lie in the data of their packs, none overlapping another. Columns only, no row at a time."""
    starts: Sequence[int] = boxes.offset
    at: Sequence[int] = boxes.pack
    stops = list(map(add, starts, sizes))
    if 0 in sizes:  # empty boxes share nothing, but lie in the data, too
        for pack, offset in zip(compress(at, map(not_, sizes)), compress(starts, map(not_, sizes)), strict=True):
            if not packs[pack].header_bytes <= offset <= packs[pack].nbytes:
                return False
        starts, stops, at = list(compress(starts, sizes)), list(compress(stops, sizes)), list(compress(at, sizes))
    if len(packs) == 1:
        return _lie_in(packs[0], sorted(starts), sorted(stops))
    several = len(starts) == len(boxes.tensor) and len(starts) >= tables.SEVERAL * len(set(boxes.tensor))
    if several and _lie_in_stretches(boxes, starts, stops, packs):
        return True
    first: list[list[int]] = [[] for _ in packs]
    last: list[list[int]] = [[] for _ in packs]
    for pack, start, stop in zip(at, starts, stops, strict=True):
        first[pack].append(start)
        last[pack].append(stop)
    return all(_lie_in(pack, sorted(first[i]), sorted(last[i])) for i, pack in enumerate(packs))


_Stretch = tuple[int, int]
"""Where the first of several boxes begins in a pack, and where the last one ends."""


def _lie_in_stretches(boxes: BoxTable, starts: Sequence[int], stops: Sequence[int], packs: Sequence[PackRow]) -> bool:
    """Whether tensors that lie in the same packs, taken together, lie apart there, and in other stretches of the packs
    than all others do. False also where that can't be told."""
    stretches: list[list[_Stretch]] = [[] for _ in packs]
    for their, first_of, last_of in _in_the_same(boxes, starts, stops):
        found = _stretches(first_of, last_of)
        if found is None:
            return False
        for pack, stretch in zip(their, found, strict=True):
            stretches[pack].append(stretch)
    return all(
        _lie_in(pack, sorted([start for start, _ in mine]), sorted([stop for _, stop in mine]))
        for pack, mine in zip(packs, stretches, strict=True)
    )


_Rows = list[Sequence[int]]


def _in_the_same(
    boxes: BoxTable, starts: Sequence[int], stops: Sequence[int]
) -> Iterator[tuple[Sequence[int], _Rows, _Rows]]:
    """Yield the packs of tensors that follow one another and lie in the same ones, and for each tensor where its boxes
    begin there, and where they end."""
    packs: Sequence[int] = ()
    first_of: _Rows = []
    last_of: _Rows = []
    for _, first, last in runs(boxes.tensor):
        mine = boxes.pack[first:last]
        if mine != packs:
            if first_of:
                yield packs, first_of, last_of
            packs, first_of, last_of = mine, [], []
        first_of.append(starts[first:last])
        last_of.append(stops[first:last])
    if first_of:
        yield packs, first_of, last_of


def _stretches(first_of: _Rows, last_of: _Rows) -> Sequence[_Stretch] | None:
    """The stretch that the boxes take in each pack, or None if two overlap in one of them."""
    if all(all(map(le, ends, begins)) for ends, begins in zip(last_of, islice(first_of, 1, None), strict=False)):
        return list(zip(first_of[0], last_of[-1], strict=True))  # one tensor behind the other, in every pack
    if all(row.count(row[0]) == len(row) for row in (*first_of, *last_of)):  # all packs are alike
        found = _stretch(sorted([row[0] for row in first_of]), sorted([row[0] for row in last_of]))
        return None if found is None else [found] * len(first_of[0])
    columns = zip(zip(*first_of, strict=True), zip(*last_of, strict=True), strict=True)
    each = [_stretch(sorted(begins), sorted(ends)) for begins, ends in columns]
    known = [stretch for stretch in each if stretch is not None]
    return known if len(known) == len(each) else None


def _stretch(starts: Sequence[int], stops: Sequence[int]) -> _Stretch | None:
    return (starts[0], stops[-1]) if _are_apart(starts, stops) else None


def _lie_in(pack: PackRow, starts: Sequence[int], stops: Sequence[int]) -> bool:
    """Whether boxes with these (sorted) ends lie in the data of a pack, none overlapping another."""
    if not starts:
        return True
    if starts[0] < pack.header_bytes or stops[-1] > pack.nbytes:
        return False
    return _are_apart(starts, stops)


def _are_apart(starts: Sequence[int], stops: Sequence[int]) -> bool:
    """Whether boxes with these (sorted) ends do not overlap."""
    # At no byte may more have begun than one more than have ended there.
    return all(map(le, stops, islice(starts, 1, None)))


def _explain_extents(
    tensors: TensorTable, boxes: BoxTable, sizes: Sequence[int], packs: Sequence[PackRow], what: str
) -> NoReturn:
    """Raise for what ``_lie_apart`` has found."""
    rows = zip(boxes.pack, boxes.offset, sizes, range(len(sizes)), strict=True)
    extents = sorted([(pack, offset, offset + nbytes, j) for pack, offset, nbytes, j in rows])
    # Empty boxes, left in, would hide neighbours from each other.
    for a, b in pairwise([extent for extent in extents if extent[2] > extent[1]]):
        if a[2] > b[1] and a[0] == b[0]:
            names = " and ".join(repr(tensors.name[boxes.tensor[j]]) for j in (a[3], b[3]))
            raise FormatError(f"{what}: {names} share bytes of pack {packs[a[0]].name} at offset {b[1]}")
    lowest: dict[int, int] = {}
    highest: dict[int, int] = {}
    for pack, offset, stop, _ in extents:
        lowest[pack] = min(offset, lowest.get(pack, offset))
        highest[pack] = max(stop, highest.get(pack, 0))
    i = next(i for i in lowest if lowest[i] < packs[i].header_bytes or highest[i] > packs[i].nbytes)
    raise FormatError(
        f"{what}: boxes at {lowest[i]} to {highest[i]} do not lie in the data of pack {packs[i].name} "
        f"({packs[i].header_bytes} to {packs[i].nbytes})"
    )
