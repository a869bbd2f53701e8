"""The posix backend in real places that say no: full, read-only, forbidden, limited; and killed in the middle."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ckptfmt.backends.posix import PosixBackend, PosixOptions
from ckptfmt.errors import AccessDenied, BackendError, Conflict, OutOfSpace
from ckptfmt.ports.backend import Backend
from ckptfmt.testing.syscalls import WatchedSyscalls

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mount a tmpfs with the given options; skip where that is not allowed."""
    mounted: list[Path] = []

    def do(options: str) -> Path:
        place = tmp_path / f"mount{len(mounted)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"can't mount a tmpfs here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield do
    for place in mounted:
        subprocess.run(["umount", place], check=True)


def run_forked(work: Callable[[], None]) -> int:
    """Run ``work`` in a fork of this process, which has all modules loaded; return its exit code."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_child(program: str, *arguments: str | Path) -> None:
    """Run a program in another process."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def opened(root: Path, direct: bool | None = None) -> PosixBackend:
    backend = PosixBackend(root, PosixOptions(direct=direct))
    backend.create_root()
    return backend


def test_a_full_disk_is_found_before_anything_is_written(mount: Mount) -> None:
    backend = opened(mount("size=1m"))
    start = time.monotonic()
    with pytest.raises(OutOfSpace, match=r"needed 2097152 bytes, free \d+ bytes") as caught:
        backend.open_writer("x", 2 << 20)
    assert time.monotonic() - start < 1
    assert caught.value.needed == 2 << 20
    assert caught.value.free is not None
    assert caught.value.free <= 1 << 20
    assert backend.list("") == []


def test_a_disk_that_fills_up_later_is_out_of_space_too(mount: Mount) -> None:
    place = mount("size=1m")
    backend = opened(place)
    first = backend.open_writer("x", 600 << 10)  # reserved, so the second finds no room
    with pytest.raises(OutOfSpace):
        backend.open_writer("y", 600 << 10)
    with pytest.raises(OutOfSpace, match="create"):
        backend.create("z", bytes(600 << 10))
    first.write_at(0, bytes(600 << 10))
    first.finish()
    assert [entry.name for entry in place.iterdir()] == ["x"]
    backend.delete("x")
    backend.create("z", bytes(600 << 10))


def test_no_inodes_left_is_out_of_space(mount: Mount) -> None:
    backend = opened(mount("size=1m,nr_inodes=5"))
    with pytest.raises(OutOfSpace, match="No space left"):  # noqa: PT012 - one of them is too many
        for n in range(6):
            backend.create(f"x{n}", b"1")
    assert [info.key for info in backend.list("")] == [f"x{n}" for n in range(len(backend.list("")))]
    assert backend.sweep_debris("", dry_run=True) == []


def test_a_read_only_file_system_is_access_denied(mount: Mount) -> None:
    place = mount("size=1m")
    opened(place).create("x", b"1")
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    backend = PosixBackend(place)
    for call in (
        backend.create_root,
        lambda: backend.create("y", b"1"),
        lambda: backend.open_writer("y", 1),
        lambda: backend.make_folder("f"),
        lambda: backend.delete("x"),
    ):
        with pytest.raises(AccessDenied, match="read-only"):
            call()
    assert backend.read("x", limit=1) == b"1"


def test_memory_file_systems_promise_nothing(mount: Mount) -> None:
    traits = opened(mount("size=1m")).traits
    assert traits.local
    assert not traits.survives_power_loss
    assert "memory" in traits.durable


@pytest.mark.parametrize("direct", [None, False])
def test_tmpfs_holds_objects(mount: Mount, direct: bool | None) -> None:
    data = random.Random(0).randbytes(100_001)
    backend = opened(mount("size=8m"), direct)
    writer = backend.open_writer("x", len(data))
    for at in range(0, len(data), 8192):
        writer.write_at(at, data[at : at + 8192])
    writer.finish()
    back = bytearray(len(data))
    backend.read_into("x", 0, memoryview(back))
    assert back == data


FILE_SIZE_LIMIT = """
    import resource, sys
    from ckptfmt.backends.posix import PosixBackend
    from ckptfmt.errors import BackendError
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    backend = PosixBackend(sys.argv[1])
    for call in (lambda: backend.open_writer("x", 2 << 20), lambda: backend.create("y", bytes(2 << 20))):
        try:
            call()
        except BackendError as error:
            assert error.kind == "file_too_large", error
            assert "ulimit -f" in str(error)
        else:
            raise SystemExit("no error")
    assert backend.list("") == [] and backend.sweep_debris("", dry_run=True) == []
"""


def test_the_file_size_limit_is_told(tmp_path: Path) -> None:
    run_child(FILE_SIZE_LIMIT, tmp_path)
    assert list(tmp_path.iterdir()) == []


