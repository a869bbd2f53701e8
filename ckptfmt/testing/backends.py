"""What every backend must do, as a test class to inherit.

    class TestMine(BackendConformance):
        @pytest.fixture
        def backend(self, tmp_path): ...            # empty, ready for writing
        def raw_read(self, backend, key): ...       # the four raw methods go round the backend,
        def raw_write(self, backend, key, data): ...   # so that it can't vouch for itself
        def raw_delete(self, backend, key): ...
        def raw_list(self, backend): ...

Keys live in folders that the suite makes first; a backend without folders ignores that.
"""

from __future__ import annotations

import contextlib
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from ckptfmt.errors import BackendError, CkptError, Conflict, Corrupt, FormatError, InvalidInput, NotFound
from ckptfmt.ports.backend import Backend, ObjectInfo

__all__ = ["HOSTILE_KEYS", "BackendConformance"]

HOSTILE_KEYS = (
    "",
    ".",
    "..",
    "/",
    "/etc/passwd",
    "../escape",
    "f/../../escape",
    "f/./a",
    "f//a",
    "f/",
    "/f/a",
    "f/.hidden",
    "f\\a",
    "f/a b",
    "f/a\n",
    "f/\x00",
    "f/a\x00b",
    "f/ä",
    "f/\u202e",
    "f/a:b",
    "f/a*",
    "~/a",
    "C:\\a",
    "f/" + "a" * 300,
    "a/" * 400 + "a",
    "catalog.sqlite",
    "catalog.sqlite-journal",
    "catalog.sqlite-wal",
)


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes in which every part differs from every other."""
    return random.Random(seed).randbytes(nbytes)


def at_once(tasks: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run all tasks in threads that start together; return each result, or the ``CkptError`` it raised."""
    work = list(tasks)
    gate = threading.Barrier(len(work))

    def run(task: Callable[[], Any]) -> Any:
        gate.wait()
        try:
            return task()
        except CkptError as error:
            return error

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(run, work))


