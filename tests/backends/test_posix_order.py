"""In which order the posix backend asks the kernel for what, and what it does when calls fall short."""

from __future__ import annotations

import errno
import mmap
import random
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptfmt.backends.posix import PosixBackend, PosixOptions
from ckptfmt.errors import AccessDenied, BackendError, CkptError, Conflict, OutOfSpace
from ckptfmt.testing.backend_rig import at_once
from ckptfmt.testing.syscalls import WatchedSyscalls

ORDER = ("mkdir", "open", "pwrite", "fallocate", "ftruncate", "fsync", "close", "link", "rename_noreplace", "unlink")


def aligned(nbytes: int, seed: int = 0) -> memoryview:
    """Return page-aligned memory with random content."""
    page = mmap.mmap(-1, max(1, nbytes))
    page[:nbytes] = random.Random(seed).randbytes(nbytes)
    return memoryview(page)[:nbytes]


def opened(tmp_path: Path, calls: WatchedSyscalls, direct: bool | None = None) -> PosixBackend:
    backend = PosixBackend(tmp_path / "root", PosixOptions(direct=direct), syscalls=calls)
    backend.create_root()
    backend.make_folder("f")
    calls.clear()
    return backend


def write(backend: PosixBackend, key: str, data: memoryview, step: int) -> None:
    writer = backend.open_writer(key, len(data))
    try:
        for at in range(0, len(data), step):
            writer.write_at(at, data[at : at + step])
        writer.finish()
    except CkptError:
        writer.abort()
        raise


