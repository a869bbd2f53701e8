"""Many ranks save one generation: all of it or nothing, and each of them knows which."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from meeting_rig import WORLD, Job, Rank, assert_saved, outcome_of, rows_of, save_and_wait, state_of, wait_until

import ckptfmt
from ckptfmt.engine.save import meeting
from ckptfmt.errors import Conflict, InvalidInput
from ckptfmt.testing.faults import Fault

Start = Callable[..., Job]


def lines() -> list[str]:
    """What this process logs from now on."""
    found: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger = logging.getLogger("ckptfmt")
    logger.setLevel(logging.INFO)
    logger.addHandler(Lines())
    return found


def test_four_ranks_save_one_generation(start: Start, root: Path) -> None:
    def body(rank: Rank) -> Any:
        logged = lines()
        with rank.checkpointer() as checkpointer:
            outcomes = [save_and_wait(checkpointer, rank.state(step), step) for step in (1, 2, 3)]
            assert checkpointer.last_committed is not None
            last = checkpointer.last_committed.id
        commits = [line for line in logged if "committed: stall" in line]
        (root / f"logged-{rank.rank}").write_text("\n".join(commits))
        return outcomes, last, os.getpid()

    results = start().run(body)
    logged = [(root / f"logged-{rank}").read_text().splitlines() for rank in range(WORLD)]
    assert [line.partition(" committed")[0] for line in logged[0]] == [f"run #{n} step {n}" for n in (1, 2, 3)]
    assert logged[1:] == [[]] * (WORLD - 1)  # one line per commit, on the coordinator
    ids = [[outcome["id"] for outcome in outcomes] for outcomes, _, _ in results]
    assert ids == [ids[0]] * WORLD
    assert [last for _, last, _ in results] == [ids[0][-1]] * WORLD
    assert_saved(root, 3, WORLD)
    with ckptfmt.open(root) as repository:
        catalog = repository._connection.site.sql()
        launch = catalog.launches("run")[0]
        assert (launch.world_size, launch.pid) == (WORLD, results[0][2])
        assert launch.closed_at is not None
        for row in catalog.generations(run="run"):
            assert [(rank.rank, rank.state) for rank in catalog.ranks(row.id)] == [
                (rank, "durable") for rank in range(WORLD)
            ]
            assert row.launch_id == launch.id
        assert catalog.generations(run="run")[-1].parent_key is None


@pytest.mark.slow
def test_two_saves_in_flight_are_committed_in_their_order(start: Start, root: Path) -> None:
    def body(rank: Rank) -> Any:
        slow = Fault("finish", delay=0.3) if rank.rank == 2 else Fault("finish", times=0)
        with rank.checkpointer(slow, in_flight_max=2) as checkpointer:
            pendings = [checkpointer.save(rank.state(step), step=step) for step in (1, 2, 3, 4)]
            return [pending.result(30).id for pending in pendings if pending is not None]

    ids = start().run(body)
    assert ids == [ids[0]] * WORLD
    assert sorted((row["commit_seq"], row["step"]) for row in rows_of(root)) == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert_saved(root, 4, WORLD)


@pytest.mark.slow
def test_a_slow_rank_is_waited_for(start: Start, root: Path) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer(commit_timeout=20) as checkpointer:
            if rank.rank == 3:
                time.sleep(1.0)
            return save_and_wait(checkpointer, rank.state(7), 7)

    outcomes = start().run(body)
    assert len({outcome["id"] for outcome in outcomes}) == 1
    assert_saved(root, 7, WORLD)


@pytest.mark.parametrize("members", [(0,), (1, 3)])
def test_only_some_ranks_save(start: Start, root: Path, members: tuple[int, ...]) -> None:
    def body(rank: Rank) -> Any:
        state = {"b": rank.state(5)["b"], "step": 5}
        with rank.checkpointer(ranks=members) as checkpointer:
            assert checkpointer.restore(state) is None  # all of them are there
            pending = checkpointer.save(state, step=5)
            return None if pending is None else pending.result(30).id

    ids = start().run(body)
    assert [rank for rank, id in enumerate(ids) if id is not None] == list(members)
    assert len({id for id in ids if id is not None}) == 1
    with ckptfmt.open(root, mode="r") as repository:
        generation = repository.latest("run")
        assert generation.load(keys=["b", "step"])["step"] == 5
        generation.verify()


# -- skip ---------------------------------------------------------------------------------------------
def test_whether_a_save_is_skipped_is_one_decision(start: Start, root: Path) -> None:
    """One rank's writer is slow: it would skip what the others would begin."""

    def body(rank: Rank) -> Any:
        slow = Fault("finish", delay=0.15, times=None) if rank.rank == 1 else Fault("finish", times=0)
        with rank.checkpointer(slow, on_busy="skip") as checkpointer:
            begun = []
            for step in range(1, 16):
                if checkpointer.save(rank.state(step), step=step) is not None:
                    begun.append(step)
                time.sleep(0.03 * (rank.rank + 1))
            return begun

    begun = start().run(body)
    assert begun == [begun[0]] * WORLD
    assert [row["step"] for row in rows_of(root)] == begun[0]
    assert {row["state"] for row in rows_of(root)} == {"committed"}
    assert 1 <= len(begun[0]) < 15