def denied(place: Path) -> None:
    """Try everything in a place that belongs to somebody else."""
    backend = PosixBackend(place)
    for call in (
        backend.create_root,
        lambda: backend.create("y", b"1"),
        lambda: backend.open_writer("y", 1),
        lambda: backend.make_folder("f"),
        lambda: backend.read("secret", limit=10),
        lambda: backend.delete("secret"),
        lambda: backend.list("closed"),
        lambda: backend.head("closed/x"),
    ):
        with pytest.raises(AccessDenied, match=str(place)):
            call()
    assert backend.list_folders("") == ["closed"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_missing_permission_is_access_denied() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own temporary folders are closed to other users
        place = Path(folder)
        place.chmod(0o755)
        (place / "secret").write_bytes(b"1")
        (place / "secret").chmod(0o600)
        (place / "closed").mkdir(mode=0o700)
        (place / "closed/x").write_bytes(b"1")

        def as_nobody() -> None:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            denied(place)

        assert run_forked(as_nobody) == 0
        assert sorted(entry.name for entry in place.iterdir()) == ["closed", "secret"]


def test_descriptors_stay_bounded(tmp_path: Path) -> None:
    """FIELD: one handle per file, kept, ran out at 60,000 files."""
    backend = opened(tmp_path)
    for n in range(100):
        backend.create(f"x{n}", bytes([n]) * 5000)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = set(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, len(before) + 16), limits[1]))
    try:
        for n in range(5000):
            buffer = bytearray(100)
            backend.read_into(f"x{n % 100}", n % 4900, memoryview(buffer))
            assert buffer == bytes([n % 100]) * 100
        for n in range(200):
            writer = backend.open_writer(f"y{n}", 1)
            writer.write_at(0, b"1")
            writer.finish()
            backend.open_writer(f"z{n}", 1)  # dropped without finish or abort
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert set(os.listdir("/proc/self/fd")) == before


def write_until_killed(root: Path, at: int) -> None:
    """Create a small and a large object; die before system call ``at``."""
    calls = WatchedSyscalls()
    backend = PosixBackend(root, syscalls=calls)
    calls.on_call(lambda call: os.kill(os.getpid(), signal.SIGKILL) if call.number == at else None)
    backend.create("x", b"the whole object")
    writer = backend.open_writer("y", 10_000)
    writer.write_at(0, bytes(8192))
    writer.write_at(8192, bytes(1808))
    writer.finish()


@pytest.mark.slow
def test_a_kill_at_any_system_call_shows_nothing_or_all(tmp_path: Path) -> None:
    """SIGKILL before every system call of a create and of a large object, in turn."""
    seen: set[tuple[bool, bool]] = set()
    at, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        at += 1
        root = tmp_path / str(at)
        backend = opened(root)
        code = run_forked(partial(write_until_killed, root, at))
        found = {info.key: info.nbytes for info in backend.list("")}
        assert found.get("x", 16) == 16
        if "x" in found:
            assert backend.read("x", limit=16) == b"the whole object"
        seen.add(("x" in found, found.get("y") == 10_000))
        check_next_writer(backend)
    assert code == 0
    assert seen == {(False, False), (True, False), (True, True)}
    assert at > 15


def check_next_writer(backend: Backend) -> None:
    """Whoever comes next cleans up and writes the same objects."""
    backend.sweep_debris("", dry_run=False)
    backend.create("x", b"the whole object")
    with pytest.raises(Conflict):
        backend.create("x", b"another")
    backend.delete("y")
    writer = backend.open_writer("y", 3)
    writer.write_at(0, b"new")
    writer.finish()
    assert [(info.key, info.nbytes) for info in backend.list("")] == [("x", 16), ("y", 3)]
    assert backend.sweep_debris("", dry_run=True) == []


def test_a_file_in_the_place_of_the_root_is_told(tmp_path: Path) -> None:
    (tmp_path / "root").write_bytes(b"")
    with pytest.raises(Conflict, match="a file stands in its place"):
        PosixBackend(tmp_path / "root").create_root()
    with pytest.raises((BackendError, LookupError), match="root"):
        PosixBackend(tmp_path / "root").create("x", b"1")


def test_an_object_over_4_gib_keeps_its_last_bytes(tmp_path: Path) -> None:
    """FIELD: counts of 32 bits lost what lies beyond 2 and 4 GiB. The middle stays a hole."""
    nbytes = (1 << 32) + 4097
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate(nbytes)
        file.seek(nbytes - 5)
        file.write(b"tail!")
    backend = PosixBackend(tmp_path)
    assert backend.head("x").nbytes == nbytes
    buffer = bytearray(5)
    backend.read_into("x", nbytes - 5, memoryview(buffer))
    assert buffer == b"tail!"
