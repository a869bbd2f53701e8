"""Ranks that die, stop, or are slow: the others know by name and in time, and nothing half is ever committed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import pytest
from meeting_rig import (
    WORLD,
    Job,
    Rank,
    assert_saved,
    is_stopped,
    outcome_of,
    rows_of,
    save_and_wait,
    wait_until,
    whole_of,
)

import ckptfmt
from ckptfmt.engine.save import waiting
from ckptfmt.errors import CatalogError
from ckptfmt.launching import LaunchOrder
from ckptfmt.ports.coordination import COMMON, STORE_GONE, Board
from ckptfmt.testing.faults import Call, Fault

Start = Callable[..., Job]
pytestmark = pytest.mark.usefixtures("nobody_stays")


@pytest.fixture(params=["catalog", pytest.param("c10d", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest) -> str:
    """Where the ranks meet: in the store, too, in the slow suite."""
    return str(request.param)


@pytest.fixture(autouse=True)
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog of each rank looks all the time: what it would say too early, it says."""
    monkeypatch.setattr(LaunchOrder, "beat_seconds", 0.02)


HURRY: Final = 3.0
"""The commit timeout of saves that are to fail, in seconds."""
BOUND: Final = HURRY + 2 * HURRY / 2 + 8
"""Deadline, the margins of the others and of the coordinator, and what a busy machine adds."""


