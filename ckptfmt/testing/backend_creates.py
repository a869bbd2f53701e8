"""Conformance of folders and of ``create``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ckptfmt.errors import Conflict, NotFound
from ckptfmt.ports.backend import Backend, ObjectInfo
from ckptfmt.testing.backend_rig import BackendRig, at_once, pattern


class CreateConformance(BackendRig):
    """Small objects are created whole, exactly once, and never over another."""

    races = 12
    """How often many creates of one key are let loose at once."""
    crowd = 16
    """How many."""

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

    def test_only_an_empty_folder_can_be_removed(self, place: Backend) -> None:
        place.make_folder("f/a/b")
        self.put(place, "f/x", b"x")
        for prefix in ("f/a", "f", "", "absent", "f/absent"):
            place.remove_folder(prefix)
        assert place.has_folder("f/a/b")
        assert self.raw_read(place, "f/x") == b"x"
        for prefix in ("f/a/b", "f/a/b", "f/a"):
            place.remove_folder(prefix)
        place.make_folder("f/a/b")
        place.create("f/a/b/x", b"again")
        assert self.raw_read(place, "f/a/b/x") == b"again"

    def test_one_of_many_creates_wins(self, place: Backend) -> None:
        offers = [pattern(1000 + 37 * n, seed=n) for n in range(self.crowd)]
        for round_ in range(self.races):
            key = f"f/x{round_}"
            results = at_once([partial(place.create, key, data) for data in offers])
            won = [data for data, result in zip(offers, results, strict=True) if result is None]
            assert len(won) == 1
            assert all(isinstance(result, Conflict) for result in results if result is not None)
            assert self.raw_read(place, key) == won[0]
        assert len(self.raw_list(place)) == self.races

    def test_equal_creates_at_once_all_succeed(self, place: Backend) -> None:
        assert at_once([lambda: place.create("f/x", b"same" * 500)] * self.crowd) == [None] * self.crowd
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
