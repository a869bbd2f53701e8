"""Boxes: tilings, intersections, and the bytes of a slice."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.errors import InvalidInput
from ckptfmt.format import boxes, checksum
from ckptfmt.format.boxes import Box, check_tiling


def grid(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Box]:
    edges = [[0, *inner, n] for n, inner in zip(shape, cuts, strict=True)]
    axes = [list(itertools.pairwise(line)) for line in edges]
    cells = itertools.product(*axes)
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]


@pytest.mark.parametrize("shape", [(), (7,), (4, 6), (2, 3, 4), (0,), (3, 0, 2)])
def test_whole(shape: tuple[int, ...]) -> None:
    assert check_tiling(shape, [boxes.whole(shape)]).reason is None


def test_grids_and_staggered_slabs() -> None:
    assert check_tiling((6, 4), grid((6, 4), [[1, 3], [2]])).reason is None
    bricks: list[Box] = [((0, 0), (1, 3)), ((0, 3), (1, 1)), ((1, 0), (1, 1)), ((1, 1), (1, 3))]
    assert check_tiling((2, 4), bricks).reason is None


def test_pinwheel_has_no_slabs_but_tiles() -> None:
    pinwheel: list[Box] = [((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 0), (1, 2)), ((1, 1), (1, 1))]
    assert check_tiling((3, 3), pinwheel).reason is None
    assert "8 of 9" in str(check_tiling((3, 3), pinwheel[:-1]).reason)


def test_equal_volume_is_not_enough() -> None:
    overlap_and_gap: list[Box] = [((0,), (3,)), ((2,), (3,)), ((5,), (1,))]
    assert sum(size[0] for _, size in overlap_and_gap) == 7
    assert "overlap" in str(check_tiling((7,), overlap_and_gap).reason)


def test_replicas_are_told_apart_from_overlaps() -> None:
    twice: list[Box] = [((0,), (2,)), ((2,), (2,)), ((0,), (2,))]
    found = check_tiling((4,), twice)
    assert found.reason is None
    assert found.replicas == ((2, 0),)


@pytest.mark.parametrize(
    ("pieces", "word"),
    [
        ([], "no box"),
        ([((0,), (3,))], "3 of 4"),
        ([((0,), (5,))], "outside"),
        ([((-1,), (5,))], "outside"),
        ([((0, 0), (4, 1))], "dimensions"),
        ([((0,), (3,)), ((1,), (3,))], "overlap"),
    ],
)
def test_bad_tilings(pieces: list[Box], word: str) -> None:
    assert word in str(check_tiling((4,), pieces).reason)


def test_empty_ranks_hold_empty_boxes() -> None:
    assert check_tiling((4, 2), [((0, 0), (4, 2)), ((4, 0), (0, 2))]).reason is None


def test_ten_thousand_boxes_are_fast() -> None:
    rows: list[Box] = [((i, 0), (1, 8)) for i in range(10_000)]
    cells: list[Box] = [((i, j), (1, 1)) for i in range(100) for j in range(100)]
    begin = time.perf_counter()
    assert check_tiling((10_000, 8), rows).reason is None
    assert check_tiling((100, 100), cells).reason is None
    assert "overlap" in str(check_tiling((100, 100), [((0, 0), (1, 2)), *cells]).reason)
    assert time.perf_counter() - begin < 5, "the check must not compare all pairs"


def test_many_staggered_boxes_are_fast() -> None:
    pieces: list[Box] = []
    for i in range(5000):
        pieces += [((2 * i, 0), (2, 1)), ((2 * i, 1), (1, 2)), ((2 * i + 1, 1), (1, 2))]
    begin = time.perf_counter()
    assert check_tiling((10_000, 3), pieces).reason is None
    assert "overlap" in str(check_tiling((10_000, 3), [((1, 2), (1, 1)), *pieces]).reason)
    assert time.perf_counter() - begin < 5


def test_what_would_take_forever_is_refused() -> None:
    onion: list[Box] = []  # each cut peels one box off: quadratic work
    low, high = 0, 12_000
    while high - low > 1:
        onion.append(((low, low), (1, high - low)))
        onion.append(((low + 1, low), (high - low - 1, 1)))
        low += 1
    begin = time.perf_counter()
    assert "irregular" in str(check_tiling((12_000, 12_000), onion).reason)
    stairs: list[Box] = [((i, 0), (3, 9)) for i in range(3000)]
    assert str(boxes.IRREGULAR_MAX) in str(check_tiling((3002, 9), stairs).reason)
    assert time.perf_counter() - begin < 20


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_tiling_agrees_with_counting(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axis = [st.integers(0, n - 1).flatmap(lambda a, n=n: st.tuples(st.just(a), st.integers(1, n - a))) for n in shape]
    pieces = [
        (tuple(a for a, _ in cell), tuple(n for _, n in cell))
        for cell in data.draw(st.lists(st.tuples(*axis), min_size=1, max_size=6, unique=True))
    ]
    counts = np.zeros(shape, int)
    for start, size in pieces:
        counts[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += 1
    assert (check_tiling(shape, pieces).reason is None) == bool((counts == 1).all())


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_slabs_are_the_slice(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    size = tuple(data.draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True))
    itemsize, gap = data.draw(st.sampled_from([1, 2, 8])), data.draw(st.integers(1, 40))
    raw = np.arange(int(np.prod(shape)) * itemsize).reshape(*shape, itemsize)
    wanted = raw[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))].ravel()
    slabs = boxes.slabs(shape, start, size, itemsize, gap)
    found = [raw[tuple(slice(a, a + n) for a, n in zip(slab.start, slab.size, strict=True))].ravel() for slab in slabs]
    assert np.concatenate(found or [raw.ravel()[:0]]).tolist() == wanted.tolist()
    for slab, numbers in zip(slabs, found, strict=True):
        assert (numbers[0], numbers[-1] + 1) == (slab.first, slab.stop)
        assert max(np.diff(numbers), default=1) <= gap
        if gap == 1:
            assert len(numbers) == slab.stop - slab.first, "bytes without gaps are one range"
    assert all(a.stop + gap <= b.first for a, b in itertools.pairwise(slabs) if gap == 1)
    runs = sum(len(range(slab.first // gap, (slab.stop - 1) // gap + 1)) for slab in slabs)
    needed = {number // gap for number in wanted}
    assert needed == {run for slab in slabs for run in range(slab.first // gap, (slab.stop - 1) // gap + 1)}
    assert runs <= 2 * len(needed)


def test_rows_of_a_matrix_are_one_slab() -> None:
    assert boxes.slabs((8, 6), (2, 0), (3, 6), 4, 1) == [((2, 0), (3, 6), 48, 120)]
    assert boxes.slabs((8, 6), (2, 1), (2, 5), 4, 4) == [((2, 1), (1, 5), 52, 72), ((3, 1), (1, 5), 76, 96)]
    assert boxes.slabs((8, 6), (2, 1), (2, 5), 4, 5) == [((2, 1), (2, 5), 52, 96)]
    assert boxes.slabs((), (), (), 8, 1) == [((), (), 0, 8)]
    with pytest.raises(InvalidInput, match="outside"):
        boxes.slabs((4,), (2,), (3,), 1, 1)


def test_intersection() -> None:
    assert boxes.intersect(((0, 0), (4, 4)), ((2, 3), (4, 4))) == ((2, 3), (2, 1))
    assert boxes.intersect(((0,), (2,)), ((2,), (2,))) is None
    assert boxes.intersect(((), ()), ((), ())) == ((), ())


def test_chunks() -> None:
    assert checksum.chunk_spans(0) == []
    assert checksum.chunk_spans(10, 4) == [(0, 4), (4, 4), (8, 2)]
    assert checksum.chunk_spans(8, 4) == [(0, 4), (4, 4)]
    assert checksum.chunk_count(2**40, 8 << 20) == 2**17
    with pytest.raises(InvalidInput):
        checksum.chunk_count(-1)
    assert checksum.digest(b"").hex() == checksum.hex_digest(b"") == "99aa06d3014798d86001c324468d497f"
