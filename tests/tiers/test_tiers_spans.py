"""What lies far away is read in ranges that end where parts of objects do, whatever chunks lie across."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading_rig import CHUNK, Places, Watched, blank, laying, repair, same

from ckptfmt.engine import touch
from ckptfmt.engine.read_plan import Region, StoredBox
from ckptfmt.engine.spans import Span, read_spans, span_bytes
from ckptfmt.errors import Corrupt, Unavailable
from ckptfmt.generation import Generation
from ckptfmt.testing.faults import Fault, FaultyBackend

MIB = 1 << 20
Open = Callable[..., Places]


# -- cutting -----------------------------------------------------------------------------------------------
@st.composite
def regions(draw: st.DrawFn) -> tuple[Region, int]:
    """Boxes one after the other, with gaps, and a length of spans that may be shorter than a chunk."""
    chunk = draw(st.sampled_from([4096, MIB, CHUNK, 3 * CHUNK]))
    boxes, offset = [], draw(st.integers(0, 3 * CHUNK))
    for nbytes, gap in draw(
        st.lists(
            st.tuples(st.integers(1, 4 * CHUNK) | st.sampled_from([CHUNK, 2 * CHUNK]), st.integers(0, MIB)),
            min_size=1,
            max_size=8,
        )
    ):
        digests = (b"",) * -(-nbytes // chunk)
        boxes.append(StoredBox("t", (0,), (nbytes,), "p", 1 << 40, offset, nbytes, digests, chunk))
        offset += nbytes + gap
    last = boxes[-1]
    begin, end = boxes[0].offset // 4096 * 4096, -(-(last.offset + last.nbytes) // 4096) * 4096
    return Region("p", begin, end, 0, tuple(boxes)), draw(st.sampled_from([CHUNK, 2 * CHUNK]))


def _end(chunk: Any) -> int:
    return int(chunk[2] + chunk[3])


@given(regions(), st.randoms(use_true_random=False))
def test_all_is_read_once_and_each_chunk_is_complete_with_its_last_span(cut: tuple[Region, int], order: Any) -> None:
    region, nbytes = cut
    spans = read_spans(region, nbytes)
    assert spans[0].start == region.start
    assert spans[-1].stop == region.stop
    for one, other in pairwise(spans):
        assert one.stop == other.start
        assert one.stop % nbytes == 0
    for span in spans:
        assert span.stop - span.start < nbytes + 2 * MIB
        assert len(spans) == 1 or span.stop - span.start >= MIB

    come: list[Span] = []
    complete: Counter[tuple[int, int]] = Counter()
    for span in order.sample(spans, len(spans)):
        come.append(span)
        assert all(span.start <= chunk[2] and _end(chunk) <= span.stop for chunk in span.chunks)
        for chunk in (*span.chunks, *span.came()):
            complete[chunk[2], chunk[3]] += 1
            here = sum(max(0, min(_end(chunk), one.stop) - max(chunk[2], one.start)) for one in come)
            assert here == chunk[3]
    assert set(complete.values()) == {1}
    assert sum(length for _, length in complete) == sum(box.nbytes for box in region.boxes)


def test_spans_are_long_where_each_thread_has_several() -> None:
    assert span_bytes(1 << 30, 16) == 16 * MIB
    assert span_bytes(100 * MIB, 16) == 8 * MIB
    assert span_bytes(100 * MIB, 3) == 16 * MIB
    assert span_bytes(0, 16) == 8 * MIB


# -- reading -----------------------------------------------------------------------------------------------
@pytest.fixture
def laid(tmp_path: Path) -> Iterator[Open]:
    """Every place is far away."""
    with laying(tmp_path) as lay:

        def far(**kinds: Any) -> Places:
            here = lay(**kinds)
            for root in (here.durable, *here.replicas):
                here.wrapped[root] = lambda plain: Watched(plain, distant=True, local=False)
            return here

        yield far


def _load(generation: Generation) -> Any:
    return generation.load()


def _restore(generation: Generation) -> Any:
    live = blank()
    generation.restore(live)
    return live


both_ways = pytest.mark.parametrize("way", [_load, _restore])


def _reading(generation: Generation) -> Any:
    log = generation._opened.nearest.log
    return log.since(type(log)(()).mark())


def test_requests_end_at_parts(laid: Open) -> None:
    here = laid(stage=False, replicas=0)
    watched: list[Watched] = []
    here.wrapped[here.durable] = lambda plain: watched.append(Watched(plain, distant=True, local=False)) or watched[-1]
    generation = here.generation()
    watched[0].ranges.clear()
    same(generation.load(), here.saved)
    ranges = sorted((offset, offset + nbytes) for _, offset, nbytes in watched[0].ranges)
    assert here.offset_of("big") % CHUNK, "its chunks lie across"
    assert all(one[1] == other[0] and other[0] % CHUNK == 0 for one, other in pairwise(ranges))
    assert len(ranges) == 2, "16 MiB and a little, which is no request of its own"


def test_memory_is_touched_ahead_once_all_requests_are_under_way(laid: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can start meanwhile."""
    here = laid(stage=False, replicas=0)
    touched = threading.Event()
    readers: list[int] = []

    def populate(address: int, nbytes: int) -> bool:
        readers.append(sum(thread.name.startswith("ckptfmt-read") for thread in threading.enumerate()))
        touched.set()
        return False

    class Waiting(Watched):
        def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
            assert touched.wait(timeout=60)
            super().read_into(key, offset, buffer)

    monkeypatch.setattr(touch, "_populate", populate)
    monkeypatch.setattr(touch, "SLICE_BYTES", MIB)
    here.wrapped[here.durable] = lambda plain: Waiting(plain, distant=True, local=False)
    same(here.generation().load(), here.saved)
    assert readers == [1], "beside the caller's thread"


