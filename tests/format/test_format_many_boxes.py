"""Manifests of many boxes are read and checked by whole columns, with the same result as box by box."""

from __future__ import annotations

from typing import Any

import manifest_fixtures as fix
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.errors import FormatError
from ckptfmt.format import tables, written
from ckptfmt.format.manifest import Manifest, RankRow, decode_manifest
from ckptfmt.format.part import decode_part
from ckptfmt.format.tables import BoxTable, ClaimTable, PackRow, TensorTable

ROWS = 3
"""Rows of each rank's box."""


def spread(layers: int, ranks: int, *, small: int = 0) -> Manifest:
    """Layers that each rank has a box of, in its own pack, and after them ``small`` tensors of rank 0."""
    tensors, boxes = TensorTable(), BoxTable()
    ends = [fix.HEAD] * ranks

    def add(name: str, shape: tuple[int, int], parts: int) -> None:
        row = len(tensors.name)
        tensors.name.append(name)
        tensors.kind.append("sharded" if parts > 1 else "replicated")
        tensors.rank.append(-1)
        tensors.dtype.append("uint8")
        tensors.shape.append(shape)
        for rank in range(parts):
            size = (shape[0] // parts, shape[1])
            nbytes = size[0] * size[1]
            boxes.tensor.append(row)
            boxes.start.append((rank * size[0], 0))
            boxes.size.append(size)
            boxes.pack.append(rank)
            boxes.offset.append(ends[rank])
            boxes.digests.append(fix.hexes(bytes(nbytes)))
            ends[rank] += nbytes

    for layer in range(layers):
        add(f"layer{layer}", (ROWS * ranks, 2 + layer % 2), ranks)
    for number in range(small):
        add(f"small{number}", (1, 1), 1)
    packs = [
        PackRow(
            name=f"r{rank:05d}-p000.safetensors", rank=rank, nbytes=end, header_bytes=fix.HEAD, header_digest=fix.KEY
        )
        for rank, end in enumerate(ends)
    ]
    return fix.manifest(
        tensors=tensors,
        boxes=boxes,
        packs=packs,
        aliases={},
        ranks=[RankRow(rank=rank) for rank in range(ranks)],
        trees=fix.Trees(common={"dict": [[name, {"tensor": name}] for name in tensors.name]}),
    )


def outcome(stored: bytes) -> Any:
    try:
        return decode_manifest(stored)
    except FormatError as error:
        return str(error)


def one_by_one(stored: bytes) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "SEVERAL", 1 << 60)
        patch.setattr(written, "_ALIKE", 1 << 60)
        return outcome(stored)


@pytest.mark.parametrize(("layers", "ranks", "small"), [(1, 4, 0), (6, 8, 0), (5, 8, 3), (2, 16, 40)])
def test_columns_are_read_as_they_are(layers: int, ranks: int, small: int) -> None:
    value = spread(layers, ranks, small=small)
    stored = fix.encoded(value)
    assert written.read(msgspec.json.encode(value), Manifest) == value
    assert outcome(stored) == one_by_one(stored) == value


def test_extents_of_all_kinds() -> None:
    columns: list[list[Any]] = [
        [],
        [()],
        [()] * 9,
        [(1,)] * 9,
        [(1, 2), (), (3,), (1, 2)] * 9,
        [(number,) for number in range(20)],
    ]
    for column in columns:
        assert written.extents(msgspec.Raw(msgspec.json.encode(column))) == column


@pytest.mark.parametrize(
    "text",
    [
        b"[[1],[1]" + b",[1]" * 20 + b" ,[1]]",
        b"[[1],[-1]" + b",[1]" * 20 + b"]",
        b'"_1],[1]' + b",[1]" * 20 + b',[1_"',
    ],
)
def test_what_is_no_extent_is_not_taken_for_one(text: bytes) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        written.extents(msgspec.Raw(text))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_column_is_told_alike(data: st.DataObject) -> None:
    value = spread(data.draw(st.integers(1, 4)), data.draw(st.integers(4, 6)), small=data.draw(st.integers(0, 2)))
    boxes = value.boxes
    for _ in range(data.draw(st.integers(1, 2))):
        row = data.draw(st.integers(0, len(boxes.tensor) - 1))
        column = data.draw(st.sampled_from(["tensor", "start", "size", "pack", "offset", "digests"]))
        shift = data.draw(st.integers(-7, 7))
        held = getattr(boxes, column)
        if column in ("start", "size"):
            held[row] = (max(0, held[row][0] + shift), held[row][1])
        elif column == "digests":
            held[row] = held[row][: max(0, shift)]
        else:
            held[row] = max(-1, held[row] + shift)
    stored = fix.stored(value)
    assert outcome(stored) == one_by_one(stored)


@pytest.mark.parametrize("column", ["start", "size"])
@pytest.mark.parametrize("extent", [(), (0,), (0, 0, 0), (2**62,) * 20_000])
def test_a_box_of_another_number_of_dimensions(column: str, extent: tuple[int, ...]) -> None:
    """Found by bending manifests of several ranks. Nobody multiplies a size before its length is known."""
    value = spread(2, 5)
    getattr(value.boxes, column)[3] = extent
    words = rf"'layer0': a box has a {column} of {len(extent)} numbers, not one .* 2 dimensions of the shape \[15, 2\]$"
    with pytest.raises(FormatError, match=words):
        decode_manifest(fix.stored(value))


@pytest.mark.parametrize("table", ["boxes", "claims"])
@pytest.mark.parametrize("column", ["start", "size"])
@pytest.mark.parametrize("extent", [(), (1, 1), (2**62,) * 20_000])
@pytest.mark.parametrize("replica_check", ["off", msgspec.UNSET])
def test_a_box_of_another_number_of_dimensions_in_a_part(
    table: str, column: str, extent: tuple[int, ...], replica_check: Any
) -> None:
    whole: dict[str, list[Any]] = {"tensor": [0], "start": [(0,)], "size": [(5,)], "digests": [""]}
    if table == "boxes" or replica_check is msgspec.UNSET:
        whole["digests"] = [fix.hexes(b"abcde")]
    whole[column] = [extent]
    value = fix.part(
        packs=[fix.pack_row()],
        tensors=TensorTable(name=["w"], kind=["sharded"], rank=[-1], dtype=["uint8"], shape=[(5,)]),
        boxes=BoxTable(**whole, pack=[0], offset=[fix.HEAD]) if table == "boxes" else BoxTable(),
        claims=ClaimTable(**whole) if table == "claims" else ClaimTable(),
        replica_check=replica_check,
    )
    with pytest.raises(FormatError, match=rf"'w': a box has a {column} of {len(extent)} numbers"):
        decode_part(msgspec.json.encode(value))
