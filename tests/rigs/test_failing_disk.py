"""EIO, no space, short writes and delays from a disk, met by a whole save, a restore and gc.

The disk is a FUSE mount. As on Linux, a file whose fsync failed has lost its data, and the next fsync of it succeeds:
a save that believed the second one would commit a pack of zeros.

Field reports: FR-099 (one EIO does not end a run), FR-100 (no space says so, and what was written is removed).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from error_chain import chain_of
from rig_faulty import FaultyDisk
from rig_needs import need_tools
from rig_saves import Saves, assert_tells

from ckptfmt.errors import BackendError, Corrupt, OutOfSpace, SaveFailed

pytestmark = pytest.mark.rig


@pytest.fixture(scope="module")
def mount(own_mounts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyDisk]:
    need_tools("fusermount3")
    disk = FaultyDisk(tmp_path_factory.mktemp("faulty"))
    yield disk
    disk.release()


@pytest.fixture
def disk(mount: FaultyDisk) -> Iterator[FaultyDisk]:
    yield mount
    mount.heal()


@pytest.fixture
def saves(disk: FaultyDisk, tmp_path: Path) -> Saves:
    return Saves(disk.place / tmp_path.name, tmp_path / "catalog.sqlite").begin()


PACK, PART, MANIFEST, TEMPORARY = ".safetensors", ".part.json", ".json.zst", ".ckptfmt-tmp"


@pytest.mark.parametrize(
    ("op", "code"),
    [(op, errno.EIO) for op in ("create", "write", "truncate", "fsync", "close", "fsyncdir")]
    + [("write", errno.ESTALE), ("fsync", errno.ESTALE), ("create", errno.ENOMEM), ("fsync", errno.ETIMEDOUT)],
    ids=lambda value: errno.errorcode.get(value, value),
)
def test_one_error_on_a_pack_costs_a_new_pack(disk: FaultyDisk, saves: Saves, op: str, code: int) -> None:
    """The pack is written again under a new name. The failed file is never synced again, and never believed."""
    match = "" if op == "fsyncdir" else PACK
    with saves.checkpointer() as checkpointer:
        # Making the generation's folder syncs the three above it; the fourth sync is its own, for the pack's name.
        disk.fail(op, code, match=match, times=1, nth=4 if op == "fsyncdir" else 1)
        generation = saves.save(checkpointer, 3).result(60)
        (rank,) = checkpointer._context.site.sql().ranks(generation.id)
        assert rank.retries == 1
    calls = disk.calls()
    assert sum(failed == code for _, _, failed in calls) == 1
    first = next(path for _, path, failed in calls if failed)
    if op != "fsyncdir":
        after = calls[[failed for _, _, failed in calls].index(code) + 1 :]
        assert {done for done, path, _ in after if path == first} <= {"unlink", "close"}
        packs = {path for done, path, _ in calls if done == "create" and path.endswith(PACK)}
        assert len(packs) == 2
    saves.committed.append(generation.step)
    saves.assert_intact()
    saves.assert_heals(4)


@pytest.mark.parametrize(
    ("op", "what"),
    [(op, TEMPORARY) for op in ("create", "write", "fsync", "close", "unlink")]
    + [("link", name) for name in (PART, MANIFEST, "COMMIT.json")],
)
def test_one_error_on_a_small_object_is_passed_over(disk: FaultyDisk, saves: Saves, op: str, what: str) -> None:
    """Part, manifest and verdict are created under a temporary name: an error there makes a new one."""
    with saves.checkpointer() as checkpointer:
        disk.fail(op, errno.EIO, match=what, times=1)
        generation = saves.save(checkpointer, 3).result(60)
    assert sum(failed == errno.EIO for _, _, failed in disk.calls()) == 1
    failed = next(path for _, path, code in disk.calls() if code)
    assert [done for done, path, code in disk.calls() if path == failed and done == "fsync" and not code] in (
        [["fsync"], []] if op in ("close", "unlink", "link") else [[]]
    )
    saves.committed.append(generation.step)
    saves.assert_intact()
    saves.assert_heals(4)


@pytest.mark.parametrize("op", ["create", "write", "truncate", "fsync", "close"])
def test_a_disk_that_keeps_failing_fails_the_save(disk: FaultyDisk, saves: Saves, op: str) -> None:
    with saves.checkpointer() as checkpointer:
        disk.fail(op, errno.EIO, match=PACK)
        error = saves.fail(checkpointer, 3)
        assert_tells(error, BackendError, PACK, "Input/output error", "system log")
        assert error.stage == "persist"
        assert [cause.kind for cause in chain_of(error) if isinstance(cause, BackendError)] == ["io_error"]
        names = [path for done, path, code in disk.calls() if done == "create" and path.endswith(PACK)]
        assert len(set(names)) == 3  # bounded, and each time a new name
        saves.assert_intact()
        saves.assert_swept()
        disk.heal()
        saves.committed.append(saves.save(checkpointer, 4).result(60).step)  # and the launch goes on
    saves.assert_heals(5)


@pytest.mark.parametrize("match", [PART, MANIFEST])
def test_a_disk_that_refuses_a_small_object_fails_the_save(disk: FaultyDisk, saves: Saves, match: str) -> None:
    with saves.checkpointer(1.0) as checkpointer:
        disk.fail("link", errno.EIO, match=match)
        error = saves.fail(checkpointer, 3)
        assert_tells(error, BackendError, match)
        disk.heal()
        saves.assert_intact()
    saves.assert_heals(4)


def test_a_verdict_that_cannot_be_stored_is_not_a_failure(disk: FaultyDisk, saves: Saves) -> None:
    """Past the commit point: committed, its proof pending, finished by recover."""
    with saves.checkpointer() as checkpointer:
        disk.fail("link", errno.EIO, match="COMMIT.json")
        generation = saves.save(checkpointer, 3).result(60)
        disk.heal()
    assert generation.step == 3
    with saves.open() as repository:
        assert [action.action for action in repository.recover().actions] == ["proved"]
    saves.committed.append(3)
    saves.assert_intact()


def test_no_space_at_any_byte(disk: FaultyDisk, saves: Saves) -> None:
    """Wherever the space ends: ``OutOfSpace``, the older ones whole, what was written removed, the next one commits."""
    with saves.checkpointer() as checkpointer:
        disk.fail("write", errno.ENOSPC, after=1 << 40)
        saves.committed.append(saves.save(checkpointer, 3).result(60).step)
        total = sum(path.stat().st_size for path in saves.root.rglob("*") if path.is_file()) // 3
        points = [*range(0, total + 4096, max(1, total // 40)), 1, 4095, 4096, 4097, total - 1]
        for step, after in enumerate(points, start=10):
            disk.fail("write", errno.ENOSPC, after=after)
            pending = saves.save(checkpointer, step)
            error = pending.exception(60)
            disk.heal()
            if error is None:
                saves.committed.append(step)
                continue
            assert isinstance(error, SaveFailed), after
            assert_tells(error, OutOfSpace, "needed", "free", "ckptfmt gc")
            full = next(cause for cause in chain_of(error) if isinstance(cause, OutOfSpace))
            assert full.needed
            assert full.free
        saves.assert_intact()
        assert len(saves.committed) < len(points) // 4
    saves.assert_heals(99)


@pytest.mark.parametrize("op", ["create", "write", "fsync", "close", "mkdir", "link"])
def test_a_used_up_quota(disk: FaultyDisk, saves: Saves, op: str) -> None:
    """Local disks say so in write, network ones in fsync or close. It is no lack of bytes on the disk."""
    with saves.checkpointer() as checkpointer:
        disk.fail(op, errno.EDQUOT, match="/runs/")
        error = saves.fail(checkpointer, 3)
        assert_tells(error, OutOfSpace, "the quota is used up", "ckptfmt gc")
        full = next(cause for cause in chain_of(error) if isinstance(cause, OutOfSpace))
        assert full.free is None
        disk.heal()
        saves.assert_intact()
        saves.committed.append(saves.save(checkpointer, 4).result(60).step)
    saves.assert_heals(5)


@pytest.mark.parametrize("longest", [1, 1000, 4096, 5000])
def test_short_writes_are_continued(disk: FaultyDisk, tmp_path: Path, longest: int) -> None:
    saves = Saves(
        disk.place / tmp_path.name, tmp_path / "catalog.sqlite", numbers=100 if longest == 1 else 30_000
    ).begin()
    with saves.checkpointer(60.0) as checkpointer:
        disk.fail("write", longest=longest, match="" if longest > 1 else PART)
        saves.committed.append(saves.save(checkpointer, 3).result(60).step)
    saves.assert_intact()


def test_a_slow_disk_is_waited_for(disk: FaultyDisk, saves: Saves) -> None:
    with saves.checkpointer(30.0) as checkpointer:
        disk.fail("fsync", sleep=0.15)
        saves.committed.append(saves.save(checkpointer, 3).result(60).step)
    saves.assert_intact()


def test_a_disk_slower_than_the_deadline_fails_the_save(disk: FaultyDisk, saves: Saves) -> None:
    with saves.checkpointer(0.5) as checkpointer:
        disk.fail("fsync", sleep=2.0, match=PACK)
        error = saves.fail(checkpointer, 3)
        assert "not committed within 0.5 s" in str(error)
        disk.heal()
    saves.assert_heals(4)


def test_a_restore_says_which_object_could_not_be_read(disk: FaultyDisk, saves: Saves) -> None:
    disk.fail("read", errno.EIO, match=PACK)
    with saves.open(mode="r") as repository:
        generation = repository.latest("run")
        with pytest.raises(BackendError, match=rf"(?s){PACK}.*Input/output error.*;.*system log") as caught:
            generation.load()
        assert caught.value.kind == "io_error"
        report = generation.verify()
        assert {problem.kind for problem in report.problems} == {"io_error"}
        assert all(problem.object.endswith(PACK) for problem in report.problems)
    assert not isinstance(caught.value, Corrupt)  # a disk that can't be read says nothing of the bytes
    disk.heal()
    saves.assert_intact()


@pytest.mark.parametrize(
    ("op", "match"), [("unlink", PACK), ("link", "COMMIT.json"), ("fsyncdir", ""), ("readdir", "")]
)
def test_gc_says_what_it_could_not_do_and_does_it_later(disk: FaultyDisk, saves: Saves, op: str, match: str) -> None:
    with saves.checkpointer(1.0) as checkpointer:
        disk.fail("link", errno.EIO, match="")  # neither part nor aborted verdict can be stored
        saves.fail(checkpointer, 3)
        disk.heal()
    with saves.open() as repository:
        assert repository.gc(dry_run=True).items
        disk.fail(op, errno.EIO, match=match)
        with pytest.raises(BackendError, match=r"Input/output error.*;"):
            repository.gc(dry_run=False)
        disk.heal()
        saves.assert_intact()
        repository.gc(dry_run=False)
    saves.assert_swept()
    saves.assert_heals(4)
