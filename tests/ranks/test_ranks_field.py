"""What users of other libraries met where ranks have to agree, and the test that it does not happen here.

E: hangs and divergent decisions

| case | what happened there | tests |
| --- | --- | --- |
| FR-046 | each rank asks the file system what there is, and gets another answer | test_what_a_rank_sees_of_a_folder_decides_nothing, test_four_ranks_save_one_generation |
| FR-048 | the way out after an error meets another barrier than the others do | test_a_failing_rank_is_named_on_every_rank, test_a_rank_is_killed_in_its_save, test_what_one_rank_cannot_read_no_rank_restores |
| FR-049 | one rank alone calls a collective save | test_a_rank_that_never_saves_is_named_at_the_deadline, test_one_rank_alone_saves_in_vain_and_all_can_go_on |
| FR-050 | slow storage behind a barrier outlasts the process group's patience | test_storage_may_be_slower_than_the_process_group_is_patient |
| FR-051 | all ranks make the same folder | test_thirty_two_processes_save_into_a_fresh_root |
| FR-052 | a quick rank removes what a slow one still reads | test_ranks_that_dawdle_anywhere |
| FR-053 | the coordinator is taken to be rank 0 | test_only_some_ranks_save |
| FR-054 | a rank that hangs hangs all others | test_a_rank_that_sleeps_past_the_deadline_commits_nothing, test_a_rank_that_dies_while_it_reads, test_a_rank_that_never_restores_is_named |
"""  # noqa: E501

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
from field_cases import assert_every_case_has_tests
from meeting_rig import WORLD, Job, Rank, assert_saved, rows_of, save_and_wait, wait_until

import ckptfmt
from ckptfmt import saving
from ckptfmt.testing.faults import Fault

Start = Callable[..., Job]
HOURS = (0, 7, -5, 24 * 400)


def test_every_case_has_tests_that_exist() -> None:
    assert_every_case_has_tests(__doc__, [46, 48, 49, 50, 51, 52, 53, 54])


def test_what_a_rank_sees_of_a_folder_decides_nothing(start: Start, root: Path) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            if rank.rank == 1:
                for verb in ("list", "list_folders"):
                    setattr(rank.backend, verb, lambda *_: [])
            saved = save_and_wait(checkpointer, rank.state(1), 1)
            report = checkpointer.restore(rank.state(9))
            assert report is not None
            return [saved["id"], report.generation_id]

    assert start().run(body) == [[1, 1]] * WORLD
    assert_saved(root, 1, WORLD)


@pytest.mark.slow
def test_one_rank_alone_saves_in_vain_and_all_can_go_on(start: Start, root: Path) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer(commit_timeout=4) as checkpointer:
            if rank.rank:
                wait_until((root / "in-vain").exists)
            first = save_and_wait(checkpointer, rank.state(1), 1)
            (root / "in-vain").touch()
            (root / f"knows-{rank.rank}").touch()
            wait_until(lambda: len(list(root.glob("knows-*"))) == WORLD)
            return first, save_and_wait(checkpointer, rank.state(2), 2)["id"]

    results = start().run(body)
    alone = results[0][0]
    assert (alone["id"], alone["rank"]) == (None, 1)
    assert "ranks 2, 3" in alone["text"]
    assert [late["id"] for late, _ in results[1:]] == [None] * (WORLD - 1)  # it was aborted long ago
    first, second = rows_of(root)
    assert (first["state"], second["state"]) == ("aborted", "committed")
    assert [id for _, id in results] == [second["id"]] * WORLD
    assert_saved(root, 2, WORLD)


@pytest.mark.slow
def test_storage_may_be_slower_than_the_process_group_is_patient(root: Path) -> None:
    job = Job(root, "c10d", group_seconds=2)

    def body(rank: Rank) -> Any:
        slow = Fault("finish", delay=5.0) if rank.rank == 0 else Fault("finish", times=0)
        with rank.checkpointer(slow) as checkpointer:
            outcome = save_and_wait(checkpointer, rank.state(1), 1)
            report = checkpointer.restore(rank.state(9))
            assert report is not None
            return [outcome["id"], report.generation_id]

    assert job.run(body) == [[1, 1]] * WORLD
    assert_saved(root, 1, WORLD)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thirty_two_processes_save_into_a_fresh_root(root: Path, tmp_path: Path) -> None:
    world = 8 * WORLD
    for number in range(4):
        fresh = Path(shutil.copytree(root, tmp_path / f"fresh-{number}"))
        with ckptfmt.open(fresh):
            pass

        def body(rank: Rank) -> Any:
            with rank.checkpointer() as checkpointer:
                return save_and_wait(checkpointer, {"b": rank.state(1)["b"], "step": 1}, 1)

        outcomes = Job(fresh, "catalog", world=world).run(body)
        assert [outcome["id"] for outcome in outcomes] == [1] * world, outcomes


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_dawdle_anywhere(start: Start, root: Path, seed: int) -> None:
    def body(rank: Rank) -> Any:
        draw = random.Random(100 * seed + rank.rank)
        naps = [Fault(number=number, delay=draw.uniform(0, 0.5)) for number in draw.sample(range(1, 60), 12)]
        with rank.checkpointer(*naps) as checkpointer:
            outcomes = [save_and_wait(checkpointer, rank.state(step), step)["id"] for step in (1, 2, 3, 4)]
            report = checkpointer.restore(rank.state(9))
            assert report is not None
            return [outcomes, report.generation_id]

    assert start().run(body) == [[[1, 2, 3, 4], 4]] * WORLD
    assert_saved(root, 4, WORLD)


class ShiftedClock(datetime):
    """Stands in for ``datetime`` where the hours are wrong."""

    hours = 0

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(hours=cls.hours)


@pytest.mark.slow
def test_wall_clocks_that_are_hours_off(start: Start, root: Path) -> None:
    """Leases, deadlines and the order of commits go by the database's clock alone, whatever a rank's own says."""

    def body(rank: Rank) -> Any:
        off, real = HOURS[rank.rank], time.time
        ShiftedClock.hours = off
        time.time = lambda: real() + 3600 * off
        saving.datetime = ShiftedClock  # type: ignore[misc,assignment,attr-defined]
        with rank.checkpointer() as checkpointer:
            before = checkpointer.restore(rank.state(9))
            base = 0 if before is None else before.step
            outcomes = [save_and_wait(checkpointer, rank.state(base + n), base + n)["id"] for n in (1, 2)]
            return [outcomes, None if before is None else before.generation_id]

    assert start().run(body) == [[[1, 2], None]] * WORLD
    began = time.monotonic()
    assert start().run(body) == [[[3, 4], 2]] * WORLD
    assert time.monotonic() - began < 25  # nobody waited for a lease that a wrong clock prolonged
    assert [(row["id"], row["step"], row["commit_seq"]) for row in rows_of(root)] == [(n, n, n) for n in (1, 2, 3, 4)]
    assert_saved(root, 4, WORLD)