def mostly_slow(names: Iterable[str], *quick: str) -> list[Any]:
    """All of them, most only in the slow suite: each waits for a deadline."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def key_ends(text: str) -> Callable[[Call], bool]:
    return lambda call: call.key.endswith(text)


STAGES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "before its packs": ("backend", {"op": "open_writer"}),
    "in a pack": ("backend", {"op": "write_at", "timing": "torn"}),
    "before its part": ("backend", {"op": "create", "when": key_ends(".part.json")}),
    "after its part": ("backend", {"op": "create", "when": key_ends(".part.json"), "timing": "after"}),
}


def faults_of(rank: Rank, where: str, named: dict[str, Any]) -> tuple[list[Fault], list[Fault]]:
    """The faults of storage and of the catalog that kill ``rank`` there."""
    fault = Fault(error=rank.die, **named)
    return ([fault], []) if where == "backend" else ([], [fault])


@pytest.mark.slow
@pytest.mark.parametrize("stage", mostly_slow(STAGES, "in a pack"))
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_is_killed_in_its_save(start: Start, root: Path, stage: str, victim: int) -> None:
    where, named = STAGES[stage]

    def body(rank: Rank) -> Any:
        storage, sql = faults_of(rank, where, named) if rank.rank == victim else ([], [])
        with rank.checkpointer(*storage, sql=sql, commit_timeout=HURRY) as checkpointer:
            return save_and_wait(checkpointer, rank.state(1), 1)

    outcomes = start().run_some(body)
    assert outcomes[victim] is None
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert (outcome["id"], outcome["rank"], outcome["kind"]) == (None, victim, "save_failed"), outcome
            assert outcome["seconds"] < BOUND
    (row,) = rows_of(root)
    assert (row["state"], row["abort_rank"]) == ("aborted", victim)

    def again(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            assert checkpointer.restore(rank.state(0)) is None
            return save_and_wait(checkpointer, rank.state(2), 2)["id"]

    assert len(set(start().run(again))) == 1
    assert_saved(root, 2, WORLD)


STEPS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "before C1": ("sql", {"op": "begin_save"}),
    "C1, no folder": ("backend", {"op": "make_folder", "when": lambda call: "/" in call.key}),
    "C1, folder": ("backend", {"op": "make_folder", "timing": "after", "when": lambda call: "/" in call.key}),
    "before C3": ("backend", {"op": "create", "when": lambda call: "manifest-" in call.key}),
    "manifest": ("backend", {"op": "create", "timing": "after", "when": lambda call: "manifest-" in call.key}),
    "C3, durable": ("sql", {"op": "mark_durable", "timing": "after"}),
    "C4, committed": ("sql", {"op": "commit", "timing": "after"}),
    "C5, COMMIT.json": ("backend", {"op": "create", "timing": "after", "when": key_ends("COMMIT.json")}),
    "C5, proven": ("sql", {"op": "set_proven", "timing": "after"}),
}


@pytest.mark.parametrize("step", mostly_slow(STEPS))
def test_the_coordinator_is_killed_between_two_steps(start: Start, root: Path, step: str) -> None:
    """What the other ranks are told is what the catalog says in the end, and the next launch finds it settled."""
    where, named = STEPS[step]

    def body(rank: Rank) -> Any:
        storage, sql = faults_of(rank, where, named) if rank.rank == 0 else ([], [])
        with rank.checkpointer(*storage, sql=sql, commit_timeout=HURRY) as checkpointer:
            return save_and_wait(checkpointer, rank.state(1), 1)

    outcomes = start().run_some(body)
    assert outcomes[0] is None
    told = {outcome["id"] for outcome in outcomes[1:]}
    assert len(told) == 1, outcomes
    assert all(outcome["seconds"] < BOUND for outcome in outcomes[1:])
    committed = told != {None}
    if step in ("C3, durable", "C4, committed", "C5, COMMIT.json", "C5, proven"):
        assert committed  # any rank may finish it
    if not committed:
        assert {outcome["rank"] for outcome in outcomes[1:]} == {0}, outcomes

    def again(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            live = rank.state(0)
            report = checkpointer.restore(live)
            assert (report is not None) == committed
            if report is not None:
                assert (report.step, live["step"]) == (1, 1)
            return save_and_wait(checkpointer, rank.state(2), 2)["id"]

    assert len(set(start().run(again))) == 1
    assert {row["state"] for row in rows_of(root) if row["step"] == 1} <= {"committed" if committed else "aborted"}
    assert_saved(root, 2, WORLD)


@pytest.mark.slow
@pytest.mark.parametrize("sleeper", [0, 2])
def test_a_rank_that_sleeps_past_the_deadline_commits_nothing(start: Start, root: Path, sleeper: int) -> None:
    """It wakes up after the next launch has saved: nothing of that one changes, and it knows that it has failed."""

    def body(rank: Rank) -> Any:
        def falls_asleep() -> BaseException:
            time.sleep(1.2)  # after the first beat of the lease: whoever stops in a transaction keeps SQLite locked
            return rank.stop()

        faults = [Fault("write_at", error=falls_asleep)] if rank.rank == sleeper else []
        with rank.repository(*faults) as repository:
            named = {"launch": rank.job.token} if rank.job.place == "catalog" else {}
            checkpointer = repository.checkpointer(
                "run", rank=rank.rank, world_size=WORLD, coordination=rank.job.place, commit_timeout=HURRY, **named
            )
            rank.gather()
            first = save_and_wait(checkpointer, rank.state(1), 1)
            second = outcome_of(lambda: checkpointer.save(rank.state(2), step=2).result(30)) if faults else None  # type: ignore[union-attr]
            checkpointer.close()
            return first, second

    ranks = start().start(body)
    wait_until(lambda: is_stopped(ranks[sleeper].pid))
    try:
        others = [rank.result()[0] for number, rank in enumerate(ranks) if number != sleeper]
        for outcome in others:
            assert (outcome["id"], outcome["rank"]) == (None, sleeper), outcome
            assert outcome["seconds"] < BOUND

        def again(rank: Rank) -> Any:
            with rank.checkpointer(takeover=True) as checkpointer:
                return save_and_wait(checkpointer, rank.state(3), 3)["id"]

        assert len(set(start().run(again))) == 1
        before = listing(root)
    finally:
        os.kill(ranks[sleeper].pid, signal.SIGCONT)
    first, second = ranks[sleeper].result()
    assert first["id"] is None
    assert second["id"] is None
    newest = rows_of(root)[1]
    assert newest["state"] == "committed"
    kept = {name: facts for name, facts in before.items() if newest["key"] in name}
    assert kept == {name: facts for name, facts in listing(root).items() if newest["key"] in name}
    assert [row["state"] for row in rows_of(root)] == ["aborted", "committed"]
    assert_saved(root, 3, WORLD)


def listing(root: Path) -> dict[str, tuple[int, int]]:
    """Every object with its size and the time of its last change."""
    found = (path for path in (root / "runs").rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


@pytest.mark.slow
def test_a_rank_that_never_saves_is_named_at_the_deadline(start: Start, root: Path) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer(commit_timeout=HURRY) as checkpointer:
            if rank.rank == 3:
                time.sleep(HURRY + 2)
                return None
            return save_and_wait(checkpointer, rank.state(1), 1)

    for outcome in start().run(body)[:3]:
        assert (outcome["id"], outcome["rank"]) == (None, 3), outcome
        assert "did not acknowledge" in outcome["text"]
        assert outcome["seconds"] < BOUND


def is_gone(board: Board) -> bool:
    try:
        board.peek("anything", [COMMON])
    except CatalogError as error:
        return error.kind == STORE_GONE
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "blamed", "row"),
    [
        ("opening", None, ("writing", None)),
        ("writing", None, ("aborted", None)),
        ("acknowledged", 0, ("aborted", 0)),
    ],
)
def test_the_store_dies_with_rank_zero(
    root: Path, moment: str, blamed: int | None, row: tuple[str, int | None]
) -> None:
    """Its clients lose their board: they ask the catalog themselves, are bounded still, and blame nobody who lives."""
    job = Job(root, "c10d")

    def body(rank: Rank) -> Any:
        def dies() -> BaseException:
            wait_until(lambda: moment == "opening" or len(list(root.glob("begun-*"))) == WORLD)
            wait_until(lambda: moment != "acknowledged" or len(list(root.glob("staged-*"))) == WORLD - 1)
            return rank.die()

        mine = Fault("make_folder" if moment == "opening" else "write_at", error=dies)
        theirs = Fault("write_at", hold=threading.Event(), times=1 if moment == "writing" else 0)
        with rank.checkpointer(theirs if rank.rank else mine, commit_timeout=HURRY) as checkpointer:
            (root / f"there-{rank.rank}").touch()
            wait_until(lambda: len(list(root.glob("there-*"))) == WORLD)
            pending = checkpointer.save(rank.state(1), step=1)
            assert pending is not None
            if moment != "opening":
                wait_until(lambda: pending.generation_id is not None)
                (root / f"begun-{rank.rank}").touch()
                if moment == "acknowledged":
                    wait_until(lambda: pending.stage != "frozen")
                    (root / f"staged-{rank.rank}").touch()
                wait_until(lambda: is_gone(checkpointer._context.coordination._board))  # type: ignore[attr-defined]
                assert theirs.hold is not None
                theirs.hold.set()
            return outcome_of(lambda: pending.result(60))

    outcomes = job.run_some(body)
    assert outcomes[0] is None
    for outcome in outcomes[1:]:
        assert (outcome["id"], outcome["rank"]) == (None, blamed), outcome
        assert outcome["seconds"] < BOUND
        assert "store is gone, and with it perhaps the rank that held it" in outcome["text"]
    assert [(found["state"], found["abort_rank"]) for found in rows_of(root)] == [row]


def test_a_save_that_no_rank_aborted_is_blamed_on_none(root: Path) -> None:
    """It finds its generation aborted while it writes."""

    def body(rank: Rank) -> Any:
        def aborted(call: Call) -> bool:
            (row,) = rank.catalog.generations(run="run")
            fence = checkpointer._context.launch.fence
            rank.catalog.abort(row.id, stage="persist", rank=None, reason="the store is gone", fence=fence)
            return False

        with rank.checkpointer(Fault("write_at", nth=1, when=aborted)) as checkpointer:
            return save_and_wait(checkpointer, rank.state(1), 1)

    (outcome,) = Job(root, "catalog", world=1).run(body)
    assert (outcome["id"], outcome["rank"], outcome["stage"]) == (None, None, "persist")
    assert "the store is gone" in outcome["text"]


@pytest.mark.slow
def test_storage_that_hangs_at_the_proof_keeps_no_rank(
    start: Start, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation is committed, and the coordinator hangs in C5, as do the ranks that would do it in its place."""
    monkeypatch.setattr(waiting, "_PROOF_SECONDS", 0.3)

    def body(rank: Rank) -> Any:
        proof = Fault("create", hold=threading.Event(), times=None, when=key_ends("COMMIT.json"))
        assert proof.hold is not None
        with rank.checkpointer(proof, commit_timeout=HURRY) as checkpointer:
            try:
                outcome = save_and_wait(checkpointer, rank.state(1), 1)
                (root / f"told-{rank.rank}").touch()
                wait_until(lambda: len(list(root.glob("told-*"))) == WORLD)
            finally:
                proof.hold.set()
            return outcome, proof.fired

    results = start().run(body)
    for outcome, _ in results:
        assert outcome["id"] is not None, outcome  # committed: the proof is left to `recover`
        assert outcome["seconds"] < BOUND
    assert sum(fired for _, fired in results) >= 1
    assert [row["state"] for row in rows_of(root)] == ["committed"]