def test_create_syncs_data_before_the_name_and_the_folder_after(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    opened(tmp_path, calls).create("f/x", b"data")
    trace = calls.trace(*ORDER)
    temporary = trace[0][1]
    assert temporary.startswith(".ckptfmt-tmp-")
    assert trace == [
        ("open", temporary),
        ("pwrite", temporary),
        ("fsync", temporary),
        ("close", temporary),
        ("link", "x"),
        ("unlink", temporary),
        ("open", "f"),
        ("fsync", "f"),
        ("close", "f"),
    ]


def test_finish_cuts_then_syncs_the_file_then_the_folder(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    write(opened(tmp_path, calls), "f/x", aligned(10_000), 4096)
    trace = calls.trace("fallocate", "pwrite", "ftruncate", "fsync", "close")
    assert trace[0] == ("fallocate", "x")
    assert trace[1:4] == [("pwrite", "x")] * 3
    assert trace[4:6] == [("ftruncate", "x"), ("fsync", "x")]
    assert trace[-2:] == [("fsync", "f"), ("close", "f")]
    assert trace[6:-2] == [("close", "x")] * (len(trace) - 8)
    assert trace.count(("fsync", "x")) == 1


def test_folders_are_synced_into_their_parents(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    backend = PosixBackend(tmp_path / "new" / "root", syscalls=calls)
    backend.create_root()
    assert calls.trace("mkdir", "fsync") == [
        ("mkdir", "new"),
        ("fsync", tmp_path.name),
        ("mkdir", "root"),
        ("fsync", "new"),
    ]
    calls.clear()
    backend.make_folder("a/b")
    assert calls.trace("mkdir", "fsync") == [("mkdir", "a"), ("fsync", "root"), ("mkdir", "b"), ("fsync", "a")]


def test_delete_syncs_the_folder(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    backend = opened(tmp_path, calls)
    backend.create("f/x", b"1")
    calls.clear()
    backend.delete("f/x")
    assert calls.trace("unlink", "fsync") == [("unlink", "x"), ("fsync", "f")]


@pytest.mark.parametrize(("direct", "longest"), [(False, 7), (None, 4096), (None, 5000), (None, 7)])
def test_short_reads_and_writes_are_continued(tmp_path: Path, direct: bool | None, longest: int) -> None:
    calls = WatchedSyscalls(longest=longest)
    backend = opened(tmp_path, calls, direct)
    data = aligned(9_003)
    write(backend, "f/x", data, 8192)
    assert (tmp_path / "root/f/x").read_bytes() == data
    back = aligned(9_003, seed=1)
    backend.read_into("f/x", 0, back)
    assert back == data
    backend.create("f/y", data[:100])
    assert (tmp_path / "root/f/y").read_bytes() == data[:100]
    assert calls.left_open == []


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_fallocate_a_sparse_file_serves(tmp_path: Path, code: int) -> None:
    calls = WatchedSyscalls()
    calls.fail("fallocate", code)
    data = aligned(10_001)
    write(opened(tmp_path, calls), "f/x", data, 4096)
    assert (tmp_path / "root/f/x").read_bytes() == data


def test_fallocate_finds_a_full_disk_before_any_byte_is_written(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    calls.fail("fallocate", errno.ENOSPC)
    backend = opened(tmp_path, calls)
    with pytest.raises(OutOfSpace, match="needed 10000 bytes, free") as caught:
        backend.open_writer("f/x", 10_000)
    assert (caught.value.needed, caught.value.errno) == (10_000, errno.ENOSPC)
    assert caught.value.free is not None
    assert calls.trace("pwrite") == []
    assert list((tmp_path / "root/f").iterdir()) == []
    assert calls.left_open == []


def test_preflight_refuses_what_cannot_fit(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    backend = opened(tmp_path, calls)
    free = backend.space()
    assert free is not None
    with pytest.raises(OutOfSpace) as caught:
        backend.open_writer("f/x", free + 2**40)
    assert caught.value.needed == free + 2**40
    assert calls.trace("open") == []


class TestDirect:
    """Direct I/O where it is had, and the ways round it."""

    def test_aligned_blocks_and_the_padded_tail_go_past_the_cache(self, tmp_path: Path) -> None:
        calls = WatchedSyscalls()
        backend = opened(tmp_path, calls)
        write(backend, "f/x", aligned(3 * 4096 + 5), 8192)
        if calls.trace("open").count(("open", "x")) == 1:
            pytest.skip("this file system has no direct I/O")
        assert backend.head("f/x").nbytes == 3 * 4096 + 5
        assert len(calls.trace("pwrite")) == 3

    @pytest.mark.parametrize("where", ["open", "write"])
    def test_refused_direct_io_falls_back_and_is_remembered(self, tmp_path: Path, where: str) -> None:
        calls = WatchedSyscalls()
        backend = opened(tmp_path, calls)
        if where == "open":
            calls.fail("open", errno.EINVAL, nth=2, times=1)
        else:
            calls.fail("pwrite", errno.EINVAL, nth=1, times=1)
        data = aligned(20_000)
        write(backend, "f/x", data, 8192)
        assert (tmp_path / "root/f/x").read_bytes() == data
        calls.clear()
        write(backend, "f/y", data, 8192)
        assert calls.trace("open") == [("open", "y"), ("open", "f")]
        assert calls.left_open == []

    def test_a_kernel_that_tells_no_alignment_is_tried(self, tmp_path: Path) -> None:
        calls = WatchedSyscalls()
        calls.direct_alignment = lambda descriptor: None  # type: ignore[method-assign]
        data = aligned(20_000)
        write(opened(tmp_path, calls), "f/x", data, 4096)
        assert (tmp_path / "root/f/x").read_bytes() == data
        assert calls.trace("open").count(("open", "x")) == 2

    def test_direct_true_is_an_error_where_it_is_refused(self, tmp_path: Path) -> None:
        calls = WatchedSyscalls()
        backend = opened(tmp_path, calls, direct=True)
        calls.fail("open", errno.EINVAL, nth=2)
        with pytest.raises(BackendError, match="direct I/O") as caught:
            backend.open_writer("f/x", 4096)
        assert caught.value.kind == "direct_refused"
        assert list((tmp_path / "root/f").iterdir()) == []
        assert calls.left_open == []

    def test_unaligned_memory_and_offsets_are_written_all_the_same(self, tmp_path: Path) -> None:
        backend = opened(tmp_path, WatchedSyscalls())
        data = aligned(100_001)
        writer = backend.open_writer("f/x", 100_000)
        cuts = [0, 4096, 4100, 20_480, 24_576, 65_536, 99_999, 100_000]
        for start, stop in pairwise(cuts):
            writer.write_at(start, data[start + 1 : stop + 1])
        writer.finish()
        assert (tmp_path / "root/f/x").read_bytes() == data[1:]

    @pytest.mark.parametrize("cachestat", [None, errno.ENOSYS, errno.EPERM])
    @pytest.mark.parametrize("cached", [True, False])
    def test_reads_are_right_in_and_out_of_the_cache(self, tmp_path: Path, cachestat: int | None, cached: bool) -> None:
        calls = WatchedSyscalls()
        backend = opened(tmp_path, calls)
        data = aligned(300_001)
        write(backend, "f/x", data, 8192)
        if cachestat:
            calls.fail("cached_pages", cachestat)
        if cached:
            (tmp_path / "root/f/x").read_bytes()
        for offset, nbytes in ((0, 300_001), (8192, 65_536), (8192, 65_537), (5, 4096), (299_008, 993)):
            back = aligned(nbytes, seed=1)
            backend.read_into("f/x", offset, back)
            assert back == data[offset : offset + nbytes]

    @pytest.mark.parametrize("name", ["set_direct", "pread_into"])
    def test_refused_direct_reads_fall_back(self, tmp_path: Path, name: str) -> None:
        calls = WatchedSyscalls()
        backend = opened(tmp_path, calls)
        data = aligned(65_536)
        write(backend, "f/x", data, 8192)
        calls.fail("cached_pages", errno.ENOSYS)
        calls.fail("pread_cached", errno.EAGAIN)
        calls.fail(name, errno.EINVAL, nth=1)
        back = aligned(65_536, seed=1)
        backend.read_into("f/x", 0, back)
        assert back == data


class TestCreateWithoutLinks:
    """File systems without hard links, and without an exclusive rename either."""

    @pytest.fixture(params=["rename", "in place"])
    def backend(self, tmp_path: Path, request: pytest.FixtureRequest) -> PosixBackend:
        calls = WatchedSyscalls()
        calls.fail("link", errno.EPERM)
        if request.param == "in place":
            calls.fail("rename_noreplace", errno.EINVAL)
        return opened(tmp_path, calls)

    def test_create_is_still_exact_and_exclusive(self, backend: PosixBackend, tmp_path: Path) -> None:
        backend.create("f/x", b"same")
        backend.create("f/x", b"same")
        for other in (b"", b"sam", b"SAME", b"SAME!"):
            with pytest.raises(Conflict):
                backend.create("f/x", other)
        assert (tmp_path / "root/f/x").read_bytes() == b"same"
        assert [entry.name for entry in (tmp_path / "root/f").iterdir()] == ["x"]

    def test_one_of_many_wins(self, backend: PosixBackend, tmp_path: Path) -> None:
        offers = [bytes([n]) * (100 + n) for n in range(16)]
        results = at_once([partial(backend.create, "f/x", data) for data in offers])
        won = [data for data, result in zip(offers, results, strict=True) if result is None]
        assert won == [(tmp_path / "root/f/x").read_bytes()]
        assert all(isinstance(result, Conflict) for result in results if result is not None)


def test_in_place_create_completes_the_beginning_a_dead_writer_left(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    calls.fail("link", errno.EOPNOTSUPP)
    calls.fail("rename_noreplace", errno.ENOSYS)
    backend = opened(tmp_path, calls)
    for left, want in ((b"", b"whole"), (b"who", b"whole"), (b"whole", b"whole")):
        path = tmp_path / "root/f/x"
        path.write_bytes(left)
        backend.create("f/x", want)
        assert path.read_bytes() == want
        path.unlink()


def test_symbolic_links_below_the_root_are_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = opened(tmp_path, WatchedSyscalls())
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"secret")
    (tmp_path / "root/link").symlink_to(outside)
    (tmp_path / "root/f/x").symlink_to(outside / "x")
    calls: list[Any] = [
        lambda: backend.read("link/x", limit=100),
        lambda: backend.create("link/y", b"1"),
        lambda: backend.open_writer("link/y", 1),
        lambda: backend.list("link"),
        lambda: backend.delete("link/x"),
        lambda: backend.make_folder("link/z"),
        lambda: backend.read("f/x", limit=100),
        lambda: backend.head("f/x"),
        lambda: backend.create("f/x", b"secret"),
    ]
    for call in calls:
        with pytest.raises(AccessDenied, match="symbolic link"):
            call()
    assert [entry.name for entry in outside.iterdir()] == ["x"]
    assert backend.list("") == []
    assert backend.list_folders("") == ["f"]
    assert caplog.text.count("is not followed, and not listed") == 2


def test_a_root_behind_a_symbolic_link_is_its_owners_choice(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    backend = PosixBackend(tmp_path / "link")
    backend.create_root()
    backend.make_folder("f")
    backend.create("f/x", b"1")
    assert (tmp_path / "real/f/x").read_bytes() == b"1"


def test_listing_leaves_out_the_catalog_and_what_is_no_key(tmp_path: Path) -> None:
    backend = opened(tmp_path, WatchedSyscalls())
    root = tmp_path / "root"
    for name in ("catalog.sqlite", "catalog.sqlite-journal", ".nfs0000ab12", "f/.nfs0000ab12", "f/ä", "f/a b"):
        (root / name).write_bytes(b"x")
    (root / "lost+found").mkdir()
    (root / "f/catalog.sqlite").write_bytes(b"x")
    assert [info.key for info in backend.list("")] == ["f/catalog.sqlite"]
    assert backend.list_folders("") == ["f"]


def test_constructing_touches_nothing(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    backend = PosixBackend(tmp_path / "absent", syscalls=calls)
    assert backend.list("") == backend.list_folders("") == []
    assert not backend.has_folder("")
    assert backend.traits.scheme == "file"
    assert backend.space()
    assert not (tmp_path / "absent").exists()


def test_sweep_removes_what_killed_creates_left(tmp_path: Path) -> None:
    backend = opened(tmp_path, WatchedSyscalls())
    backend.make_folder("f/g")
    backend.create("f/x", b"1")
    for place in ("f", "f/g"):
        (tmp_path / "root" / place / ".ckptfmt-tmp-1-00ff").write_bytes(b"half")
    assert [info.key for info in backend.list("")] == ["f/x"]
    expected = ["f/.ckptfmt-tmp-1-00ff", "f/g/.ckptfmt-tmp-1-00ff"]
    assert [info.key for info in backend.sweep_debris("f", dry_run=True)] == expected
    assert [info.nbytes for info in backend.sweep_debris("f", dry_run=False)] == [4, 4]
    assert backend.sweep_debris("", dry_run=True) == []
    assert backend.read("f/x", limit=1) == b"1"


def test_sweep_takes_no_more_than_it_is_told(tmp_path: Path) -> None:
    backend = opened(tmp_path, WatchedSyscalls())
    backend.make_folder("f/g")
    left = [f"{place}.ckptfmt-tmp-1-00ff" for place in ("", "f/", "f/g/")]
    for key in left:
        (tmp_path / "root" / key).write_bytes(b"half")

    def keys(prefix: str, **options: Any) -> list[str]:
        return [info.key for info in backend.sweep_debris(prefix, **options)]

    assert keys("", dry_run=True, deep=False) == left[:1]
    assert keys("f", dry_run=True, deep=False) == left[1:2]
    assert keys("f", dry_run=False, only={left[2], left[0]}) == left[2:]
    assert keys("", dry_run=False, only=set()) == []
    assert keys("", dry_run=False, deep=False) == left[:1]
    assert keys("", dry_run=True) == left[1:2]


def test_unknown_options_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"dirct": True}, PosixOptions)