@both_ways
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_damaged_chunk_that_lies_across_is_read_elsewhere(laid: Open, way: Any, number: int) -> None:
    here = laid(stage=False)
    here.damage(here.durable, "big", number)
    here.damage(here.replicas[0], "big", (number + 1) % 3)
    generation = here.generation()
    same(way(generation), here.saved)
    reading = _reading(generation)
    (problem,) = reading.damaged
    assert (problem.tensor, problem.offset) == ("big", here.offset_of("big", number))
    sizes = {source.role: source.nbytes for source in reading.sources}
    assert sizes["replica"] == min(CHUNK, here.saved["big"].nbytes - number * CHUNK)
    assert sum(sizes.values()) == sum(value.nbytes for value in here.saved.values()), "each chunk counts once"


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_that_is_whole_nowhere_is_named(laid: Open, number: int) -> None:
    here = laid(stage=False)
    for root in (here.durable, *here.replicas):
        here.damage(root, "big", number)
    with pytest.raises(Corrupt, match="tried in vain as well: replica") as caught:
        here.generation().load()
    assert (caught.value.tensor, caught.value.offset) == ("big", here.offset_of("big", number))


def test_one_that_was_damaged_on_its_way_is_read_once_more(laid: Open, caplog: pytest.LogCaptureFixture) -> None:
    here = laid(stage=False, replicas=0)
    here.wrapped[here.durable] = lambda plain: _Bent(plain, here.offset_of("big", 1) - 9 + CHUNK)
    with caplog.at_level(logging.WARNING, "ckptfmt"):
        report = here.generation().restore(live := blank())
    same(live, here.saved)
    assert report.retries == 1
    assert report.damaged == ()
    assert "read once more" in caplog.text


class _Bent(Watched):
    """Gives one byte wrongly, once."""

    def __init__(self, plain: Any, at: int) -> None:
        super().__init__(plain, distant=True, local=False)
        self._at: int | None = at

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        super().read_into(key, offset, buffer)
        if self._at is not None and offset <= self._at < offset + len(buffer):
            buffer[self._at - offset] ^= 1
            self._at = None


@both_ways
def test_a_place_that_goes_away_meanwhile_is_passed_over(laid: Open, way: Any) -> None:
    here = laid(stage=False)
    here.wrapped[here.durable] = lambda plain: FaultyBackend(
        Watched(plain, distant=True, local=False),
        Fault("read_into", when=lambda call: call.nth > 1, error=lambda: Unavailable("away"), times=None),
    )
    generation = here.generation()
    same(way(generation), here.saved)
    assert [problem.kind for problem in _reading(generation).damaged] == ["unavailable"]


@both_ways
def test_a_repair_is_read_for_what_lies_across(laid: Open, way: Any) -> None:
    here = laid(stage=False)
    repair(here, here.durable, here.replicas[0])
    for number in range(3):
        here.damage(here.durable, "big", number)
    generation = here.generation()
    same(way(generation), here.saved)
    assert [source.role for source in _reading(generation).sources] == ["durable"]


# -- ranges in which no chunk lies -------------------------------------------------------------------------
@pytest.mark.parametrize("verify", [True, False])
def test_a_range_without_a_whole_chunk_is_read_from_who_has_it(laid: Open, verify: bool) -> None:
    here = laid(stage=False)
    here.wrapped[here.durable] = _away
    generation = here.generation()
    pack, start = f"{here.folder}/{here.saved_as}", here.offset_of("big", 1) - 100
    found = np.zeros(200, np.uint8)
    generation._opened.nearest.fill(pack, start, memoryview(found), (), verify=verify)
    np.testing.assert_array_equal(found, here.saved["big"][CHUNK - 100 : CHUNK + 100])


@pytest.mark.parametrize("verify", [True, False])
def test_a_range_without_a_whole_chunk_that_nobody_has_is_an_error(laid: Open, verify: bool) -> None:
    here = laid(stage=False, replicas=0)
    here.wrapped[here.durable] = _away
    generation = here.generation()
    with pytest.raises(Unavailable, match="away"):
        generation._opened.nearest.fill(
            f"{here.folder}/{here.saved_as}", 4096, memoryview(bytearray(9)), (), verify=verify
        )


def _away(plain: Any) -> FaultyBackend:
    fault = Fault("read_into", error=lambda: Unavailable("away"), times=None)
    return FaultyBackend(Watched(plain, distant=True, local=False), fault)


def test_unverified_bytes_are_all_read(laid: Open) -> None:
    here = laid(stage=False)
    here.damage(here.durable, "small")
    loaded = here.generation().load(verify=False)
    assert (loaded["small"] != here.saved["small"]).sum() == 1
    np.testing.assert_array_equal(loaded["big"], here.saved["big"])
    here.wrapped[here.durable] = _away
    same(here.generation().load(verify=False), here.saved)
