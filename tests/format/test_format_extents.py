"""Where boxes lie in packs: what is found by columns is what is found byte by byte."""

from __future__ import annotations

import manifest_fixtures as fix
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.errors import FormatError
from ckptfmt.format import extents
from ckptfmt.format.tables import BoxTable, PackRow, TensorTable


def pack(number: int, nbytes: int) -> PackRow:
    return fix.pack_row(name=f"p{number}", nbytes=nbytes, header_bytes=10)


Boxes = list[tuple[int, int, int]]
"""(pack, offset, bytes)."""


def lie_apart(boxes: Boxes, packs: list[PackRow], tensors: list[int]) -> bool:
    """``tensors`` tells for each box which tensor it is of."""
    table = BoxTable(tensor=tensors, pack=[b[0] for b in boxes], offset=[b[1] for b in boxes])
    return extents._lie_apart(table, [b[2] for b in boxes], packs)


def slowly(boxes: Boxes, packs: list[PackRow]) -> bool:
    taken: set[tuple[int, int]] = set()
    for at, offset, nbytes in boxes:
        if offset < packs[at].header_bytes or offset + nbytes > packs[at].nbytes:
            return False
        mine = {(at, byte) for byte in range(offset, offset + nbytes)}
        if mine & taken:
            return False
        taken |= mine
    return True


@given(
    st.lists(st.integers(10, 60), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(9, 60), st.integers(0, 9)), max_size=12),
    st.integers(1, 6),
)
def test_boxes_one_by_one_and_by_tensors(sizes: list[int], boxes: Boxes, each: int) -> None:
    packs = [pack(number, nbytes) for number, nbytes in enumerate(sizes)]
    boxes = [(at % len(packs), offset, nbytes) for at, offset, nbytes in boxes]
    expected = slowly(boxes, packs)
    assert lie_apart(boxes, packs, [number // each for number in range(len(boxes))]) == expected


@given(st.integers(1, 4), st.integers(4, 6), st.sets(st.integers(0, 23), max_size=1), st.integers(-1, 1))
def test_equal_shares_of_every_tensor(tensors: int, ranks: int, bent: set[int], by: int) -> None:
    """A pack of each rank holds a box of each tensor, in order."""
    packs = [pack(rank, 10 + 3 * tensors) for rank in range(ranks)]
    boxes = [(rank, 10 + 3 * row, 3) for row in range(tensors) for rank in range(ranks)]
    boxes = [(at, offset + by * (i in bent), n) for i, (at, offset, n) in enumerate(boxes)]
    rows = [row for row in range(tensors) for _ in range(ranks)]
    assert lie_apart(boxes, packs, rows) == slowly(boxes, packs)


@given(st.data())
def test_shares_of_any_sizes_in_any_order(data: st.DataObject) -> None:
    """What each rank holds of a tensor may be of another size and lie elsewhere in its pack, or be nothing."""
    tensors, ranks = data.draw(st.integers(2, 5)), data.draw(st.integers(4, 6))
    alike = data.draw(st.booleans())
    order = data.draw(st.permutations(range(tensors)))
    size = data.draw(st.lists(st.integers(1, 3), min_size=tensors, max_size=tensors))
    place: dict[tuple[int, int], tuple[int, int]] = {}
    packs = []
    for rank in range(ranks):
        end = 10
        for tensor in order if alike else data.draw(st.permutations(range(tensors))):
            nbytes = size[tensor] if alike else data.draw(st.integers(0, 3))
            if nbytes or alike:
                place[tensor, rank] = end, nbytes
            end += nbytes
        packs.append(pack(rank, max(end, 11)))
    keys = sorted(place)
    boxes = [(rank, *place[tensor, rank]) for tensor, rank in keys]
    if boxes and data.draw(st.booleans()):
        bent, by = data.draw(st.integers(0, len(boxes) - 1)), data.draw(st.integers(-2, 2))
        at, offset, nbytes = boxes[bent]
        boxes[bent] = at, offset + by, nbytes
    assert lie_apart(boxes, packs, [tensor for tensor, _ in keys]) == slowly(boxes, packs)


def test_what_is_wrong_is_named() -> None:
    tensors = TensorTable(name=["a", "b"])
    packs = [pack(0, 40), pack(1, 40)]
    table = BoxTable(tensor=[0, 1], pack=[1, 1], offset=[10, 13])
    with pytest.raises(FormatError, match=r"'a' and 'b' share bytes of pack p1 at offset 13"):
        extents.check_extents(tensors, table, [4, 4], packs, "x")
    table.offset = [10, 38]
    with pytest.raises(FormatError, match=r"boxes at 10 to 42 do not lie in the data of pack p1"):
        extents.check_extents(tensors, table, [4, 4], packs, "x")
