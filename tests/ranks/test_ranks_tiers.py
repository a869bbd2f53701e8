"""Many ranks save through stages and onto replicas, wherever they meet."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from meeting_rig import WORLD, Job, Rank, assert_saved, rows_of, save_and_wait, wait_until

import ckptfmt
from ckptfmt.backends.posix import PosixBackend
from ckptfmt.format import layout
from ckptfmt.testing.crash_checks import command_line
from ckptfmt.testing.faults import Fault
from ckptfmt.tiering import TierOrder

Start = Callable[..., Job]


def staged_names(stage: Path) -> set[str]:
    (own,) = (path for path in stage.iterdir())
    return {info.key.rpartition("/")[2] for info in PosixBackend(own).list("runs")}


def all_rows(root: Path) -> list[Any]:
    with ckptfmt.open(root, mode="r") as repository:
        catalog = repository._connection.site.sql()
        (newest, *_) = sorted(catalog.generations(run="run"), key=lambda row: -row.id)
        return catalog.ranks(newest.id)


@pytest.mark.parametrize(("hosts", "world"), [(1, 4), (2, 4), (2, 2)])
def test_ranks_share_the_stage_of_their_host(start: Start, root: Path, tmp_path: Path, hosts: int, world: int) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            return [save_and_wait(checkpointer, rank.state(step), step) for step in (1, 2, 3)]

    job = start(world)
    job.tiers = lambda rank: TierOrder(stage=str(tmp_path / f"stage{rank % hosts}"), replicas=[tmp_path / "copy"])
    results = job.run(body)
    assert len({outcome["id"] for outcomes in results for outcome in outcomes}) == 3
    assert_saved(root, 3, world)
    ranks = all_rows(root)
    assert len({rank.staged_tier for rank in ranks}) == hosts
    assert all(rank.staged_bytes and rank.staged_seconds for rank in ranks)
    assert all(rank.replicated_bytes == rank.staged_bytes for rank in ranks)
    kept = set().union(*(staged_names(tmp_path / f"stage{host}") for host in range(hosts)))
    assert kept == {layout.staged_part_name(rank) for rank in range(world)} | {
        layout.pack_name(rank, 0) for rank in range(world)
    }
    found = ckptfmt.load(f"{tmp_path / 'copy'}#run", catalog="none", rank=1)
    assert found["step"] == 3
    assert found["own"] == {"position": 301}


def test_ranks_without_room_on_their_stage_write_straight(start: Start, root: Path, tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            return save_and_wait(checkpointer, rank.state(1), 1)

    job = start()
    job.tiers = lambda rank: TierOrder(
        stage={"url": str(tmp_path / f"stage{rank}"), "bytes_max": 10 if rank == 1 else None}
    )
    job.run(body)
    assert_saved(root, 1, WORLD)
    assert [rank.staged_tier is None for rank in all_rows(root)] == [False, True, False, False]


@pytest.mark.parametrize("victims", ["all", "one"])
def test_a_job_that_is_killed_with_all_packs_staged_is_finished(
    start: Start, root: Path, tmp_path: Path, victims: str
) -> None:
    """Every rank stands before its copy, all staged, when the job is killed; or one rank alone had not copied."""

    def body(rank: Rank) -> Any:
        slow = victims == "all" or rank.rank == 2
        hung = [Fault("open_writer", delay=60.0)] if slow else []
        with rank.checkpointer(*hung, commit_timeout=50) as checkpointer:
            pending = checkpointer.save(rank.state(1), step=1)
            assert pending is not None
            pending.wait("staged", timeout=20)
            (tmp_path / f"staged{rank.rank}").touch()
            time.sleep(60)

    job = start()
    job.tiers = lambda rank: TierOrder(stage=str(tmp_path / "stage"))
    processes = job.start(body)
    wait_until(lambda: all((tmp_path / f"staged{rank}").exists() for rank in range(WORLD)))
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.end()
    with ckptfmt.open(root, stage=tmp_path / "stage") as repository:
        (foretold,) = repository.recover(dry_run=True).actions
        (action,) = repository.recover().actions
        assert action == foretold
        assert action.action == "committed"
    assert_saved(root, 1, WORLD)


def test_a_rank_on_another_host_that_had_staged_is_named(start: Start, root: Path, tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        hung = Fault("open_writer", delay=60.0) if rank.rank == 3 else Fault("open_writer", times=0)
        with rank.checkpointer(hung, commit_timeout=50) as checkpointer:
            pending = checkpointer.save(rank.state(1), step=1)
            assert pending is not None
            pending.wait("staged", timeout=20)
            (tmp_path / f"staged{rank.rank}").touch()
            time.sleep(60)

    job = start()
    job.tiers = lambda rank: TierOrder(stage=str(tmp_path / ("far" if rank == 3 else "near")))
    processes = job.start(body)
    wait_until(lambda: all((tmp_path / f"staged{rank}").exists() for rank in range(WORLD)))
    wait_until(lambda: all_rows(root)[3].state == "staged")
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.end()
    with ckptfmt.open(root, stage=tmp_path / "near") as repository:
        (action,) = repository.recover().actions
    assert action.action == "aborted"
    assert "rank 3 staged on host" in action.reason
    assert "/far/" in action.reason


def test_a_limit_holds_for_all_ranks_together(start: Start, root: Path, tmp_path: Path) -> None:
    """Four ranks write about 9 kB in all: each alone would fit."""

    def body(rank: Rank) -> Any:
        with rank.checkpointer(commit_timeout=20) as checkpointer:
            return save_and_wait(checkpointer, rank.state(1), 1)

    job = start()
    job.tiers = lambda rank: TierOrder(bytes_max=8500)
    for outcome in job.run(body):
        assert outcome["id"] is None
        assert "bytes_max" in outcome["text"]
    assert [row["state"] for row in rows_of(root)] in (["aborted"], ["deleted"])
    assert not PosixBackend(root).list("runs") or not [
        info for info in PosixBackend(root).list("runs") if info.key.endswith(".safetensors")
    ]


@pytest.mark.slow
def test_a_slow_rank_is_waited_for_by_the_coordinator_of_a_replica(start: Start, root: Path, tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            if rank.rank == 3:
                real = PosixBackend.open_writer  # the copies of this rank come late

                def late(self: PosixBackend, key: str, nbytes: int, **options: Any) -> Any:
                    if "copy" in self.url:
                        time.sleep(1.5)
                    return real(self, key, nbytes, **options)

                PosixBackend.open_writer = late  # type: ignore[method-assign]
            return save_and_wait(checkpointer, rank.state(1), 1)

    job = start()
    job.tiers = lambda rank: TierOrder(replicas=[tmp_path / "copy"])
    job.run(body)
    assert ckptfmt.load(f"{tmp_path / 'copy'}#run", catalog="none", rank=3)["step"] == 1


def test_bytes_that_a_rank_did_not_compare_count_for_nothing(start: Start, root: Path, tmp_path: Path) -> None:
    """What lies on the replica under the name of a pack is as long, and is not the pack: as if somebody had died there
    whose file system writes in place. Its rank cannot copy over it, and the coordinator sees only the length."""

    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            if rank.rank == 2:
                real = PosixBackend.open_writer

                def refused(self: PosixBackend, key: str, nbytes: int, **options: Any) -> Any:
                    if "copy" in self.url:
                        with contextlib.suppress(ckptfmt.Conflict):
                            self.create(key, bytes(nbytes))
                        raise ckptfmt.AccessDenied("not yours")
                    return real(self, key, nbytes, **options)

                PosixBackend.open_writer = refused  # type: ignore[method-assign]
            return save_and_wait(checkpointer, rank.state(1), 1)

    job = start()
    job.tiers = lambda rank: TierOrder(replicas=[tmp_path / "copy"])
    (number, *_) = {outcome["id"] for outcome in job.run(body)}
    assert_saved(root, 1, WORLD)
    (folder,) = (tmp_path / "copy" / "runs").glob("*/*/r00000-p000.safetensors")
    assert (folder.parent / layout.pack_name(2, 0)).stat().st_size > 0
    assert not (folder.parent / layout.COMMIT).exists()
    with ckptfmt.open(root, replicas=[tmp_path / "copy"]) as repository:
        site = repository._connection.site
        (tier,) = site.tiers.replicas
        assert [row.id for row in site.sql().unreplicated("run", tier.uuid)] == [number]
        assert site.sql().replicas(number) == []
    code, text = command_line("replicate", str(root), "--yes")
    assert code == 0, text
    assert ckptfmt.load(f"{tmp_path / 'copy'}#run", catalog="none", rank=2)["own"] == {"position": 102}


def test_what_ranks_say_of_their_copies_does_not_gather(start: Start, root: Path, tmp_path: Path) -> None:
    """One save of which a rank could not copy its pack, and two of which all could."""

    def body(rank: Rank) -> Any:
        real = PosixBackend.open_writer

        def refused(self: PosixBackend, key: str, nbytes: int, **options: Any) -> Any:
            if "copy" in self.url and layout.pack_name(1, 0) in key and not (tmp_path / "refused").exists():
                (tmp_path / "refused").touch()
                raise ckptfmt.AccessDenied("not yet")
            return real(self, key, nbytes, **options)

        PosixBackend.open_writer = refused  # type: ignore[method-assign]
        with rank.checkpointer() as checkpointer:
            return [save_and_wait(checkpointer, rank.state(step), step) for step in (1, 2, 3)]

    job = start()
    job.tiers = lambda rank: TierOrder(replicas=[tmp_path / "copy", tmp_path / "copy2"])
    job.run(body)
    with ckptfmt.open(root, replicas=[tmp_path / "copy", tmp_path / "copy2"]) as repository:
        site = repository._connection.site
        lacks = [[row.step for row in site.sql().unreplicated("run", tier.uuid)] for tier in site.tiers.replicas]
    assert sorted(lacks) == [[], [1]]
    with contextlib.closing(sqlite3.connect(root / "catalog.sqlite")) as raw:
        topics = [topic for (topic,) in raw.execute("SELECT topic FROM messages")]
    assert [topic for topic in topics if topic.startswith("replica/")] == []
