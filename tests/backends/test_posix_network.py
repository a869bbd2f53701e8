"""What the posix backend does for file systems that other machines share: on a local disk that says that it is one.

The real thing runs in ``tests/rigs/nfs``.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfmt.backends.posix import PosixBackend, PosixOptions
from ckptfmt.errors import BackendError, NotFound, Unavailable
from ckptfmt.testing.syscalls import SystemCall, WatchedSyscalls

DATA = random.Random(0).randbytes(100_001)
NFS = 0x6969


class Shared(WatchedSyscalls):
    """Calls on a disk that is taken for NFS."""

    def file_system_type(self, path: str) -> int | None:
        return NFS


def opened(root: Path, calls: WatchedSyscalls, options: PosixOptions | None = None) -> PosixBackend:
    backend = PosixBackend(root, options, syscalls=calls)
    backend.create_root()
    backend.make_folder("f")
    calls.clear()
    return backend


def put(backend: PosixBackend, key: str, step: int = 4096) -> None:
    writer = backend.open_writer(key, len(DATA))
    for at in range(0, len(DATA), step):
        writer.write_at(at, DATA[at : at + step])
    writer.finish()


def read_range(backend: PosixBackend, key: str) -> bytes:
    page = mmap.mmap(-1, len(DATA))
    backend.read_into(key, 0, memoryview(page))
    return page[:]


READS: dict[str, Callable[[PosixBackend], bytes]] = {
    "read": lambda backend: backend.read("f/x", limit=len(DATA)),
    "read_into": lambda backend: read_range(backend, "f/x"),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("call", ["open", "fstat", "pread_into"])
def test_a_stale_handle_is_opened_anew_a_few_times(
    tmp_path: Path, call: str, read: Callable[[PosixBackend], bytes]
) -> None:
    """FR-097: readers of an object on NFS got ESTALE."""
    calls = WatchedSyscalls()
    backend = opened(tmp_path, calls)
    backend.create("f/x", DATA)
    calls.fail(call, errno.ESTALE, path="f/x", times=2)
    assert read(backend) == DATA
    calls.fail(call, errno.ESTALE, path="f/x")
    calls.clear()
    with pytest.raises(Unavailable, match=r"f/x.*ESTALE") as caught:
        read(backend)
    assert (caught.value.errno, caught.value.transient) == (errno.ESTALE, True)
    assert len(calls.trace(call)) < 10
    assert calls.left_open == []


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_an_input_error_is_tried_once_more_where_it_may_mean_a_stale_handle(
    tmp_path: Path, read: Callable[[PosixBackend], bytes]
) -> None:
    for calls, tries in ((Shared(), 2), (WatchedSyscalls(), 1)):
        backend = opened(tmp_path, calls)
        backend.create("f/x", DATA)
        calls.clear()
        calls.fail("pread_into", errno.EIO, path="f/x")
        with pytest.raises(BackendError, match="f/x") as caught:
            read(backend)
        assert (caught.value.errno, caught.value.kind) == (errno.EIO, "io_error")
        assert len(calls.trace("pread_into")) == tries
        backend.delete("f/x")


@pytest.mark.parametrize("call", ["lstat", "scandir", "unlink"])
def test_looks_and_deletes_survive_a_stale_folder(tmp_path: Path, call: str) -> None:
    calls = WatchedSyscalls()
    backend = opened(tmp_path, calls)
    backend.create("f/x", DATA)
    calls.fail(call, errno.ESTALE, times=2)
    assert backend.head("f/x").nbytes == len(DATA)
    assert [info.key for info in backend.list("")] == ["f/x"]
    backend.delete("f/x")
    assert list((tmp_path / "f").iterdir()) == []


def test_the_server_is_asked_before_an_absence_is_told_but_not_for_what_is_there(tmp_path: Path) -> None:
    calls = Shared()
    backend = opened(tmp_path, calls)
    backend.create("f/x", DATA)
    calls.clear()
    assert backend.read("f/x", limit=len(DATA)) == DATA
    assert calls.trace("lstat_fresh") == []
    with pytest.raises(NotFound):
        backend.read("f/y", limit=1)
    assert calls.trace("lstat_fresh", "open")[-3:] == [("open", "y"), ("lstat_fresh", "f"), ("open", "y")]


def test_a_local_disk_is_not_asked(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    backend = opened(tmp_path, calls)
    put(backend, "f/x")
    backend.create("f/y", DATA)
    backend.delete("f/z")
    assert backend.head("f/x").nbytes == len(DATA)
    with pytest.raises(NotFound):
        backend.read("f/z", limit=1)
    if not backend.traits.local:
        pytest.skip("the tests' folder is not on a local disk")
    assert calls.trace("lstat_fresh", "drop_cache", "pread_into") == []


def test_an_object_comes_into_being_between_the_look_and_the_question(tmp_path: Path) -> None:
    calls = Shared()
    backend = opened(tmp_path, calls)

    def appear(call: SystemCall) -> None:
        if call.name == "lstat_fresh" and call.path.endswith("/f"):
            (tmp_path / "f/x").write_bytes(DATA)

    calls.on_call(appear)
    assert backend.read("f/x", limit=len(DATA)) == DATA


# -- reading back -----------------------------------------------------------------------------------
@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("step", [8192, 100_001, 777])
def test_what_was_written_is_read_back_through_a_descriptor_of_its_own(
    tmp_path: Path, step: int, direct: bool | None
) -> None:
    calls = Shared()
    backend = opened(tmp_path, calls, PosixOptions(direct=direct))
    put(backend, "f/x", step)
    trace = calls.trace("fsync", "open", "pread_into", "close")
    synced = trace.index(("fsync", "x"))
    read = trace.index(("pread_into", "x"))
    assert ("open", "x") in trace[synced:read]
    assert trace[-3:] == [("open", "f"), ("fsync", "f"), ("close", "f")]  # only then its name counts
    assert calls.trace("drop_cache") == ([("drop_cache", "x")] if direct is False else [])
    assert calls.left_open == []


@pytest.mark.parametrize("longest", [7, 4096, 5000])
def test_short_reads_are_continued_when_reading_back(tmp_path: Path, longest: int) -> None:
    backend = opened(tmp_path, Shared(longest=longest))
    put(backend, "f/x", 8192)
    backend.create("f/y", DATA[:5000])
    assert backend.read("f/y", limit=5000) == DATA[:5000]


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("spoil", ["flip", "cut", "grow"])
@pytest.mark.parametrize("way", ["writer", "create"])
def test_other_bytes_are_never_durable(tmp_path: Path, way: str, spoil: str, direct: bool | None) -> None:
    calls = Shared()
    backend = opened(tmp_path, calls, PosixOptions(direct=direct))
    spoilt: list[str] = []

    def damage(call: SystemCall) -> None:
        if (
            call.name != "open"
            or not os.path.isfile(call.path)
            or ("fsync", os.path.basename(call.path)) not in (calls.trace("fsync"))
        ):
            return
        with open(call.path, "r+b") as file:
            if spoil == "flip":
                file.seek(70_000)
                file.write(bytes([DATA[70_000] ^ 1]))
            else:
                file.truncate(len(DATA) + (1 if spoil == "grow" else -1))
        spoilt.append(call.path)

    calls.on_call(damage)
    with pytest.raises(BackendError, match="f/x") as caught:
        put(backend, "f/x") if way == "writer" else backend.create("f/x", DATA)
    assert len(spoilt) == 1
    assert (caught.value.kind, caught.value.transient) == ("read_back", True)
    assert way == "writer" or list((tmp_path / "f").iterdir()) == []
    assert calls.left_open == []


def test_reading_back_can_be_asked_for_and_left_out(tmp_path: Path) -> None:
    for calls, wanted, reads in ((Shared(), False, False), (Shared(), None, True), (WatchedSyscalls(), True, True)):
        backend = opened(tmp_path, calls, PosixOptions(read_back=wanted))
        put(backend, "f/x")
        assert bool(calls.trace("pread_into")) == reads
        assert ("read back" in backend.traits.durable) == reads or not backend.traits.survives_power_loss
        backend.delete("f/x")


def test_no_path_is_resolved_for_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(tmp_path, WatchedSyscalls())
    backend.create("f/x", DATA)
    monkeypatch.setattr(os.path, "realpath", None)
    assert backend.read("f/x", limit=len(DATA)) == DATA
    assert backend.head("f/x").nbytes == len(DATA)
