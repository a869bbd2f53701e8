"""The presented grid: whatever the boxes, a chunk is found in one range of one of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_rig import grid as boxes_between
from reshard_rig import part_of

from ckptfmt.format.boxes import Box, Extent
from ckptfmt.views import grid as grids
from ckptfmt.views.grid import TARGET_BYTES, Grid, Presented, free_grid, present


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of 24 bytes, so that small tensors have many."""
    monkeypatch.setattr(grids, "TARGET_BYTES", 24)
    return 24


def read(presented: Presented, parts: list[bytes], index: Extent, dtype: str) -> np.ndarray[Any, Any]:
    """The range of a chunk, with foreign bytes where it passes its box."""
    place = presented.place(index)
    data = (parts[place.box] + b"\xa5" * presented.chunk_bytes)[place.first : place.first + presented.chunk_bytes]
    return np.frombuffer(data, dtype).reshape(presented.grid.chunk)


def check(array: np.ndarray[Any, Any], boxes: list[Box]) -> Presented | None:
    """Every element of the tensor is found in exactly one chunk, if the boxes can be presented at all."""
    presented = present(array.shape, boxes, array.itemsize)
    if presented is None:
        return None
    parts = [part_of(array, box).tobytes() for box in boxes]
    found = np.zeros_like(array)
    covered = np.zeros(array.shape, np.int64)
    for index in presented.grid.indices():
        start, size = presented.grid.box(index)
        inside = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        chunk = read(presented, parts, index, array.dtype.str)
        found[inside] = chunk[tuple(slice(n) for n in size)]
        covered[inside] += 1
    assert (covered == 1).all()
    assert found.tobytes() == array.tobytes()
    return presented


@st.composite
def sharded(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 11), max_size=3)))
    cuts = [draw(st.lists(st.integers(0, extent), max_size=3)) for extent in shape]
    dtype = draw(st.sampled_from(["uint8", "int16", "float64"]))
    array = np.random.default_rng(draw(st.integers(0, 5))).integers(0, 255, math.prod(shape)).astype(dtype)
    boxes = boxes_between(shape, cuts)
    return array.reshape(shape), draw(st.permutations(boxes))


@pytest.mark.slow
@pytest.mark.usefixtures("target")
def test_what_is_presented_is_the_tensor() -> None:
    shown = []

    @given(sharded())
    @settings(max_examples=400, deadline=None)
    def examine(case: tuple[np.ndarray[Any, Any], list[Box]]) -> None:
        shown.append(check(*case) is not None)

    examine()
    assert sum(shown) > len(shown) / 2  # refusing everything would pass, too


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [1, 5, 12, 13, 48])
def test_what_torch_chunk_makes_is_always_presented(rows: int, ranks: int) -> None:
    array = np.arange(rows * 3, dtype=np.int16).reshape(rows, 3)
    edge = -(-rows // ranks)
    assert check(array, boxes_between(array.shape, [range(edge, rows, edge), []])) is not None


def test_boxes_that_are_no_grid_are_refused() -> None:
    boxes = [((0, 0), (2, 3)), ((0, 3), (4, 1)), ((2, 0), (2, 3))]
    assert present((4, 4), boxes, 4) is None


def test_a_dimension_that_is_cut_unevenly_is_refused_where_chunks_would_span_it() -> None:
    along = {"even": [[4], [2, 4]], "uneven": [[4], [1]]}
    shapes = {name: present((8, 6), boxes_between((8, 6), cuts), 4) for name, cuts in along.items()}
    assert shapes["even"] is not None
    assert shapes["even"].grid.chunk == (4, 2)
    assert shapes["uneven"] is not None  # single columns: legal
    assert shapes["uneven"].grid.chunk == (1, 1)


@pytest.mark.parametrize(
    ("shape", "cuts", "chunk"),
    [
        ((50_257, 768), [[], []], (2646, 768)),  # a prime number of rows, in one box
        ((50_257, 768), [range(12_565, 50_257, 12_565), []], (2513, 768)),  # a divisor of the common edge only
        ((16_384, 4096), [[], []], (512, 4096)),
        ((16_384, 4096), [[], [1024, 2048, 3072]], (2048, 1024)),
        ((3, 100_000_000), [[], []], (1, 2_083_334)),
        ((10,), [[]], (10,)),
        ((), [], ()),
    ],
)
def test_chunks_are_near_the_target(shape: Extent, cuts: list[Any], chunk: Extent) -> None:
    presented = present(shape, boxes_between(shape, cuts), 4)
    assert presented is not None
    assert presented.handy
    assert presented.grid.chunk == chunk


def test_small_chunks_are_handy_only_if_boxes_are_as_small() -> None:
    odd = present((4097, 256), boxes_between((4097, 256), [[1000, 2001], []]), 4)  # gcd of the cuts: 1
    assert odd is not None
    assert odd.grid.chunk == (1, 256)
    assert not odd.handy
    small = present((8, 8), boxes_between((8, 8), [range(1, 8), []]), 4)
    assert small is not None
    assert small.handy


def test_an_empty_tensor_has_no_chunks() -> None:
    presented = present((0, 4), [((0, 0), (0, 4))], 4)
    assert presented is not None
    assert presented.grid == Grid((0, 4), (1, 4))
    assert list(presented.grid.indices()) == []


def test_empty_boxes_of_ranks_that_hold_nothing_change_nothing() -> None:
    boxes = [((0, 0), (2, 3)), ((2, 0), (2, 3)), ((4, 0), (0, 3))]
    presented = present((4, 3), boxes, 4)
    assert presented is not None
    assert presented.grid.chunk == (2, 3)


def test_a_free_grid_has_chunks_near_the_target() -> None:
    grid = free_grid((8193, 256), 4)
    assert TARGET_BYTES / 2 < grid.volume * 4 <= TARGET_BYTES
    assert grid.counts == (2, 1)
