"""``ckptfmt doctor``: what is refused is told, with its consequence and a fix; nothing stays behind."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.backends.posix import PosixBackend
from ckptfmt.backends.syscalls import DirectAlignment
from ckptfmt.doctor import copies, copying, files, host, memory, place, races
from ckptfmt.doctor.examine import examine
from ckptfmt.doctor.report import Finding
from ckptfmt.engine.arena import map_memory
from ckptfmt.errors import Conflict
from ckptfmt.testing.syscalls import WatchedSyscalls

NAMES = [
    "folder",
    "file system",
    "free space",
    "direct I/O",
    "fallocate",
    "fsync of files",
    "fsync of folders",
    "hard links",
    "conditional create",
    "cached pages",
    "SQLite",
    "host memory",
    "huge pages",
    "memory copies",
    "memory advice",
    "locked memory",
    "open files",
    "cores",
]


def doctor(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckptfmt.cli.main", "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def refused(tmp_path: Path, call: str, code: int) -> dict[str, Finding]:
    """Findings where one system call always fails."""
    calls = WatchedSyscalls()
    calls.fail(call, code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_timed", lambda environment: 0.01)  # it has nothing to do with files
        return {one.name: one for one in examine("u", tmp_path, tmp_path, calls).findings}


def test_everything_is_tried_and_nothing_stays(tmp_path: Path) -> None:
    wanted = tmp_path / "not" / "yet"
    done = doctor(wanted, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert [one["name"] for one in report["findings"]] == NAMES
    assert report["folder"] == str(tmp_path)
    assert report["ok"]
    assert list(tmp_path.iterdir()) == []
    text = doctor(tmp_path).stdout
    for one in report["findings"]:
        assert one["name"] in text
        assert one["consequence"] in text
        timed_again = one["name"] == "memory copies"
        assert one["fix"] is None or one["fix"] in text or timed_again
        assert one["status"] == "good" or one["fix"] or one["status"] == "note"


def test_it_needs_neither_torch_nor_numpy(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from ckptfmt.cli.main import main\n"
        f"try: main(['doctor', {str(tmp_path)!r}])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_file_in_the_way_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = doctor(tmp_path / "file" / "below")
    assert done.returncode == 2
    assert "is a file" in done.stderr


def test_a_folder_that_cannot_be_written_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*arguments: Any, **named: Any) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr("tempfile.TemporaryDirectory", no)
    report = examine("u", tmp_path, tmp_path)
    assert not report.ok
    assert report.findings[0].status == "bad"
    assert "Permission denied" in report.findings[0].found


def test_a_place_where_saving_fails_has_exit_code_14(tmp_path: Path) -> None:
    folder = "/proc/self"  # no file can be made there, whoever asks
    done = doctor(folder, "--json")
    assert done.returncode == 14
    assert not json.loads(done.stdout)["ok"]


@pytest.mark.parametrize(
    ("call", "code", "name", "status"),
    [
        ("set_direct", errno.EINVAL, "direct I/O", "slow"),
        ("fallocate", errno.EOPNOTSUPP, "fallocate", "slow"),
        ("fallocate", errno.ENOSPC, "fallocate", "bad"),
        ("fsync", errno.EIO, "fsync of files", "bad"),
        ("fsync", errno.EINVAL, "fsync of folders", "slow"),
        ("link", errno.EPERM, "hard links", "good"),
        ("cached_pages", errno.ENOSYS, "cached pages", "slow"),
    ],
)
def test_what_the_file_system_refuses(tmp_path: Path, call: str, code: int, name: str, status: str) -> None:
    one = refused(tmp_path, call, code)[name]
    assert one.status == status
    assert os.strerror(code) in one.found or code == errno.ENOSPC
    assert one.facts.get("works", one.facts.get("link")) is False
    assert status == "good" or one.fix


def test_neither_links_nor_exclusive_renames(tmp_path: Path) -> None:
    calls = WatchedSyscalls()
    calls.fail("link", errno.EPERM)
    calls.fail("rename_noreplace", errno.EINVAL)
    one = files.hard_links(tmp_path, calls)
    assert one.status == "slow"
    assert one.facts == {"link": False, "rename_noreplace": False}


def test_a_wide_alignment_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = WatchedSyscalls()
    monkeypatch.setattr(calls, "direct_alignment", lambda descriptor: DirectAlignment(memory=512, offset=65536))
    one = files.direct_io(tmp_path, calls)
    assert one.facts["alignment"] == {"memory": 512, "offset": 65536}
    assert not one.facts["works"] or (one.status == "slow" and "65536" in one.consequence)


# -- conditional create -----------------------------------------------------------------------------
def test_a_sound_backend_has_one_winner(tmp_path: Path) -> None:
    one = races.conditional_create(PosixBackend, tmp_path)
    assert (one.status, one.facts) == ("good", {"races": races.ROUNDS, "wrong": 0})


class Overwriting(MemoryBackend):
    """Tells every racer that it won."""

    def create(self, key: str, data: Any) -> None:
        try:
            super().create(key, data)
        except Conflict:
            return


class Losing(MemoryBackend):
    """Tells every racer that it lost."""

    def create(self, key: str, data: Any) -> None:
        super().create(key, b"of nobody")
        raise Conflict("taken")


@pytest.mark.parametrize(("broken", "winners"), [(Overwriting, 8), (Losing, 0)])
def test_a_backend_that_breaks_create_is_bad(tmp_path: Path, broken: type[MemoryBackend], winners: int) -> None:
    one = races.conditional_create(lambda folder: broken(broken.__name__), tmp_path)
    assert one.status == "bad"
    assert f"{winners} of 8 threads were told" in one.found
    assert one.fix


# -- place and host ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [("ext4", "good", "catalog.sqlite"), ("nfs4", "slow", "locks"), ("tmpfs", "slow", "lost")],
)
def test_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, status: str, words: str) -> None:
    monkeypatch.setattr(place, "filesystem_type", lambda path: kind)
    one = place.file_system(tmp_path)
    assert one.status == status
    assert words in one.consequence


@pytest.mark.parametrize(("version", "mode", "status"), [((3, 40, 1), "delete", "note"), ((3, 51, 3), "wal", "good")])
def test_sqlite(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], mode: str, status: str) -> None:
    monkeypatch.setattr(place, "sqlite_version", lambda: version)
    one = place.sqlite()
    assert (one.status, one.facts["journal_mode"]) == (status, mode)


@pytest.mark.parametrize(
    ("free", "inodes", "status"), [(1 << 40, 1 << 20, "good"), (1000, 1 << 20, "slow"), (1 << 40, 5, "slow")]
)
def test_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, inodes: int, status: str) -> None:
    found = os.statvfs_result((4096, 1, free, free, free, inodes, inodes, inodes, 0, 255))
    calls = WatchedSyscalls()
    monkeypatch.setattr(calls, "statvfs", lambda path: found)
    one = place.space(tmp_path, calls)
    assert (one.status, one.facts) == (status, {"bytes": free, "inodes": inodes})


def test_limits() -> None:
    assert host.descriptors(64).status == "slow"
    assert host.descriptors(1024).status == "good"
    assert memory.locked_memory(8 << 20).facts == {"bytes": 8 << 20}
    assert memory.locked_memory(-1).status == "good"  # RLIM_INFINITY


def test_huge_pages_are_counted_for_this_mapping_only() -> None:
    beside = [map_memory(64 << 20) for _ in range(2)]
    neighbour = memory.huge_bytes_of(beside[0])
    assert 0 <= neighbour <= len(beside[0])
    assert memory.huge_bytes_of(beside[0]) == 0  # nothing is new
    # The kernel tells both as one mapping where they lie side by side.
    small = beside[1][: 2 << 20]
    assert memory.huge_bytes_of(small) <= len(small)
    found = memory.huge_pages()
    assert 0 <= found.facts["huge_bytes"] <= found.facts["tested_bytes"]
    assert (found.status == "good") == (found.facts["huge_bytes"] * 2 >= found.facts["tested_bytes"])


def test_huge_pages_switched_off_are_told_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "huge_bytes_of", lambda mapped: 0)
    one = memory.huge_pages(setting=lambda: "never")
    assert one.status == "slow"
    assert "madvise" in (one.fix or "")
    assert "compact_memory" in (memory.huge_pages(setting=lambda: "always").fix or "")


# -- copies of memory -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "tuned"),
    [
        ("", copies.SETTING),
        ("glibc.malloc.check=1", f"glibc.malloc.check=1:{copies.SETTING}"),
        (f"{copies.TUNABLE}=0x10000:glibc.malloc.check=1", f"glibc.malloc.check=1:{copies.SETTING}"),
    ],
)
def test_other_settings_of_glibc_stay(value: str, tuned: str) -> None:
    assert copies.tuned_value(value) == tuned


@pytest.mark.parametrize(("faster", "status"), [(0.6, "slow"), (0.95, "good"), (2.0, "good")])
def test_a_setting_is_told_of_where_it_makes_copies_faster(faster: float, status: str) -> None:
    asked: list[Mapping[str, str]] = []

    def timed(environment: Mapping[str, str]) -> float:
        asked.append(environment)
        return 0.01 * (faster if copies.SETTING in environment.get(copies.VARIABLE, "") else 1.0)

    one = copies.copies(timed, {"A": "b", copies.VARIABLE: "glibc.malloc.check=1"})
    assert one.status == status
    assert (one.fix is not None) == (status == "slow")
    assert all(environment["A"] == "b" for environment in asked)
    assert one.facts["tuned_bytes_per_second"] == pytest.approx(one.facts["bytes_per_second"] / faster)
    if one.fix:
        assert f"{copies.VARIABLE}=glibc.malloc.check=1:{copies.SETTING} " in one.fix


def test_copies_that_cannot_be_timed_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as anywhere:
        anywhere.setattr(copies, "_why_not", lambda: None)
        anywhere.setattr(copies, "_COPIES", "no number")
        one = copies.copies()
    assert one.status == "note"
    assert "ValueError" in one.found
    monkeypatch.setattr(copies, "available_memory", lambda: 1 << 20)
    assert "memory available" in copies.copies().found
    monkeypatch.setattr(copies, "available_memory", lambda: None)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "x86-64" in copies.copies().found


def test_a_process_copies_memory_with_the_setting_in_force() -> None:
    """glibc's own loader tells which settings it knows, and what they are."""
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    if not loader.exists():
        pytest.skip("no glibc on x86-64")
    environment = dict(os.environ) | {copies.VARIABLE: copies.tuned_value("")}
    told = subprocess.run([loader, "--list-tunables"], env=environment, capture_output=True, text=True, check=True)
    (line,) = [line for line in told.stdout.splitlines() if line.startswith(f"{copies.TUNABLE}:")]
    assert int(line.split()[1], 16) == int(copies.SETTING.partition("=")[2], 16)
    assert 0 < copies._timed(environment) < copies._LIMIT_SECONDS
    assert copying.seconds_of_a_copy(1 << 20, 3) > 0
