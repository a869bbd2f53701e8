"""A disk that is full, wherever in a save it becomes so: tmpfs, an ext4 without inodes.

The catalog lies on the same disk. Field report FR-100: no space is said to be no space, what was written of the failed
generation is removed, the one before it is intact.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from error_chain import chain_of
from rig_disks import Disk
from rig_jobs import differences
from rig_saves import RUN, Saves, assert_tells, before

from ckptfmt.engine.keep import gc
from ckptfmt.errors import CatalogError, OutcomeUnknown, OutOfSpace, SaveFailed

pytestmark = pytest.mark.rig


class SizedFolder:
    """A tmpfs whose size can be changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", path], check=True)

    def leave_free(self, nbytes: int) -> None:
        facts = os.statvfs(self.path)
        used = (facts.f_blocks - facts.f_bfree) * facts.f_frsize
        self._resize(used + nbytes)

    def grow(self) -> None:
        self._resize(64 << 20)

    def _resize(self, nbytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={nbytes}", self.path], check=True)


@pytest.fixture
def sized(memory_folder: Path) -> Iterator[SizedFolder]:
    folder = SizedFolder(memory_folder / "sized")
    yield folder
    subprocess.run(["umount", "-l", folder.path], check=False)


def assert_no_space(error: BaseException) -> None:
    """No space, said by storage or by the catalog, with the numbers or the way out."""
    assert isinstance(error, SaveFailed), error
    full = [cause for cause in chain_of(error) if isinstance(cause, OutOfSpace | CatalogError)]
    assert full, chain_of(error)
    if isinstance(full[0], CatalogError):
        assert full[0].kind == "catalog_full"
        assert "full: free space" in str(full[0]) or "no inodes left" in str(full[0]), full[0]
        assert "`ckptfmt gc`" in str(full[0])
    else:
        assert_tells(error, OutOfSpace, "free")
        assert full[0].needed


@contextlib.contextmanager
def soon(heal: Callable[[], None], seconds: float = 1.5) -> Iterator[None]:
    """Heal the disk while the save still tries: with not one free page the catalog can't even note a failure."""
    timer = threading.Timer(seconds, heal)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def test_wherever_the_space_ends(sized: SizedFolder) -> None:
    """From no free page at all to just enough, page by page."""
    saves = Saves(sized.path / "r").begin()
    began = os.statvfs(sized.path).f_bfree
    with saves.checkpointer() as checkpointer:
        saves.committed.append(saves.save(checkpointer, 3).result(60).step)
    page = os.sysconf("SC_PAGE_SIZE")
    pages = began - os.statvfs(sized.path).f_bfree
    assert pages > 60
    failed = 0
    free = [0, 3, 6, 9, *range(12, pages - 8, 4), *range(pages - 8, pages + 40, 3)]
    for step, count in enumerate(free, start=10):
        with saves.checkpointer() as checkpointer:
            sized.leave_free(count * page)
            with soon(sized.grow):
                error = saves.save(checkpointer, step).exception(60)
            saves.note(step, error)
            if error is not None:
                assert_no_space(error)
                failed += 1
                if count % 8 == 0:
                    saves.assert_intact()
            sized.grow()
    assert failed > len(free) // 2
    assert failed < len(free)
    saves.assert_heals(999)


def test_a_full_disk_stops_saves_at_once_and_no_restore(sized: SizedFolder, caplog: pytest.LogCaptureFixture) -> None:
    """Not one page is free. With all the time in the world a save fails at once; what is committed is read."""
    saves = Saves(sized.path / "r").begin()
    with saves.open() as repository, repository.checkpointer(RUN) as checkpointer:
        sized.leave_free(0)
        with saves.open() as other:
            assert differences(other.latest(RUN).load(), 2) is None
            assert other.latest(RUN).verify().ok
            assert "only the grace between retirement and deletion" in caplog.text
            with pytest.raises(
                CatalogError, match=r"no launch can begin.*full: free space.*ckptfmt\.restore\("
            ) as caught:
                other.checkpointer("another")
            assert caught.value.kind == "catalog_full"
        began = time.monotonic()
        error = saves.save(checkpointer, 3).exception(30)
        assert time.monotonic() - began < 1
        assert_no_space(error)
        assert not isinstance(error, OutcomeUnknown)
        saves.assert_intact()
        sized.grow()
    saves.assert_heals(9)


def test_a_disk_that_fills_up_while_a_save_is_written(sized: SizedFolder) -> None:
    """Not found by looking beforehand: somebody else takes the space."""
    saves = Saves(sized.path / "r").begin()
    for step, name in enumerate(("open", "fallocate", "pwrite", "fsync", "link"), start=3):
        with saves.checkpointer() as checkpointer:

            def fill() -> None:
                sized.leave_free(0)

            with before(checkpointer, name, fill) as done, soon(sized.grow):
                error = saves.save(checkpointer, step).exception(60)
            sized.grow()
            saves.note(step, error)
            if error is not None:
                assert_no_space(error)
            assert done
    assert len(saves.committed) < 6
    saves.assert_heals(99)


def test_no_inodes(new_disk: Callable[..., Disk]) -> None:
    """Space enough, but no more files: also that is told, and is not told as a lack of bytes."""
    disk = new_disk("ext4", extra=("-N", "96"))
    saves = Saves(disk.place / "r").begin()
    seen = set()

    def heal() -> None:
        for path in disk.place.glob("ballast/*"):
            path.unlink(missing_ok=True)

    for free in range(8):
        ballast = disk.place / "ballast"
        ballast.mkdir(exist_ok=True)
        with saves.checkpointer(4.0) as checkpointer, soon(heal):
            while (left := os.statvfs(disk.place).f_ffree) > free:
                (ballast / str(left)).touch()
            error = saves.save(checkpointer, 10 + free).exception(60)
            heal()
        saves.note(10 + free, error)
        if error is None:
            continue
        assert_no_space(error)
        full = [cause for cause in chain_of(error) if isinstance(cause, OutOfSpace)]
        seen.add(bool(full))
        if full:
            assert "no inodes" in str(error), error
    assert True in seen
    saves.assert_heals(99)


@pytest.mark.parametrize("kind", ["no blocks", "no inodes"])
def test_gc_frees_a_disk_with_nothing_left(new_disk: Callable[..., Disk], kind: str) -> None:
    """The way out that the message names must be open: what is retired goes, though nothing new can be written."""
    disk = new_disk("ext4", extra=("-N", "96"))
    saves = Saves(disk.place / "r").begin()
    with saves.open() as repository:
        gc.retire(repository._connection.site, repository.generations()[-1].id)
    saves.committed.remove(1)
    ballast = disk.place / "ballast"
    ballast.mkdir()
    with contextlib.suppress(OSError):
        for number in range(1 << 20):
            (ballast / str(number)).write_bytes(bytes(1 << 20 if kind == "no blocks" else 0))
    if kind == "no blocks":
        with contextlib.suppress(OSError), (ballast / "rest").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    with saves.open() as repository:
        saves.assert_intact()
        report = gc.collect(repository._connection.site, dry_run=False, grace=timedelta(0))
        assert {item.generation_id for item in report.items} == {1}
    saves.assert_intact()
    saves.assert_swept()
    for path in ballast.iterdir():
        path.unlink()
    saves.assert_heals(9)
