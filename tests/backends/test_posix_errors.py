"""Whatever errno the kernel gives, an error of ckptfmt names the operation, the path and the next step."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfmt.backends.posix import PosixBackend
from ckptfmt.backends.posix_errors import Room, translate
from ckptfmt.errors import (
    AccessDenied,
    BackendError,
    CkptError,
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    OutOfSpace,
    Unavailable,
)
from ckptfmt.testing.syscalls import SYSTEM_CALLS, WatchedSyscalls

EXPECTED: dict[int, type[CkptError]] = {
    errno.ENOSPC: OutOfSpace,
    errno.EDQUOT: OutOfSpace,
    errno.EACCES: AccessDenied,
    errno.EPERM: AccessDenied,
    errno.EROFS: AccessDenied,
    errno.ELOOP: AccessDenied,
    errno.ENOENT: NotFound,
    errno.ENOTDIR: NotFound,
    errno.EEXIST: Conflict,
    errno.ENAMETOOLONG: InvalidInput,
    errno.EIO: BackendError,
    errno.EFBIG: BackendError,
    errno.ENXIO: BackendError,
    errno.EINVAL: BackendError,
    errno.ESTALE: Unavailable,
    errno.ETIMEDOUT: Unavailable,
    errno.EAGAIN: Unavailable,
    errno.EINTR: Unavailable,
    errno.EMFILE: Unavailable,
    errno.ENFILE: Unavailable,
    errno.ENOMEM: Unavailable,
    errno.EBUSY: Unavailable,
    errno.EHOSTDOWN: Unavailable,
    errno.ENOLCK: Unavailable,
}

ONE_OF_EACH = (
    errno.ENOSPC,
    errno.EACCES,
    errno.ENOENT,
    errno.EEXIST,
    errno.ELOOP,
    errno.EINVAL,
    errno.EIO,
    errno.ESTALE,
)


HANDLED = (errno.ENOSPC, errno.ENOENT, errno.EEXIST, errno.EINVAL, errno.EIO, errno.ESTALE)
"""Those that lead somewhere in the backend's own code; the others are only translated."""


@pytest.mark.parametrize("code", sorted(errno.errorcode))
def test_every_errno_has_a_meaning(code: int) -> None:
    error = translate(OSError(code, os.strerror(code)), "write", "/r/f/x", offset=7, needed=10, free=lambda: Room(3, 7))
    if code in EXPECTED:
        assert type(error) is EXPECTED[code]
    else:
        assert isinstance(error, BackendError)
    message = str(error)
    assert message.startswith("write /r/f/x")
    assert code == errno.ELOOP or ("offset 7" in message and os.strerror(code) in message)
    assert len(message.split(";")) >= 2  # what happened; what to do next
    assert error.transient == (isinstance(error, Unavailable) or code == errno.EIO)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.kind) == (type(error), message, error.kind)


def test_no_space_tells_needed_and_free_but_a_quota_has_no_free() -> None:
    full = translate(OSError(errno.ENOSPC, "x"), "write", "/p", needed=10, free=lambda: Room(3, 7))
    assert isinstance(full, OutOfSpace)
    assert (full.needed, full.free) == (10, 3)
    assert "needed 10 bytes, free 3 bytes" in str(full)
    crowded = translate(OSError(errno.ENOSPC, "x"), "write", "/p", needed=10, free=lambda: Room(999, 0))
    assert "free 999 bytes but no inodes" in str(crowded)
    quota = translate(OSError(errno.EDQUOT, "x"), "write", "/p", needed=10, free=lambda: Room(3, 7))
    assert isinstance(quota, OutOfSpace)
    assert (quota.needed, quota.free) == (10, None)
    assert "quota" in str(quota)


def test_io_errors_have_their_own_kind() -> None:
    error = translate(OSError(errno.EIO, "x"), "read", "/p")
    assert (error.kind, error.transient) == ("io_error", True)


def scenario(backend: PosixBackend) -> None:
    """Use every method once, with each way of writing."""
    page = mmap.mmap(-1, 16_384)
    backend.create_root()
    backend.make_folder("f/g")
    backend.create("f/x", b"data")
    backend.create("f/x", b"data")
    writer = backend.open_writer("f/y", 10_000)
    try:
        writer.write_at(0, memoryview(page)[:8192])
        writer.write_at(8192, memoryview(page)[8192:10_000])
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    backend.open_writer("f/z", 10).abort()
    backend.read_into("f/y", 0, memoryview(page)[:10_000])
    backend.read("f/x", limit=10)
    backend.head("f/x")
    backend.has_folder("f")
    backend.list("")
    backend.list_folders("")
    backend.sweep_debris("", dry_run=False)
    backend.delete("f/x")
    assert backend.space()
    assert backend.traits.scheme == "file"


