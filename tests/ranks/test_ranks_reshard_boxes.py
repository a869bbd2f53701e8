"""Any saved boxes into any live ones: bit-exact, and not a chunk more is read than hold some of what is wanted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_rig import Reads, front, grid, lay_out, load, part_of, restore, save

from ckptfmt import Sharded
from ckptfmt.engine.load import gather
from ckptfmt.engine.opened import Opened
from ckptfmt.errors import Corrupt, Mismatch
from ckptfmt.format.boxes import Box

DTYPES = ["uint8", "int16", "float32", "float64", "complex128"]


def numbers(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray[Any, Any]:
    raw = np.random.default_rng(seed).integers(0, 256, math.prod(shape) * np.dtype(dtype).itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def dense(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array(array, order="C")


def touched(array: np.ndarray[Any, Any]) -> bool:
    return any(array.tobytes())


def same(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def chunks_needed(array: np.ndarray[Any, Any], saved: list[Box], wanted: Box, chunk_bytes: int) -> set[tuple[int, int]]:
    """(saved box, chunk) of everything that holds an element of ``wanted``: counted element by element."""
    inside = np.zeros(array.shape, bool)
    inside[tuple(slice(a, a + n) for a, n in zip(*wanted, strict=True))] = True
    found = set()
    for number, box in enumerate(saved):
        for element in np.flatnonzero(part_of(inside, box).ravel()):
            first = int(element) * array.itemsize
            last = (first + array.itemsize - 1) // chunk_bytes
            found |= {(number, chunk) for chunk in range(first // chunk_bytes, last + 1)}
    return found


def bytes_of_chunks(array: np.ndarray[Any, Any], saved: list[Box], chunks: set[tuple[int, int]], size: int) -> int:
    lengths = [math.prod(box[1]) * array.itemsize for box in saved]
    return sum(min(size, lengths[number] - chunk * size) for number, chunk in chunks)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[Box], list[Box], int]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    array = numbers(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9)))
    cuts = [[draw(st.lists(st.integers(0, n), max_size=3)) for n in shape] for _ in range(2)]
    # A chunk need not end where an element does.
    return array, grid(shape, cuts[0]), grid(shape, cuts[1]), draw(st.sampled_from([8, 20, 64, 1 << 20]))


@pytest.mark.slow
@given(layouts(), st.booleans(), st.booleans())
@settings(max_examples=250, deadline=None)
def test_any_boxes_into_any_others(
    case: tuple[np.ndarray[Any, Any], list[Box], list[Box], int], atomic: bool, rows: bool
) -> None:
    array, saved, live, chunk_bytes = case
    opened = lay_out({"w": (array, saved)}, chunk_bytes=chunk_bytes)
    same(load(opened)["w"], array)
    plain = np.empty_like(array)
    assert restore(opened, {"w": plain}, atomic=atomic).amplification == 1.0
    same(plain, array)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "_ROW_BYTES", 1 if rows else 1 << 20)
        patch.setattr(gather, "_PIECE_BYTES", 8)
        for box in live:
            local = np.full(box[1], 0).astype(array.dtype)
            report = restore(opened, {"w": Sharded(local, array.shape, box[0])}, atomic=atomic)
            same(local, dense(part_of(array, box)))
            needed = bytes_of_chunks(array, saved, chunks_needed(array, saved, box, chunk_bytes), chunk_bytes)
            assert report.nbytes == local.nbytes
            assert report.amplification == (needed / local.nbytes if local.nbytes else 1.0)


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_any_slice_of_any_boxes(case: tuple[np.ndarray[Any, Any], list[Box], list[Box], int]) -> None:
    array, saved, live, chunk_bytes = case
    opened = lay_out({"w": (array, saved)}, chunk_bytes=chunk_bytes)
    tensor = front(opened)["w"]
    for start, size in live:
        found = tensor[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        same(np.asarray(found), dense(part_of(array, (start, size))))


# -- large enough for several chunks, rows and threads ----------------------------------------------------
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("live_axis", [0, 1])
def test_rows_and_columns(axis: int, live_axis: int) -> None:
    array = numbers((512, 1030))
    cuts: list[list[int]] = [[], []]
    cuts[axis] = [array.shape[axis] // 3, array.shape[axis] // 2]
    opened = lay_out({"w": (array, grid(array.shape, cuts))}, chunk_bytes=1 << 16)
    others: list[list[int]] = [[], []]
    others[live_axis] = [array.shape[live_axis] // 4, array.shape[live_axis] // 2 + 1]
    for box in grid(array.shape, others):
        for order in ("C", "F"):
            local = np.zeros(box[1], np.float32, order=order)  # type: ignore[call-overload]
            restore(opened, {"w": Sharded(local, array.shape, box[0])})
            same(dense(local), dense(part_of(array, box)))


def test_only_chunks_that_hold_some_of_it_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of a matrix whose rows are longer than chunks: what lies between them is not read."""
    array = numbers((16, 1 << 16), "uint8")
    opened = lay_out({"w": (array, grid(array.shape, [[8], []]))}, chunk_bytes=4096)
    reads = Reads(opened, monkeypatch)
    monkeypatch.setattr("ckptfmt.engine.nearest.GAP_BYTES", 0)
    local = np.zeros((16, 100), np.uint8)
    report = restore(opened, {"w": Sharded(local, array.shape, (0, 5000))})
    same(local, dense(array[:, 5000:5100]))
    assert report.amplification == 4096 / 100
    assert sum(nbytes for *_, nbytes in reads.ranges) <= 16 * 2 * 4096  # a chunk lies across two pages


