"""Ranges that are shown without a copy: only cached ones, locked, on local disks, and errors instead of signals."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptfmt.backends.posix import PosixBackend
from ckptfmt.errors import BackendError
from ckptfmt.testing.syscalls import WatchedSyscalls

NBYTES = 3 * mmap.PAGESIZE + 100
DATA = bytes(range(256)) * (NBYTES // 256) + bytes(NBYTES % 256)


def fresh() -> memoryview:
    return memoryview(mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@pytest.fixture
def calls() -> WatchedSyscalls:
    return WatchedSyscalls()


@pytest.fixture
def place(tmp_path: Path, calls: WatchedSyscalls) -> PosixBackend:
    (tmp_path / "x").write_bytes(DATA)
    backend = PosixBackend(tmp_path, syscalls=calls)
    with (tmp_path / "x").open("rb") as file:
        try:
            usable = calls.cached_pages(file.fileno(), 0, NBYTES) > 0
        except OSError:
            usable = False
    if not usable or not backend._place.is_local():
        pytest.skip("this place does not tell what is cached")
    if backend.map_cached("x", 0, fresh()[:NBYTES]) is None:
        pytest.skip("no memory may be locked here")
    calls.clear()
    return backend


def test_whether_the_disk_is_local_is_asked_once(place: PosixBackend, calls: WatchedSyscalls) -> None:
    for _ in range(3):
        assert place.map_cached("x", 0, fresh()[:NBYTES]) is not None
    assert calls.trace("file_system_type") == []


def test_a_cached_range_is_shown(place: PosixBackend, calls: WatchedSyscalls) -> None:
    memory = fresh()[: NBYTES - mmap.PAGESIZE]
    shown = place.map_cached("x", mmap.PAGESIZE, memory)
    assert shown is not None
    shown.pin(0, len(memory))
    assert memory == DATA[mmap.PAGESIZE :]
    assert not calls.trace("pread_into", "pread_cached")
    assert calls.left_open == []


def test_what_is_shown_outlives_the_file(place: PosixBackend) -> None:
    memory = fresh()[:NBYTES]
    shown = place.map_cached("x", 0, memory)
    assert shown is not None
    place.delete("x")
    shown.pin(0, NBYTES)
    assert memory == DATA


def test_a_range_that_is_not_cached_is_left_to_reads(
    place: PosixBackend, calls: WatchedSyscalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "cached_pages", lambda descriptor, offset, nbytes: 3)  # of four
    assert place.map_cached("x", 0, fresh()[:NBYTES]) is None
    assert not calls.trace("map_locked")


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM, errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("call", ["map_locked", "cached_pages"])
def test_a_refusal_leaves_the_range_to_reads(place: PosixBackend, calls: WatchedSyscalls, call: str, code: int) -> None:
    calls.fail(call, code)
    memory = fresh()[:NBYTES]
    assert place.map_cached("x", 0, memory) is None
    memory[:] = DATA


REFUSED = """
import mmap, os, resource, sys
from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.backends.posix_mapping import map_cached
path, nbytes = sys.argv[1], int(sys.argv[2])

class Opened(Syscalls):
    descriptor = os.open(path, os.O_RDONLY)
    def open(self, path, flags, mode=0o666):
        return os.dup(self.descriptor)
    def cached_pages(self, descriptor, offset, nbytes):
        return nbytes

resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
if os.geteuid() == 0:
    os.setuid(65534)  # root may lock whatever the limit says
memory = memoryview(mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:nbytes]
assert map_cached(path, 0, memory, Opened()) is None
memory[:] = bytes(nbytes)
"""


def test_memory_is_fresh_again_where_none_may_be_locked(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    done = subprocess.run([sys.executable, "-c", REFUSED, str(tmp_path / "x"), str(NBYTES)], timeout=60)
    assert done.returncode == 0


def test_a_short_object_is_left_to_reads(place: PosixBackend) -> None:
    assert place.map_cached("x", 0, fresh()[: NBYTES + 1]) is None
    assert place.map_cached("x", 2 * mmap.PAGESIZE, fresh()[:NBYTES]) is None


def test_what_is_not_aligned_is_left_to_reads(place: PosixBackend) -> None:
    assert place.map_cached("x", 1, fresh()[:100]) is None
    assert place.map_cached("x", 0, fresh()[1:101]) is None
    assert place.map_cached("x", 0, fresh()[:0]) is None


def test_network_file_systems_are_left_to_reads(
    place: PosixBackend, calls: WatchedSyscalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "file_system_type", lambda path: 0x6969)  # NFS
    assert PosixBackend(tmp_path, syscalls=calls).map_cached("x", 0, fresh()[:NBYTES]) is None
    assert not calls.trace("map_locked")


def test_a_page_that_does_not_come_is_an_error_with_object_and_offset(
    place: PosixBackend, calls: WatchedSyscalls
) -> None:
    shown = place.map_cached("x", 0, fresh()[:NBYTES])
    assert shown is not None
    calls.fail("fault_in", errno.EFAULT)
    with pytest.raises(BackendError, match=r"/x at offset 4096"):
        shown.pin(mmap.PAGESIZE, 2 * mmap.PAGESIZE)


def test_a_file_that_was_cut_short_is_an_error_and_no_signal(place: PosixBackend, tmp_path: Path) -> None:
    memory = fresh()[:NBYTES]
    shown = place.map_cached("x", 0, memory)
    assert shown is not None
    os.truncate(tmp_path / "x", 100)
    with pytest.raises(BackendError, match="/x at offset 4096"):
        shown.pin(mmap.PAGESIZE, NBYTES)
