"""Conformance of reading, listing and deleting, and of hostile keys."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptfmt.errors import Conflict, Corrupt, FormatError, InvalidInput, NotFound
from ckptfmt.ports.backend import Backend
from ckptfmt.testing.backend_rig import BackendRig, pattern

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


class ReadConformance(BackendRig):
    """Reads fill the whole buffer or raise; listings and deletes keep to what they are asked."""

    @pytest.mark.parametrize(
        ("offset", "nbytes"), [(0, 300_000), (4096, 8192), (1, 4096), (4096, 100), (299_999, 1), (300_000, 0), (0, 0)]
    )
    def test_read_fills_the_buffer(self, place: Backend, offset: int, nbytes: int) -> None:
        data = pattern(300_000)
        self.raw_write(place, "f/x", data)
        buffer = bytearray(nbytes)
        place.read_into("f/x", offset, memoryview(buffer))
        assert buffer == data[offset : offset + nbytes]

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 300_000), (4096, 8192), (8192, 100), (0, 300_001), (4096, 0)])
    def test_a_cached_range_shows_what_a_read_gives(self, place: Backend, offset: int, nbytes: int) -> None:
        data = pattern(300_000)
        self.raw_write(place, "f/x", data)
        place.read("f/x", limit=300_000)
        memory = memoryview(mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:nbytes]
        memory[:] = b"\x07" * nbytes
        shown = place.map_cached("f/x", offset, memory)
        if shown is None:
            assert memory == b"\x07" * nbytes
        else:
            shown.pin(0, nbytes)
            assert memory == data[offset : offset + nbytes]

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