@pytest.mark.parametrize("atomic", [True, False])
def test_each_chunk_is_read_once_for_all_that_need_it(monkeypatch: pytest.MonkeyPatch, atomic: bool) -> None:
    array = numbers((64, 64))
    opened = lay_out({"w": (array, grid(array.shape, [[], []]))}, chunk_bytes=1 << 12, aliases={"v": "w"})
    reads = Reads(opened, monkeypatch)
    halves = {name: Sharded(np.zeros((64, 32), np.float32), array.shape, (0, at)) for name, at in (("w", 0), ("v", 32))}
    report = restore(opened, halves, atomic=atomic)
    assert report.amplification == 1.0
    assert sum(nbytes for *_, nbytes in reads.ranges) <= array.nbytes + 4 * 4096
    for name, at in (("w", 0), ("v", 32)):
        same(halves[name].local, dense(array[:, at : at + 32]))


def test_what_is_read_twice_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the window a whole tensor goes chunk by chunk into each of two live ones."""
    array = numbers((64, 64))
    opened = lay_out({"w": (array, grid(array.shape, [[], []]))}, chunk_bytes=1 << 12, aliases={"v": "w"})
    reads = Reads(opened, monkeypatch)
    live = {name: np.zeros_like(array) for name in ("w", "v")}
    report = restore(opened, live, atomic=False)
    assert (report.nbytes, report.amplification) == (2 * array.nbytes, 1.0)
    assert sum(nbytes for *_, nbytes in reads.ranges) >= 2 * array.nbytes
    for found in live.values():
        same(found, array)


def test_a_slice_does_not_keep_the_chunks_around_it() -> None:
    array = numbers((1 << 10, 1 << 10))
    with_row = lay_out({"w": (array, grid(array.shape, [[], []]))}, chunk_bytes=1 << 22)
    row = front(with_row)["w"][3]
    same(np.asarray(row), array[3])
    base = row
    while getattr(base, "base", None) is not None:
        base = base.base
    assert memoryview(base).nbytes <= 2 * array[3].nbytes


# -- damage -------------------------------------------------------------------------------------------------
def damaged(opened: Opened, tensor: str, at: int) -> None:
    """Flip a byte of a tensor's first box."""
    box = opened.stored.find(tensor, None).boxes[0]
    opened.site.backend._store.objects[box.pack][box.offset + at] ^= 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("atomic", [True, False])