class BackendConformance(ABC):
    """Inherit, give the fixture ``backend`` and the raw methods."""

    @abstractmethod
    def raw_read(self, backend: Any, key: str) -> bytes: ...

    @abstractmethod
    def raw_write(self, backend: Any, key: str, data: bytes) -> None: ...

    @abstractmethod
    def raw_delete(self, backend: Any, key: str) -> None: ...

    @abstractmethod
    def raw_list(self, backend: Any) -> list[str]:
        """All that is stored, leftovers included, in any order; folders left out."""

    @pytest.fixture
    def place(self, backend: Backend) -> Backend:
        backend.make_folder("f")
        return backend

    def put(self, place: Backend, key: str, data: bytes) -> None:
        """Write an object by its writer, in one piece."""
        writer = place.open_writer(key, len(data))
        writer.write_at(0, data)
        writer.finish()

    # -- facts ---------------------------------------------------------------------------------
    def test_traits_are_told(self, backend: Backend) -> None:
        traits = backend.traits
        assert backend.url.startswith(f"{traits.scheme}://")
        assert traits.durable
        assert traits.alignment >= 1

    def test_space_is_a_number_or_unknown(self, backend: Backend) -> None:
        free = backend.space()
        assert free is None or free > 0

    # -- folders -------------------------------------------------------------------------------
    def test_make_folder_is_idempotent_and_deep(self, backend: Backend) -> None:
        backend.make_folder("a/b/c")
        backend.make_folder("a/b/c")
        assert all(backend.has_folder(prefix) for prefix in ("", "a", "a/b", "a/b/c"))
        backend.create("a/b/c/x", b"1")
        assert self.raw_read(backend, "a/b/c/x") == b"1"

    def test_folders_made_at_once_by_many(self, backend: Backend) -> None:
        results = at_once([lambda: backend.make_folder("a/b/c/d")] * 16)
        assert results == [None] * 16

    def test_no_write_makes_a_folder(self, backend: Backend) -> None:
        if not backend.traits.folders:
            pytest.skip("this backend has no folders")
        assert not backend.has_folder("absent")
        with pytest.raises(NotFound):
            backend.create("absent/x", b"1")
        with pytest.raises(NotFound):
            backend.open_writer("absent/x", 1)
        assert not backend.has_folder("absent")
        assert self.raw_list(backend) == []

    def test_a_folder_in_place_of_an_object_is_refused(self, backend: Backend) -> None:
        if not backend.traits.folders:
            pytest.skip("this backend has no folders")
        backend.create("x", b"1")
        with pytest.raises(Conflict):
            backend.make_folder("x")
        backend.make_folder("g")
        with pytest.raises((Conflict, NotFound)):
            backend.create("g", b"1")
        with pytest.raises(Conflict):
            backend.open_writer("g", 1)
        with pytest.raises(NotFound):
            backend.head("g")
        with pytest.raises(NotFound):
            backend.read("g", limit=1)
        assert backend.has_folder("g")
        assert not backend.has_folder("x")

    # -- create --------------------------------------------------------------------------------
    @pytest.mark.parametrize("data", [b"", b"x", pattern(4096), pattern(100_001)], ids=len)
    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_create_stores_exactly_these_bytes(self, place: Backend, data: bytes, kind: Callable[[bytes], Any]) -> None:
        place.create("f/x", kind(data))
        assert self.raw_read(place, "f/x") == data
        assert place.read("f/x", limit=len(data)) == data
        assert place.head("f/x") == ObjectInfo("f/x", len(data))

    def test_create_again_with_equal_bytes_is_success(self, place: Backend) -> None:
        place.create("f/x", b"same")
        place.create("f/x", b"same")
        assert self.raw_list(place) == ["f/x"]

    @pytest.mark.parametrize("other", [b"", b"sam", b"same!", b"SAME"])
    def test_create_over_other_bytes_is_conflict(self, place: Backend, other: bytes) -> None:
        place.create("f/x", b"same")
        with pytest.raises(Conflict, match="f/x"):
            place.create("f/x", other)
        assert self.raw_read(place, "f/x") == b"same"
        assert self.raw_list(place) == ["f/x"]

    def test_create_never_touches_what_others_wrote(self, place: Backend) -> None:
        self.raw_write(place, "f/x", b"foreign")
        with pytest.raises(Conflict):
            place.create("f/x", b"ours")
        assert self.raw_read(place, "f/x") == b"foreign"

    def test_one_of_many_creates_wins(self, place: Backend) -> None:
        offers = [pattern(1000 + 37 * n, seed=n) for n in range(16)]
        for round_ in range(12):
            key = f"f/x{round_}"
            results = at_once([partial(place.create, key, data) for data in offers])
            won = [data for data, result in zip(offers, results, strict=True) if result is None]
            assert len(won) == 1
            assert all(isinstance(result, Conflict) for result in results if result is not None)
            assert self.raw_read(place, key) == won[0]
        assert len(self.raw_list(place)) == 12

    def test_equal_creates_at_once_all_succeed(self, place: Backend) -> None:
        assert at_once([lambda: place.create("f/x", b"same" * 500)] * 16) == [None] * 16
        assert self.raw_read(place, "f/x") == b"same" * 500

    def test_nobody_sees_a_part_of_a_create(self, place: Backend) -> None:
        data = pattern(2_000_000)
        seen: list[bytes] = []
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                try:
                    seen.append(place.read("f/x", limit=len(data)))
                except NotFound:
                    continue

        watcher = threading.Thread(target=watch)
        watcher.start()
        place.create("f/x", data)
        done.set()
        watcher.join()
        assert all(found == data for found in seen)

    # -- large objects -------------------------------------------------------------------------
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

    # -- reading -------------------------------------------------------------------------------
    @pytest.mark.parametrize(
        ("offset", "nbytes"), [(0, 300_000), (4096, 8192), (1, 4096), (4096, 100), (299_999, 1), (300_000, 0), (0, 0)]
    )
    def test_read_fills_the_buffer(self, place: Backend, offset: int, nbytes: int) -> None:
        data = pattern(300_000)
        self.raw_write(place, "f/x", data)
        buffer = bytearray(nbytes)
        place.read_into("f/x", offset, memoryview(buffer))
        assert buffer == data[offset : offset + nbytes]

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 101), (100, 1), (1, 100), (50, 5000), (101, 0), (2**62, 1)])
    def test_short_object_is_corrupt(self, place: Backend, offset: int, nbytes: int) -> None:
        self.raw_write(place, "f/x", bytes(100))
        with pytest.raises(Corrupt, match="f/x") as caught:
            place.read_into("f/x", offset, memoryview(bytearray(nbytes)))
        assert str(nbytes) in str(caught.value)

    def test_absent_object_is_not_found(self, place: Backend) -> None:
        for key in ("f/x", "absent/x", "x"):
            with pytest.raises(NotFound, match=key):
                place.read_into(key, 0, memoryview(bytearray(1)))
            with pytest.raises(NotFound, match=key):
                place.read(key, limit=10)
            with pytest.raises(NotFound, match=key):
                place.head(key)

    def test_deleted_behind_the_back_is_not_found(self, place: Backend) -> None:
        place.create("f/x", b"1")
        self.raw_delete(place, "f/x")
        with pytest.raises(NotFound):
            place.read("f/x", limit=1)

    def test_read_of_too_much_is_refused(self, place: Backend) -> None:
        self.raw_write(place, "f/x", bytes(101))
        assert len(place.read("f/x", limit=101)) == 101
        with pytest.raises(FormatError, match="101"):
            place.read("f/x", limit=100)

    def test_read_wants_a_writable_buffer_and_a_sane_offset(self, place: Backend) -> None:
        self.raw_write(place, "f/x", bytes(100))
        with pytest.raises(InvalidInput):
            place.read_into("f/x", 0, memoryview(bytes(10)))
        with pytest.raises(InvalidInput):
            place.read_into("f/x", -1, memoryview(bytearray(10)))

    def test_many_readers_at_once(self, place: Backend) -> None:
        data = pattern(400_000)
        self.raw_write(place, "f/x", data)

        def read(n: int) -> bool:
            buffer = bytearray(10_000)
            place.read_into("f/x", n * 7_000, memoryview(buffer))
            return buffer == data[n * 7_000 : n * 7_000 + 10_000]

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(read, list(range(50)) * 4))

    # -- listing and removing ------------------------------------------------------------------
    def test_list_respects_path_boundaries(self, backend: Backend) -> None:
        for folder in ("a/b", "a/bc", "a/b/d", "ab"):
            backend.make_folder(folder)
        for key in ("a/b/z", "a/b/c", "a/b/d/e", "a/bc/x", "ab/x", "top"):
            backend.create(key, key.encode())
        assert [info.key for info in backend.list("a/b")] == ["a/b/c", "a/b/d/e", "a/b/z"]
        assert [info.key for info in backend.list("a")] == ["a/b/c", "a/b/d/e", "a/b/z", "a/bc/x"]
        assert [info.key for info in backend.list("")] == sorted(self.raw_list(backend))
        assert all(info.nbytes == len(info.key) for info in backend.list(""))
        assert backend.list("absent") == backend.list("top") == []
        assert backend.list_folders("a") == ["b", "bc"]
        assert backend.list_folders("") == ["a", "ab"]
        assert backend.list_folders("absent") == backend.list_folders("ab") == []

    def test_list_is_sorted_by_whole_key(self, place: Backend) -> None:
        place.make_folder("f/a")
        for key in ("f/a/x", "f/a-b", "f/a.b", "f/a0"):
            place.create(key, b"")
        assert [info.key for info in place.list("f")] == sorted(["f/a/x", "f/a-b", "f/a.b", "f/a0"])

    def test_delete_removes_one_object(self, place: Backend) -> None:
        place.create("f/x", b"1")
        place.create("f/xy", b"2")
        place.delete("f/x")
        place.delete("f/x")
        place.delete("absent/x")
        assert self.raw_list(place) == ["f/xy"]
        place.delete("f")
        assert place.has_folder("f") or not place.traits.folders
        place.create("f/x", b"new")
        assert self.raw_read(place, "f/x") == b"new"

    def test_delete_removes_what_a_dead_writer_left(self, place: Backend) -> None:
        writer = place.open_writer("f/x", 100)
        writer.write_at(0, bytes(50))
        del writer
        place.delete("f/x")
        assert self.raw_list(place) == []

    def test_nothing_to_sweep_after_whole_work(self, place: Backend) -> None:
        place.create("f/x", b"1")
        with pytest.raises(Conflict):
            place.create("f/x", b"2")
        self.put(place, "f/y", b"3")
        assert place.sweep_debris("", dry_run=False) == []
        assert sorted(self.raw_list(place)) == ["f/x", "f/y"]

    # -- hostile keys --------------------------------------------------------------------------
    @pytest.mark.parametrize("key", HOSTILE_KEYS, ids=lambda key: repr(key[:20]))
    def test_hostile_key_is_refused_everywhere(self, place: Backend, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: place.create(key, b"1"),
            lambda: place.open_writer(key, 1),
            lambda: place.read_into(key, 0, memoryview(bytearray(1))),
            lambda: place.read(key, limit=1),
            lambda: place.head(key),
            lambda: place.delete(key),
        ]
        if key:  # '' is the root's prefix
            calls += [
                lambda: place.list(key),
                lambda: place.list_folders(key),
                lambda: place.make_folder(key),
                lambda: place.has_folder(key),
                lambda: place.sweep_debris(key, dry_run=True),
            ]
        for call in calls:
            with pytest.raises(InvalidInput):
                call()
        assert self.raw_list(place) == []