def test_an_older_launch_of_many_ranks_is_fenced(start: Start, root: Path) -> None:
    """Another start takes over while the first one lives: none of its ranks saves any more."""
    first = start()

    def old(rank: Rank) -> Any:
        with rank.checkpointer(commit_timeout=HURRY) as checkpointer:
            assert checkpointer.restore(rank.state(0)) is None
            (root / f"begun-{rank.rank}").touch()
            wait_until((root / "taken").exists)
            outcome = save_and_wait(checkpointer, rank.state(1), 1)
            return outcome

    ranks = first.start(old)
    try:
        wait_until(lambda: len(list(root.glob("begun-*"))) == WORLD)

        def new(rank: Rank) -> Any:
            with rank.checkpointer(takeover=True) as checkpointer:
                return save_and_wait(checkpointer, rank.state(2), 2)["id"]

        assert len(set(start().run(new))) == 1
    finally:
        (root / "taken").touch()
    for rank in ranks:
        outcome = rank.result()
        assert outcome["id"] is None
        assert outcome["seconds"] < BOUND
    assert [row["step"] for row in rows_of(root) if row["state"] == "committed"] == [2]
    assert_saved(root, 2, WORLD)


def test_the_rest_of_an_aborted_save_is_swept_without_touching_what_others_write(start: Start, root: Path) -> None:
    def body(rank: Rank) -> Any:
        faults = [Fault("finish", error=lambda: OSError(28, "full"))] if rank.rank == 1 else []
        with rank.checkpointer(*faults, commit_timeout=20) as checkpointer:
            first = save_and_wait(checkpointer, rank.state(1), 1)
            listed = rank.backend.counts["list"]
            return first["rank"], save_and_wait(checkpointer, rank.state(2), 2)["id"] is not None, listed

    results = start().run(body)
    assert [result[:2] for result in results] == [[1, True]] * WORLD
    assert [listed for _, _, listed in results][1:] == [0] * (WORLD - 1)  # each would see what all have written
    failed, kept = rows_of(root)
    names = {path.name for path in (root / "runs").rglob(f"{failed['key']}/*")}
    assert {name for name in names if name.startswith("r00001")} == set()
    with ckptfmt.open(root) as repository:
        repository.gc(dry_run=False)
        assert repository.latest("run").id == kept["id"]
    assert {path.name for path in (root / "runs").rglob(f"{failed['key']}/*")} == {"COMMIT.json"}
    assert whole_of(2)["b"].tobytes() == ckptfmt.load(root, run="run", rank=0)["b"].tobytes()


def test_a_rank_of_a_fenced_launch_does_not_wait_for_what_nobody_posts(root: Path) -> None:
    """Its coordinator chose what to restore, and was displaced: the choice is gone with the launch's messages."""
    job = Job(root, "catalog", world=2)

    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            (root / f"begun-{rank.rank}").touch()
            wait_until((root / "taken").exists)
            with pytest.raises(ckptfmt.Fenced):
                checkpointer.restore(rank.state(0))
            return True

    ranks = job.start(body)
    try:
        wait_until(lambda: len(list(root.glob("begun-*"))) == 2)
        with ckptfmt.open(root) as repository:
            repository.checkpointer("run", takeover=True).close()
    finally:
        (root / "taken").touch()
    assert [rank.result() for rank in ranks] == [True, True]
