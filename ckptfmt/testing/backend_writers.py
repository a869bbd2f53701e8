"""Conformance of ``open_writer`` and its writers."""

from __future__ import annotations

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from ckptfmt.errors import BackendError, Conflict, InvalidInput, NotFound
from ckptfmt.ports.backend import Backend
from ckptfmt.testing.backend_rig import BackendRig, at_once, pattern


class WriterConformance(BackendRig):
    """Large objects are written from many threads, in any order, and seen only when finished."""

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 300_000])
    def test_writer_stores_exactly_these_bytes(self, place: Backend, nbytes: int) -> None:
        data = pattern(nbytes)
        self.put(place, "f/x", data)
        assert self.raw_read(place, "f/x") == data
        assert place.head("f/x").nbytes == nbytes

    def test_writer_takes_pieces_in_any_order_from_any_thread(self, place: Backend) -> None:
        data = pattern(1_000_003)
        pieces = [(at, data[at : at + 8192]) for at in range(0, len(data), 8192)]
        random.Random(1).shuffle(pieces)
        writer = place.open_writer("f/x", len(data))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda piece: writer.write_at(*piece), pieces))
        writer.finish()
        assert self.raw_read(place, "f/x") == data

    def test_writer_takes_pieces_of_odd_sizes(self, place: Backend) -> None:
        data = pattern(200_000)
        cuts = sorted(random.Random(2).sample(range(1, len(data)), 60))
        writer = place.open_writer("f/x", len(data))
        for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
            writer.write_at(start, memoryview(data)[start:stop])
        writer.finish()
        assert self.raw_read(place, "f/x") == data

    def test_writer_keeps_no_buffer(self, place: Backend) -> None:
        buffer = bytearray(b"a" * 8192)
        writer = place.open_writer("f/x", 16384)
        writer.write_at(0, buffer)
        buffer[:] = b"b" * 8192
        writer.write_at(8192, buffer)
        buffer[:] = b"c" * 8192
        writer.finish()
        assert self.raw_read(place, "f/x") == b"a" * 8192 + b"b" * 8192

    def test_unfinished_object_is_not_seen_as_complete(self, place: Backend) -> None:
        for nbytes in (0, 4096, 10_000):
            key = f"f/x{nbytes}"
            writer = place.open_writer(key, nbytes)
            if nbytes:
                writer.write_at(0, bytes(nbytes))
            with contextlib.suppress(NotFound):
                assert place.head(key).nbytes != nbytes
            writer.finish()
            assert place.head(key).nbytes == nbytes

    def test_finish_wants_every_byte(self, place: Backend) -> None:
        for at, data in ((0, b"x" * 99), (1, b"x" * 99), (0, b"")):
            writer = place.open_writer("f/x", 100)
            writer.write_at(at, data)
            with pytest.raises(InvalidInput, match="f/x"):
                writer.finish()
            writer.abort()
        assert self.raw_list(place) == []

    def test_finish_refuses_a_byte_written_twice(self, place: Backend) -> None:
        writer = place.open_writer("f/x", 100)
        writer.write_at(0, bytes(60))
        writer.write_at(40, bytes(60))
        with pytest.raises(InvalidInput, match="twice"):
            writer.finish()
        writer.abort()

    @pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 101), (100, 1), (2**62, 1)])
    def test_write_outside_the_object_is_refused(self, place: Backend, offset: int, nbytes: int) -> None:
        writer = place.open_writer("f/x", 100)
        with pytest.raises(InvalidInput):
            writer.write_at(offset, bytes(nbytes))
        writer.abort()

    def test_negative_size_is_refused(self, place: Backend) -> None:
        with pytest.raises(InvalidInput):
            place.open_writer("f/x", -1)

    def test_impossible_size_is_refused_and_leaves_nothing(self, place: Backend) -> None:
        with pytest.raises((BackendError, InvalidInput)):
            place.open_writer("f/x", 2**62)
        assert self.raw_list(place) == []

    def test_abort_leaves_nothing(self, place: Backend) -> None:
        writer = place.open_writer("f/x", 10_000)
        writer.write_at(0, bytes(5000))
        writer.abort()
        writer.abort()
        assert self.raw_list(place) == []
        with pytest.raises(NotFound):
            place.head("f/x")
        self.put(place, "f/x", b"again")
        assert self.raw_read(place, "f/x") == b"again"

    def test_a_closed_writer_takes_nothing_more(self, place: Backend) -> None:
        aborted = place.open_writer("f/a", 10)
        aborted.abort()
        finished = place.open_writer("f/b", 10)
        finished.write_at(0, bytes(10))
        finished.finish()
        for writer in (aborted, finished):
            with pytest.raises((InvalidInput, BackendError)):
                writer.write_at(0, bytes(10))
        with pytest.raises((InvalidInput, BackendError)):
            aborted.finish()

    def test_abort_after_finish_keeps_the_object(self, place: Backend) -> None:
        writer = place.open_writer("f/x", 3)
        writer.write_at(0, b"abc")
        writer.finish()
        writer.finish()
        writer.abort()
        assert self.raw_read(place, "f/x") == b"abc"

    def test_a_taken_key_opens_no_writer(self, place: Backend) -> None:
        place.create("f/x", b"1")
        with pytest.raises(Conflict, match="f/x"):
            place.open_writer("f/x", 1)
        assert self.raw_read(place, "f/x") == b"1"

    def test_one_of_many_writers_publishes(self, place: Backend) -> None:
        offers = [pattern(5000, seed=n) for n in range(8)]
        results = at_once([partial(self.put, place, "f/x", data) for data in offers])
        won = [data for data, result in zip(offers, results, strict=True) if result is None]
        assert len(won) == 1
        assert all(isinstance(result, Conflict) for result in results if result is not None)
        assert self.raw_read(place, "f/x") == won[0]