def test_damage_to_a_needed_chunk_is_named(atomic: bool) -> None:
    array = numbers((64, 64))
    opened = lay_out({"w": (array, grid(array.shape, [[32], []]))}, chunk_bytes=1 << 10)
    damaged(opened, "w", 1024 * 3 + 5)
    box = opened.stored.find("w", None).boxes[0]
    local = np.zeros((2, 64), np.float32)
    with pytest.raises(Corrupt, match=f"tensor 'w': the bytes at offset {box.offset + 3072} of {box.pack}") as caught:
        restore(opened, {"w": Sharded(local, array.shape, (12, 0))}, atomic=atomic)
    assert caught.value.offset == box.offset + 3072
    assert not touched(local)


def test_damage_to_other_chunks_is_not_this_rank_s() -> None:
    array = numbers((64, 64))
    opened = lay_out({"w": (array, grid(array.shape, [[32], []]))}, chunk_bytes=1 << 10)
    damaged(opened, "w", 5)
    local = np.zeros((2, 64), np.float32)
    restore(opened, {"w": Sharded(local, array.shape, (12, 0))})
    same(local, array[12:14])


# -- saved by ranks -------------------------------------------------------------------------------------------
def test_saved_by_ranks_of_one_number_restored_by_another() -> None:
    """Replicated tensors, uneven rows of a sharded one, and a rank that holds nothing of it."""
    array, bias = numbers((7, 5)), numbers((3,), "float64")

    def states(world_size: int) -> list[dict[str, Any]]:
        each = -(-7 // world_size)
        cuts = [(min(r * each, 7), min((r + 1) * each, 7)) for r in range(world_size)]
        return [
            {"w": Sharded(array[a:b].copy(), array.shape, (a, 0)), "b": bias.copy(), "note": "same"} for a, b in cuts
        ]

    for saved in (1, 2, 4, 9):
        opened = save(states(saved))
        assert opened.ranks == tuple(range(saved))
        same(load(opened)["w"], array)
        for live in (1, 2, 3, 8):
            for rank, state in enumerate(states(live)):
                state["w"].local[...] = 0
                state["b"][...] = 0
                restore(opened, state, rank=rank, world_size=live)
                same(state["w"].local, states(live)[rank]["w"].local)
                same(state["b"], bias)


def test_shapes_and_dtypes_are_compared_with_the_whole() -> None:
    array = numbers((6, 4))
    opened = lay_out({"w": (array, grid(array.shape, [[3], []]))}, chunk_bytes=1 << 10)
    with pytest.raises(Mismatch, match=r"w: saved shape \[6, 4\], live shape \[8, 4\]"):
        restore(opened, {"w": Sharded(np.zeros((2, 4), np.float32), (8, 4), (0, 0))})
    half = Sharded(np.zeros((2, 4), np.float64), (6, 4), (2, 0))
    with pytest.raises(Mismatch, match="w: saved dtype float32, live dtype float64"):
        restore(opened, {"w": half})
    assert restore(opened, {"w": half}, cast=True).cast == ("w",)
    same(half.local, array[2:4].astype(np.float64))


@pytest.mark.parametrize(("limit", "untouched"), [(3 << 10, True), (2 << 10, False)])
def test_under_a_limit_counts_what_a_share_needs(limit: int, untouched: bool) -> None:
    """What goes through the window cannot be taken back; a small share of large tensors need not go there."""
    array = numbers((64, 64))
    boxes = grid(array.shape, [[32], []])
    opened = lay_out({"a": (array, boxes), "w": (array, boxes)}, chunk_bytes=1 << 10)
    damaged(opened, "w", 1024 * 3 + 5)
    first, second = np.zeros((4, 64), np.float32), np.zeros((4, 64), np.float32)
    live = {"a": Sharded(first, array.shape, (8, 0)), "w": Sharded(second, array.shape, (11, 0))}
    with pytest.raises(Corrupt) as caught:
        restore(opened, live, host_bytes_max=limit)
    assert not touched(second)
    assert touched(first) != untouched
    assert getattr(caught.value, "__notes__", []) == ([] if untouched else ["already changed: a"])