# -- one rank fails -----------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_rank_that_disagrees_on_the_step_fails_the_save_on_every_rank(start: Start, root: Path) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer(commit_timeout=20) as checkpointer:
            first = save_and_wait(checkpointer, rank.state(1), 10 if rank.rank != 2 else 11)
            return first, save_and_wait(checkpointer, rank.state(2), 20)

    results = start().run(body)
    for first, second in results:
        assert first["id"] is None
        assert first["seconds"] < 15
        assert "step" in first["text"]
        assert second["id"] is not None
    assert len({second["id"] for _, second in results}) == 1
    assert [row["step"] for row in rows_of(root) if row["state"] == "committed"] == [20]


class Unshowable(Exception):
    """Cannot be pickled, compared or shown: it holds an open socket of a library of its own, say."""

    def __init__(self) -> None:
        super().__init__()
        self.held = lambda: None

    def __str__(self) -> str:
        raise RuntimeError("not even this")


@pytest.mark.slow
@pytest.mark.parametrize("error", [lambda: OSError(5, "disk on fire"), Unshowable], ids=["os", "unshowable"])
def test_a_failing_rank_is_named_on_every_rank(start: Start, root: Path, error: Any) -> None:
    def body(rank: Rank) -> Any:
        broken = Fault("finish", error=error, times=1 if rank.rank == 2 else 0)
        with rank.checkpointer(broken, commit_timeout=30) as checkpointer:
            first = save_and_wait(checkpointer, rank.state(1), 1)
            return first, save_and_wait(checkpointer, rank.state(2), 2)

    results = start().run(body)
    for first, second in results:
        assert (first["id"], first["rank"], first["stage"]) == (None, 2, "persist"), first
        assert first["seconds"] < 15
        assert ("disk on fire" in first["text"]) or ("Unshowable" in first["text"])
        assert second["id"] is not None
    failed = next(row for row in rows_of(root) if row["step"] == 1)
    assert (failed["state"], failed["abort_rank"], failed["abort_stage"]) == ("aborted", 2, "persist")
    assert_saved(root, 2, WORLD)


@pytest.mark.slow
def test_a_rank_whose_state_cannot_be_saved_fails_all_of_them_soon(start: Start, root: Path) -> None:
    """It never begins: the others hear of it long before the deadline."""

    def body(rank: Rank) -> Any:
        with rank.checkpointer(commit_timeout=60) as checkpointer:
            state = rank.state(1)
            if rank.rank == 3:
                state["step"] = object()
                with pytest.raises(ckptfmt.UnsupportedValue):
                    checkpointer.save(state, step=1)
                first = None
            else:
                first = save_and_wait(checkpointer, state, 1)
            return first, save_and_wait(checkpointer, rank.state(2), 2)

    results = start().run(body)
    for first, second in results:
        if first is not None:
            assert (first["id"], first["rank"]) == (None, 3), first
            assert "UnsupportedValue" in first["text"]
            assert first["seconds"] < 15
        assert second["id"] is not None
    assert_saved(root, 2, WORLD)


def test_replicas_that_differ_fail_the_save_by_name(start: Start, root: Path) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            state = rank.state(1)
            if rank.rank == 1:
                state["b"] = state["b"] + 1
            return save_and_wait(checkpointer, state, 1)

    for outcome in start().run(body):
        assert outcome["id"] is None
        assert "'b'" in outcome["text"]
    assert [row["state"] for row in rows_of(root)] == ["aborted"]