@pytest.mark.parametrize("name", SYSTEM_CALLS)
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=errno.errorcode[code], marks=() if code in HANDLED else pytest.mark.slow)
        for code in ONE_OF_EACH
    ],
)
def test_no_bare_oserror_escapes_and_no_descriptor_leaks(tmp_path: Path, name: str, code: int) -> None:
    nth = 0
    while True:
        nth += 1
        calls = WatchedSyscalls()
        calls.fail(name, code, nth=nth, times=1)
        with contextlib.suppress(CkptError):
            scenario(PosixBackend(tmp_path / str(nth), syscalls=calls))
        assert calls.left_open == []
        if sum(call.name == name for call in calls.calls) < nth:
            break
        assert nth < 60


def broken(code: int, name: str, *, nth: int | None = None) -> Callable[[Path], PosixBackend]:
    def build(root: Path) -> PosixBackend:
        calls = WatchedSyscalls()
        backend = PosixBackend(root, syscalls=calls)
        backend.create_root()
        backend.make_folder("f")
        calls.clear()
        calls.fail(name, code, nth=nth)
        return backend

    return build


@pytest.mark.parametrize(
    ("name", "nth"), [("pwrite", None), ("ftruncate", None), ("fsync", 1), ("fsync", 2), ("close", 1), ("close", 2)]
)
def test_after_an_error_the_writer_is_dead_and_abort_removes_the_file(tmp_path: Path, name: str, nth: int) -> None:
    backend = broken(errno.EIO, name, nth=nth)(tmp_path / "root")
    writer = backend.open_writer("f/x", 5)
    with pytest.raises(BackendError, match="f/x"):  # noqa: PT012 - either call may be the one that fails
        writer.write_at(0, b"12345")
        writer.finish()
    calls = backend._sys
    assert isinstance(calls, WatchedSyscalls)
    syncs = len(calls.trace("fsync"))
    for action in (writer.finish, lambda: writer.write_at(0, b"12345")):
        with pytest.raises(InvalidInput, match="new name"):
            action()
    assert len(calls.trace("fsync")) == syncs  # a failed sync is never repeated
    writer.abort()
    assert list((tmp_path / "root/f").iterdir()) == []
    assert calls.left_open == []


