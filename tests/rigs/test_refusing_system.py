"""A system that refuses: read-only, files too large, too many open files, no permission, a disk that is gone.

Field reports: FR-101 (a forbidden target is told when it is opened, and at each save), FR-115 (few descriptors do).

| case | where |
| --- | --- |
| FR-098 file and folder synced before they are referred to | test_power_cut.py, tests/backends/test_posix_order.py |
| FR-099 one EIO does not end a run; retries are counted | test_failing_disk.py, tests/lifecycle |
| FR-100 no space is named, what was written is removed | test_full_disk.py, test_failing_disk.py |
| FR-101 permission is told at opening and at saving | here |
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from error_chain import chain_of
from forked import in_child, open_to_others
from rig_disks import Disk, Switch
from rig_needs import need_root
from rig_saves import Saves, assert_tells, before

import ckptfmt
from ckptfmt.errors import AccessDenied, BackendError, CatalogError, CkptError, SaveFailed, Unavailable

pytestmark = pytest.mark.rig

NOBODY = 65534


# -- read-only --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "match"), [("mkdir", "runs"), ("open", ".safetensors"), ("open", ".ckptfmt-tmp"), ("link", "COMMIT.json")]
)
def test_a_disk_that_turns_read_only(new_disk: Callable[..., Disk], tmp_path: Path, name: str, match: str) -> None:
    """As ext4 does by itself after an error. The catalog lies elsewhere: its open file would forbid the change."""
    disk = new_disk("ext4")
    saves = Saves(disk.place / "r", tmp_path / "catalog.sqlite").begin()
    with saves.checkpointer() as checkpointer:
        with before(checkpointer, name, lambda: disk.remount("ro"), match) as done:
            error = saves.save(checkpointer, 3).exception(60)
        assert done
        saves.note(3, error)
        if match == "COMMIT.json":  # past the commit point: its proof is pending
            assert error is None
        else:
            assert_tells(error, AccessDenied, "read-only", "remount")
            saves.assert_intact()
        disk.remount("rw")
        saves.committed.append(saves.save(checkpointer, 4).result(60).step)
    saves.assert_heals(5)


def test_a_read_only_disk_is_told_at_opening(new_disk: Callable[..., Disk]) -> None:
    disk = new_disk("ext4")
    saves = Saves(disk.place / "r").begin()
    disk.remount("ro")
    with pytest.raises(AccessDenied, match=r"read-only.*remount") as caught:
        saves.open()
    assert caught.value.errno == errno.EROFS
    saves.assert_intact()  # reading needs nothing else
    disk.remount("rw")
    saves.assert_heals(3)


# -- a disk that is gone ----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize(
    ("name", "match"), [("pwrite", ""), ("fsync", ""), ("link", ".part.json"), ("link", ".json.zst")]
)
def test_a_disk_that_goes_away(new_disk: Callable[..., Disk], kind: str, name: str, match: str) -> None:
    """From one call on everything fails, the catalog too. The process lives on, and says that it does not know."""
    disk = new_disk(kind)
    saves = Saves(disk.place / "r").begin()

    def lose() -> None:
        with Switch(disk.place) as switch:
            switch.cut("nothing")

    def work() -> tuple[str, bool]:
        with contextlib.suppress(CkptError), saves.open() as repository:
            checkpointer = repository.checkpointer("run", commit_timeout=1.0)
            with before(checkpointer, name, lose, match):
                error = saves.save(checkpointer, 3).exception(60)
            assert isinstance(error, SaveFailed)
            assert any(isinstance(cause, BackendError | CatalogError) for cause in chain_of(error)), chain_of(error)
            told.append(str(error))
        return told[0], True

    told: list[str] = []
    text, _ = in_child(work)
    assert "run 'run', step 3" in text
    disk.unmount()
    disk.mount()
    saves.unknown.add(3)
    saves.assert_intact()
    saves.assert_heals(4)


# -- limits of the process --------------------------------------------------------------------------
def test_files_that_may_not_be_so_large(tmp_path: Path) -> None:
    saves = Saves(tmp_path / "r", numbers=300_000).begin()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with saves.checkpointer() as checkpointer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            error = saves.fail(checkpointer, 3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert_tells(error, BackendError, ".safetensors", "File too large", "ulimit -f")
        assert [cause.kind for cause in chain_of(error) if isinstance(cause, BackendError)] == ["file_too_large"]
        saves.assert_intact()
        saves.assert_swept()
        saves.committed.append(saves.save(checkpointer, 4).result(60).step)
    saves.assert_heals(5)


def test_too_many_open_files(tmp_path: Path) -> None:
    """With any number of descriptors left, none to few, a save waits for more until its deadline, and says so."""
    saves = Saves(tmp_path / "r").begin()

    def work() -> list[list[Any]]:
        outcomes = []
        for step, spare in enumerate((0, 1, 2, 3, 4, 6, 12), start=3):
            with saves.checkpointer(3.0) as checkpointer:
                limits = resource.getrlimit(resource.RLIMIT_NOFILE)
                highest = max(int(name) for name in os.listdir("/proc/self/fd"))
                held = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest)]  # no gaps below the limit
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1 + spare, limits[1]))
                pending = saves.save(checkpointer, step)
                with contextlib.suppress(TimeoutError):
                    pending.exception(5)
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for descriptor in held:
                    os.close(descriptor)
                error = pending.exception(60)
                saves.note(step, error)
                if isinstance(error, SaveFailed):
                    kinds = [isinstance(cause, Unavailable | CatalogError) for cause in chain_of(error)]
                    outcomes.append([spare, any(kinds), str(error)])
                else:
                    outcomes.append([spare, True, "committed"])
        saves.assert_heals(20)
        return outcomes

    outcomes = in_child(work)
    assert all(fine for _, fine, _ in outcomes), outcomes
    texts = [text for *_, text in outcomes]
    assert texts[-1] == "committed"
    assert any("ulimit -n" in text for text in texts), texts


def test_few_descriptors_do(tmp_path: Path) -> None:
    """FR-115: 64 descriptors for a state of hundreds of chunks, saved, opened lazily and read whole."""

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        saves = Saves(tmp_path / "r", numbers=4_000_000).begin()
        saves.assert_heals(3)
        assert len(os.listdir("/proc/self/fd")) < 40

    in_child(work)


# -- permission -------------------------------------------------------------------------------------
@pytest.fixture
def own_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of another user, which root's own may look into."""
    need_root("become another user")
    open_to_others(tmp_path)
    place = tmp_path / "own"
    place.mkdir()
    os.chown(place, NOBODY, NOBODY)
    yield place
    subprocess.run(["chmod", "-R", "u+rwX", place], check=True)