# -- who is who ---------------------------------------------------------------------------------------
def test_a_second_process_for_a_rank_is_refused(root: Path) -> None:
    job = Job(root, "catalog", world=2)

    def first(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            if rank.rank == 1:
                (root / "joined").touch()
            wait_until((root / "done").exists)
            return checkpointer.last_committed is None

    started = job.start(first)
    try:
        wait_until((root / "joined").exists)
        with ckptfmt.open(root) as repository, pytest.raises(Conflict, match="rank 1") as caught:
            repository.checkpointer("run", rank=1, world_size=2, launch=job.token)
        assert caught.value.kind == "rank_taken"
        with ckptfmt.open(root) as repository, pytest.raises(Conflict, match="token"):
            repository.checkpointer("run", rank=0, world_size=2, launch=job.token)
    finally:
        (root / "done").touch()
        assert [rank.result() for rank in started] == [True, True]


def test_several_ranks_need_one_token(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names a world, but no identity: a launcher's run id may be the same for all jobs (FR-70)."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with ckptfmt.open(root) as repository, pytest.raises(InvalidInput, match="launch token"):
        repository.checkpointer("run")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"world_size": 4}, "give both"),
        ({"rank": 1}, "give both"),
        ({"rank": 4, "world_size": 4}, "rank=4"),
        ({"rank": 0, "world_size": 4, "ranks": []}, "ranks="),
        ({"rank": 0, "world_size": 4, "ranks": [4]}, "ranks="),
        ({"rank": 0, "world_size": 4, "ranks": [1, 1]}, "ranks="),
        ({"rank": 0, "world_size": 4, "replica_check": "some"}, "replica_check"),
        ({"rank": 0, "world_size": 4, "coordination": "mpi"}, "coordination"),
        ({"rank": 0, "world_size": 4, "launch": "a" * 32, "coordination": "c10d"}, "torch.distributed"),
    ],
)
def test_arguments_that_do_not_fit(root: Path, arguments: dict[str, Any], said: str) -> None:
    with ckptfmt.open(root) as repository, pytest.raises(InvalidInput, match=said):
        repository.checkpointer("run", **arguments)


def test_a_rank_whose_coordinator_does_not_come_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "JOIN_SECONDS", 0.5)
    with ckptfmt.open(root) as repository, pytest.raises(ckptfmt.CatalogError, match="rank 0, the coordinator"):
        repository.checkpointer("run", rank=1, world_size=2, launch="b" * 32)


def test_many_ranks_in_one_catalog_are_warned_of(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "LEAVE_SECONDS", 0.0)
    with ckptfmt.open(root) as repository, caplog.at_level(logging.WARNING, "ckptfmt"):
        repository.checkpointer("run", rank=0, world_size=64, launch="a" * 32).close()
        assert "meet in the catalog" not in caplog.text
        repository.checkpointer("run", rank=0, world_size=65, launch="b" * 32).close()
        assert "65 ranks meet in the catalog" in caplog.text


def test_a_start_after_a_start_has_a_token_of_its_own(root: Path, agent: int) -> None:
    """Two checkpointers of one process group, one after the other."""
    job = Job(root, "c10d", world=2, agent=agent)

    def body(rank: Rank) -> Any:
        ids = []
        for step in (1, 2):
            with rank.checkpointer(rank=None, world_size=None, coordination="auto") as checkpointer:
                assert checkpointer._context.ranks.rank == rank.rank  # as torch.distributed says
                ids.append(save_and_wait(checkpointer, rank.state(step), step)["id"])
        return ids

    first, second = job.run(body)
    assert first == second
    with ckptfmt.open(root) as repository:
        launches = repository._connection.site.sql().launches("run")
    assert len({launch.token for launch in launches}) == len(launches) == 2


def test_settling_comes_before_anybody_saves(root: Path) -> None:
    """An older launch of one rank left a generation; the new one of four finds it settled."""
    with ckptfmt.open(root) as repository:
        catalog = repository._connection.site.sql()
        catalog.ensure_run("run", ckptfmt.format.layout.run_key("run"))
    old = Job(root, "catalog", world=1)

    def dies(rank: Rank) -> Any:
        with rank.checkpointer(sql=[Fault("commit", error=rank.die)]) as checkpointer:
            return outcome_of(lambda: checkpointer.save(state_of(3, 0, 1), step=3).result(20))  # type: ignore[union-attr]

    assert old.run_some(dies) == [None]

    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            found = [info.step for info in rank.repository().generations(run="run")]
            return found, save_and_wait(checkpointer, rank.state(4), 4)["id"]

    results = Job(root, "catalog").run(body)
    assert [found for found, _ in results] == [[3]] * WORLD
    assert len({id for _, id in results}) == 1


@pytest.mark.slow
def test_in_the_store_the_coordinator_alone_asks_the_catalog(root: Path, agent: int) -> None:
    """Saves, skips, restores and decisions of the other ranks need no SQL: a thousand of them hold no connection."""

    def body(rank: Rank) -> Any:
        with rank.checkpointer(on_busy="skip", every_seconds=0.2) as checkpointer:
            rank.catalog.counts.clear()
            for step in range(1, 4):
                pending = checkpointer.save(rank.state(step), step=step)
                if pending is not None:
                    pending.exception(30)
            assert checkpointer.restore(rank.state(0)) is not None
            for step in range(4, 60):
                time.sleep(0.01)
                checkpointer.should_save(step)
            return dict(rank.catalog.counts)

    first, *others = Job(root, "c10d", agent=agent).run(body)
    assert first["begin_save"] >= 1
    assert first["report_ranks"] == first["begin_save"]
    assert others == [{}] * (WORLD - 1)