@pytest.mark.parametrize("name", ["pwrite", "fsync", "close", "link"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failed_create_leaves_nothing_and_may_be_repeated(tmp_path: Path, name: str, code: int) -> None:
    calls = WatchedSyscalls()
    backend = PosixBackend(tmp_path, syscalls=calls)
    backend.create_root()
    calls.clear()
    calls.fail(name, code, nth=1, times=1)
    with pytest.raises(BackendError, match=r"create .*/x"):
        backend.create("x", b"data")
    assert list(tmp_path.iterdir()) == []
    backend.create("x", b"data")
    assert (tmp_path / "x").read_bytes() == b"data"


def test_a_lost_folder_sync_after_link_is_healed_by_repeating(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    backend = PosixBackend(tmp_path, syscalls=calls)
    backend.create_root()
    calls.clear()
    calls.fail("fsync", errno.EIO, nth=2, times=1)
    with pytest.raises(BackendError):
        backend.create("x", b"data")
    calls.clear()
    backend.create("x", b"data")
    assert calls.trace("fsync")[-1] == ("fsync", tmp_path.name)


def test_a_write_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    calls = WatchedSyscalls(longest=0)
    backend = PosixBackend(tmp_path, syscalls=calls)
    backend.create_root()
    with pytest.raises(BackendError, match="no bytes"):
        backend.create("x", b"data")
    writer = backend.open_writer("y", 4)
    with pytest.raises(BackendError, match="no bytes"):
        writer.write_at(0, b"data")
    writer.abort()


def test_a_file_cut_while_it_is_read_is_corrupt(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    backend = PosixBackend(tmp_path, syscalls=calls)
    (tmp_path / "x").write_bytes(bytes(100_000))
    calls.on_call(lambda call: os.truncate(tmp_path / "x", 5000) if call.name == "pread_into" else None)
    with pytest.raises(Corrupt, match="expected 100000 bytes, found 5000"):
        backend.read_into("x", 0, memoryview(bytearray(100_000)))


def test_abort_waits_for_running_writes(tmp_path: Path) -> None:
    """A descriptor closed under a running write could already be another file's."""
    calls = WatchedSyscalls()
    backend = PosixBackend(tmp_path, syscalls=calls)
    backend.create_root()
    inside, go = threading.Event(), threading.Event()

    def stop(call: object) -> None:
        if getattr(call, "name", "") == "pwrite":
            inside.set()
            assert go.wait(10)

    calls.on_call(stop)
    writer = backend.open_writer("x", 4)
    thread = threading.Thread(target=writer.write_at, args=(0, b"data"))
    thread.start()
    assert inside.wait(10)
    aborting = threading.Thread(target=writer.abort)
    aborting.start()
    aborting.join(0.05)
    assert aborting.is_alive()
    assert calls.trace("close") == [("close", calls.trace("open")[0][1])]  # only create_root's probe
    go.set()
    thread.join(10)
    aborting.join(10)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_close_does_not_hide_the_one_before_it(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    backend = PosixBackend(tmp_path, syscalls=calls)
    backend.create_root()
    calls.fail("close", errno.EIO)
    calls.fail("fsync", errno.EDQUOT, times=1)
    with pytest.raises(OutOfSpace, match="quota"):
        backend.create("x", b"data")
    writer = backend.open_writer("y", 4)
    writer.write_at(0, b"data")
    calls.fail("fsync", errno.EDQUOT, times=1)
    with pytest.raises(OutOfSpace, match="quota"):
        writer.finish()
    with contextlib.suppress(BackendError):  # the folder's descriptor doesn't close well either
        writer.abort()
    assert calls.left_open == []


def test_an_error_of_close_says_nothing_of_bytes_that_were_read(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    backend = PosixBackend(tmp_path, syscalls=calls)
    backend.create("x", b"data")
    calls.fail("close", errno.EIO)
    assert backend.read("x", limit=4) == b"data"
    into = bytearray(4)
    backend.read_into("x", 0, memoryview(into))
    assert into == b"data"
    assert calls.left_open == []


def test_an_object_that_is_there_needs_no_room(tmp_path: Path) -> None:
    """Verdicts are created again before anything is deleted: on a full disk nothing could be freed otherwise."""
    calls = WatchedSyscalls()
    backend = PosixBackend(tmp_path, syscalls=calls)
    backend.create("x", b"data")
    for name in ("pwrite", "open"):
        calls.fail(name, errno.ENOSPC, path=".ckptfmt-tmp-")
        backend.create("x", b"data")
        with pytest.raises(Conflict, match="taken by other bytes"):
            backend.create("x", b"else")
        with pytest.raises(OutOfSpace, match=r"create .*/y"):
            backend.create("y", b"data")
    backend.create_root()  # and whoever wants to free space gets in
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("left", [b"", b"who"])
def test_what_a_killed_writer_left_is_no_conflict_on_a_full_disk(tmp_path: Path, left: bytes) -> None:
    """Written in place, a beginning is completed once there is room: "choose another name" would be wrong advice."""
    calls = WatchedSyscalls()
    calls.fail("link", errno.EOPNOTSUPP)
    calls.fail("rename_noreplace", errno.ENOSYS)
    backend = PosixBackend(tmp_path, syscalls=calls)
    (tmp_path / "x").write_bytes(left)
    for name in ("pwrite", "open"):
        calls.fail(name, errno.ENOSPC, path=".ckptfmt-tmp-", times=1)
        with pytest.raises(OutOfSpace, match=r"create .*/x"):
            backend.create("x", b"whole")
        assert (tmp_path / "x").read_bytes() == left
    backend.create("x", b"whole")
    assert (tmp_path / "x").read_bytes() == b"whole"
    calls.fail("open", errno.ENOSPC, path=".ckptfmt-tmp-")
    for other in (b"who", b"whose", b"where!"):
        with pytest.raises(Conflict, match="taken by other bytes"):
            backend.create("x", other)
    assert calls.left_open == []


def test_a_folder_that_cannot_be_looked_at_is_no_file_in_the_way(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    backend = PosixBackend(tmp_path, syscalls=calls)
    backend.make_folder("f")
    calls.fail("lstat", errno.EIO)
    for action in (lambda: backend.make_folder("f"), backend.create_root, lambda: backend.has_folder("f")):
        with pytest.raises(BackendError, match="Input/output error") as caught:
            action()
        assert (caught.value.kind, caught.value.transient) == ("io_error", True)