def test_a_forbidden_root_is_told_at_opening(own_folder: Path) -> None:
    """FR-101: not swallowed, not found out at the first save."""

    def work() -> None:
        saves = Saves(own_folder / "r").begin()
        (own_folder / "r").chmod(0o555)
        with pytest.raises(AccessDenied, match=r"Permission denied.*;.*owner and mode"):
            saves.open()
        with pytest.raises(AccessDenied, match=r"Permission denied"):
            ckptfmt.save({"step": 1}, own_folder / "r")
        saves.assert_intact()
        (own_folder / "r").chmod(0o755)
        saves.assert_heals(3)

    in_child(work, uid=NOBODY)


@pytest.mark.parametrize("what", ["runs", "generation"])
def test_a_folder_that_becomes_forbidden(own_folder: Path, what: str) -> None:
    def work() -> None:
        saves = Saves(own_folder / "r").begin()
        run = next((own_folder / "r" / "runs").iterdir())

        def forbid() -> None:
            if what == "runs":
                run.chmod(0o555)
            else:
                max(run.iterdir(), key=lambda path: path.stat().st_mtime_ns if path.name != "commits" else 0).chmod(
                    0o555
                )

        call = "mkdir" if what == "runs" else "open"
        with saves.checkpointer() as checkpointer:
            with before(checkpointer, call, forbid, "" if what == "runs" else ".safetensors"):
                error = saves.save(checkpointer, 3).exception(60)
            assert isinstance(error, SaveFailed)
            assert_tells(error, AccessDenied, "Permission denied", "owner and mode")
            saves.note(3, error)
            subprocess.run(["chmod", "-R", "u+rwX", own_folder], check=True)
            saves.assert_intact()
            saves.committed.append(saves.save(checkpointer, 4).result(60).step)
        saves.assert_heals(5)

    in_child(work, uid=NOBODY)


def test_a_catalog_that_is_forbidden_says_so(own_folder: Path) -> None:
    def work() -> None:
        saves = Saves(own_folder / "r").begin()
        catalog = own_folder / "r" / "catalog.sqlite"
        catalog.chmod(0o444)
        with (
            pytest.raises(CatalogError, match=r"catalog\.sqlite.*read-only.*check its permissions"),
            saves.open() as repository,
        ):
            repository.checkpointer("run")
        catalog.chmod(0o644)
        saves.assert_heals(3)

    in_child(work, uid=NOBODY)


def test_a_restore_that_is_forbidden_says_so(own_folder: Path) -> None:
    def work() -> None:
        saves = Saves(own_folder / "r").begin()
        for path in own_folder.rglob("*.safetensors"):
            path.chmod(0)
        with saves.open(mode="r") as repository:
            with pytest.raises(AccessDenied, match=r"\.safetensors.*Permission denied.*;.*owner and mode"):
                repository.latest("run").load()
            assert {problem.kind for problem in repository.latest("run").verify().problems} == {"access_denied"}
        subprocess.run(["chmod", "-R", "u+rwX", own_folder], check=True)
        saves.assert_intact()

    in_child(work, uid=NOBODY)


def test_gc_that_is_forbidden_says_so(own_folder: Path) -> None:
    def work() -> None:
        saves = Saves(own_folder / "r").begin()
        with saves.checkpointer(1.0) as checkpointer:
            forbidden: list[Path] = []

            def forbid() -> None:
                forbidden.extend(path.parent for path in own_folder.rglob("*p000*.safetensors"))
                forbidden[:] = [max(forbidden, key=lambda path: path.stat().st_ctime_ns)]
                forbidden[0].chmod(0o555)

            with before(checkpointer, "open", forbid, ".ckptfmt-tmp"):
                saves.fail(checkpointer, 3)
        with saves.open() as repository:
            with pytest.raises(AccessDenied, match=r"Permission denied.*;.*owner and mode"):
                repository.gc(dry_run=False)
            saves.assert_intact()
            forbidden[0].chmod(0o755)
            assert repository.gc(dry_run=False).items
        saves.assert_swept()
        saves.assert_heals(4)

    in_child(work, uid=NOBODY)
