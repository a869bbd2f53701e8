"""Nothing fails silently, and nothing is called failed that was committed."""

from __future__ import annotations

import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_chain import chain_of
from lifecycle_rig import Place, Process, assert_state, ended, eventually, named, set_commit_timeout, state_of

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.engine import protocol
from ckptfmt.engine.save import outcome, persist
from ckptfmt.errors import (
    BackendError,
    InvalidInput,
    OutcomeUnknown,
    OutOfSpace,
    SaveFailed,
    Unavailable,
)
from ckptfmt.format.states import State
from ckptfmt.pending import PendingSave
from ckptfmt.testing.catalog_faults import unreachable
from ckptfmt.testing.faults import Fault


def broken_disk() -> BackendError:
    return BackendError("the disk is broken")


def lost() -> Unavailable:
    return Unavailable("the answer was lost")


def many(seed: int) -> dict[str, Any]:
    """Tensors of several write units."""
    rng = np.random.default_rng(seed)
    return {f"t{number}": rng.standard_normal(1_200_000) for number in range(3)}  # 9.6 MB each


# -- failures ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failed_write_on_a_worker_thread_fails_the_save(place: Place, nth: int) -> None:
    process = place.open()
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(0), step=0)
        checkpointer.wait()
        process.backend.add(Fault("write_at", error=broken_disk, nth=process.backend.counts["write_at"] + nth))
        pending = checkpointer.save(many(1), step=1)
        assert pending is not None
        with pytest.raises(SaveFailed, match="the disk is broken") as caught:
            pending.result()
    error = caught.value
    assert isinstance(error.__cause__, BackendError)
    row = process.row()
    assert (error.stage, error.rank, error.generation_id, error.key) == ("persist", 0, row.id, pending.key)
    assert ended(row)
    assert (row.abort_stage, row.abort_rank) == ("persist", 0)
    assert row.abort_reason is not None
    assert "the disk is broken" in row.abort_reason
    assert process.objects(f"runs/{row.run_key}/{row.key}") == [f"runs/{row.run_key}/{row.key}/COMMIT.json"]
    assert process.repository.latest().step == 0


def test_the_next_save_raises_what_nobody_has_seen_once(place: Place) -> None:
    process = place.open(Fault("write_at", error=broken_disk))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        with pytest.raises(SaveFailed, match="the disk is broken"):
            checkpointer.save(state_of(2), step=2)
        assert [row.step for row in process.rows()] == [1]
        checkpointer.save(state_of(3), step=3)
        assert pending is not None
        assert isinstance(pending.exception(), SaveFailed)
    assert process.repository.latest().step == 3


def _leave(checkpointer: Checkpointer) -> None:
    with checkpointer:
        pass


@pytest.mark.parametrize("way", [Checkpointer.wait, Checkpointer.close, _leave])
def test_an_unseen_failure_surfaces(place: Place, way: Callable[[Checkpointer], None]) -> None:
    process = place.open(Fault("write_at", error=broken_disk))
    checkpointer = process.checkpointer()
    checkpointer.save(state_of(1), step=1)
    with pytest.raises(SaveFailed, match="the disk is broken"):
        way(checkpointer)
    checkpointer.close()
    assert process.catalog.live_launch("run") is None


def test_a_failure_that_was_seen_is_not_told_twice(place: Place) -> None:
    process = place.open(Fault("write_at", error=broken_disk))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        assert isinstance(pending.exception(), SaveFailed)
        checkpointer.wait()
        checkpointer.save(state_of(2), step=2)
    assert process.repository.latest().step == 2


def test_callbacks_run_once_with_the_outcome_and_their_errors_are_logged(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    process = place.open()
    seen: list[Any] = []

    def bad(done: Any) -> None:
        raise ValueError("from the callback")

    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        pending.add_done_callback(bad)
        pending.add_done_callback(lambda done: seen.append((done, done.stage)))
        checkpointer.wait()
        pending.add_done_callback(lambda done: seen.append("late"))
    assert seen == [(pending, "committed"), "late"]
    assert "from the callback" in caplog.text
    assert process.repository.latest().step == 1


def test_the_log_line_of_a_failure_tells_it_though_somebody_looked_first(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    hold = threading.Event()
    process = place.open(Fault("write_at", error=broken_disk, hold=hold))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        looker = threading.Thread(target=pending.exception)
        looker.start()
        hold.set()
        looker.join()
        checkpointer.wait()
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert any("the disk is broken" in message for message in errors)
    assert "None" not in errors


# -- lost answers -----------------------------------------------------------------------------------
@pytest.mark.parametrize("op", ["begin_save", "report_rank", "mark_durable", "commit", "set_proven"])
def test_a_lost_answer_of_the_catalog_is_resolved_as_committed(place: Place, op: str) -> None:
    process = place.open(sql=[Fault(op, error=unreachable, timing="after")])
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        generation = pending.result()
        checkpointer.save(state_of(2), step=2)
    assert process.catalog.counts[op] >= 3
    assert_state(generation.load(), 1)
    assert [row.commit_seq for row in process.rows()] == [1, 2]
    assert process.events().count("commit") == 2


@pytest.mark.parametrize("name", ["r00000.part.json", ".json.zst", "COMMIT.json"])
def test_a_lost_answer_of_a_create_is_resolved_as_committed(place: Place, name: str) -> None:
    process = place.open(Fault("create", error=lost, timing="after", when=named(name), times=2))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        generation = pending.result()
    assert_state(generation.load(), 1)
    assert process.row().proven_at is not None
    assert process.events().count("commit") == 1


@pytest.mark.parametrize(("op", "timing"), [("finish", "after"), ("write_at", "torn"), ("open_writer", "before")])
def test_a_pack_that_failed_for_a_passing_reason_is_written_again_under_a_new_name(
    place: Place, op: str, timing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persist, "_PAUSE_SECONDS", 0.01)
    process = place.open(Fault(op, error=lost, timing=timing))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        generation = pending.result()
    assert_state(generation.load(), 1)
    assert [pack.name for pack in process.catalog.packs(generation.id)] == ["r00000-p000-a1.safetensors"]
    assert process.catalog.ranks(generation.id)[0].retries == 1


HURRY = 0.8
"""A commit timeout in seconds that a test waits for, long enough to reach the fault on a busy machine."""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up on a catalog or a storage that is away in a second."""
    monkeypatch.setattr(outcome, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(protocol, "_PROOF_SECONDS", 0.3)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("timing", ["before", "after"])
def test_a_catalog_away_from_the_commit_on_leaves_the_outcome_unknown(place: Place, timing: Any) -> None:
    process = place.open()
    checkpointer = process.checkpointer(commit_timeout=HURRY)
    gate = Fault(error=unreachable, times=None)

    def close_gate() -> BaseException:
        process.catalog.add(gate)
        return unreachable()

    process.catalog.add(Fault("commit", error=close_gate, timing=timing))
    pending = checkpointer.save(state_of(1), step=1)
    assert pending is not None
    with pytest.raises(OutcomeUnknown, match="unknown") as caught:
        pending.result(timeout=20)
    assert caught.value.generation_id == pending.generation_id
    assert process.backend.counts["delete"] == 0
    assert any(key.endswith(".safetensors") for key in process.objects())
    process.die()

    fresh = place.open()
    state = fresh.row().state
    assert state is (State.COMMITTED if timing == "after" else State.DURABLE)
    fresh.catalog.close_launch(fresh.catalog.live_launch("run").id)
    (action,) = fresh.repository.recover().actions
    assert action.action == ("proved" if timing == "after" else "committed")
    assert_state(fresh.repository.latest().load(), 1)
    assert not fresh.repository.recover().actions


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("op", ["begin_save", "report_rank", "mark_durable", "commit"])
@pytest.mark.parametrize("timing", ["before", "after"])
def test_an_unknown_outcome_does_not_block_the_saves_after_it(place: Place, op: str, timing: Any) -> None:
    process = place.open()
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(0), step=0)
        checkpointer.wait()
        patient = checkpointer._context.commit_timeout
        set_commit_timeout(checkpointer, HURRY)
        outage = Fault(error=unreachable, times=None)

        def begin_outage() -> BaseException:
            process.catalog.add(outage)
            return unreachable()

        process.catalog.add(Fault(op, error=begin_outage, timing=timing))
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        error = pending.exception(timeout=20)
        assert isinstance(error, OutcomeUnknown) or (error is None and (op, timing) == ("commit", "after"))
        process.catalog.heal()
        set_commit_timeout(checkpointer, patient)
        later = checkpointer.save(state_of(2), step=2)
        assert later is not None
        assert_state(later.result().load(), 2)
    states = {row.step: row.state for row in process.rows()}
    assert states[2] is State.COMMITTED
    assert states.get(1) in (None, State.ABORTED, State.COMMITTED)
    assert (states.get(1) is State.COMMITTED) == (op == "commit" or (op, timing) == ("mark_durable", "after"))
    assert_state(process.repository.latest().load(), 2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("error", [lost, broken_disk])
def test_a_proof_that_keeps_failing_is_pending_not_failed(place: Place, error: Any) -> None:
    process = place.open(Fault("create", error=error, when=named("COMMIT.json"), times=None))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        assert_state(pending.result().load(), 1)
        assert checkpointer.last_committed is not None
        assert checkpointer.last_committed.proof_pending
    process.backend.heal()
    assert [action.action for action in process.repository.recover(dry_run=True).actions] == ["proved"]
    assert process.row().proven_at is None
    assert [action.action for action in process.repository.recover().actions] == ["proved"]
    assert process.row().proven_at is not None
    assert not process.repository.recover().actions


# -- the deadline -----------------------------------------------------------------------------------
def test_a_writer_that_hangs_fails_in_time_and_commits_nothing_when_it_comes_back(place: Place) -> None:
    hold = threading.Event()
    fault = Fault("write_at", hold=hold)
    process = place.open(fault)
    checkpointer = process.checkpointer(commit_timeout=HURRY)
    pending = checkpointer.save(state_of(1), step=1)
    assert pending is not None
    began = time.monotonic()
    with pytest.raises(SaveFailed, match=r"not committed within 0\.8 s \(stage persist") as caught:
        checkpointer.wait(timeout=20)
    assert time.monotonic() - began < 5
    assert (caught.value.stage, caught.value.generation_id) == ("persist", pending.generation_id)
    row = process.row()
    assert (row.state, row.abort_stage) == (State.ABORTED, "persist")

    set_commit_timeout(checkpointer, 30.0)
    later = checkpointer.save(state_of(2), step=2)
    assert later is not None
    assert_state(later.result().load(), 2)
    assert not hold.is_set()
    hold.set()
    eventually(lambda: process.backend.counts["abort"] == 1)
    checkpointer.close()
    assert [row.state for row in process.rows()] == [State.ABORTED, State.COMMITTED]
    assert_state(process.repository.latest().load(), 2)
    process.repository.gc(dry_run=False)
    assert [row.state for row in process.rows()] == [State.DELETED, State.COMMITTED]


def save_that_fails_and_settles(place: Place) -> tuple[threading.Event, Process, Checkpointer, PendingSave]:
    """A save whose disk is broken, and whose abort is held until the event."""
    hold = threading.Event()
    process = place.open(Fault("write_at", error=broken_disk), sql=[Fault("abort", hold=hold)])
    checkpointer = process.checkpointer(commit_timeout=HURRY)
    pending = checkpointer.save(state_of(1), step=1)
    assert pending is not None
    return hold, process, checkpointer, pending


def test_a_save_that_has_failed_gives_its_verdict_itself_past_the_deadline_too(place: Place) -> None:
    """The watchdog, which looks at each beat, knows less of it: only that the time is over."""
    hold, process, checkpointer, pending = save_that_fails_and_settles(place)
    eventually(lambda: process.catalog.counts["abort"] == 1)
    time.sleep(3 * HURRY)
    assert not pending.done()
    assert process.catalog.counts["abort"] == 1
    hold.set()
    assert "the disk is broken" in str(pending.exception(timeout=20))
    assert "the disk is broken" in str(process.row().abort_reason)
    assert [key for key in process.objects() if key.endswith(".safetensors")] == []
    assert_later_save(checkpointer)


@pytest.mark.usefixtures("impatient")
def test_the_watchdog_says_why_a_save_failed_whose_verdict_hangs(place: Place) -> None:
    hold, process, checkpointer, pending = save_that_fails_and_settles(place)
    error = pending.exception(timeout=20)
    assert isinstance(error, SaveFailed)
    assert "the disk is broken" in str(error)
    assert isinstance(error.__cause__, BackendError)
    assert "the disk is broken" in str(process.row().abort_reason)
    assert not hold.is_set()
    hold.set()
    assert_later_save(checkpointer)


def assert_later_save(checkpointer: Checkpointer) -> None:
    """The next one is committed; then the checkpointer is closed."""
    set_commit_timeout(checkpointer, 30.0)
    later = checkpointer.save(state_of(2), step=2)
    assert later is not None
    assert_state(later.result().load(), 2)
    checkpointer.close()


@pytest.mark.parametrize("where", ["r00000.part.json", ".json.zst"])
def test_a_create_that_hangs_is_aborted_too(place: Place, where: str) -> None:
    hold = threading.Event()
    process = place.open(Fault("create", hold=hold, when=named(where)))
    checkpointer = process.checkpointer(commit_timeout=HURRY)
    pending = checkpointer.save(state_of(1), step=1)
    assert pending is not None
    assert isinstance(pending.exception(timeout=20), SaveFailed)
    assert process.row().state is State.ABORTED
    hold.set()
    checkpointer.close()
    assert process.row().state is State.ABORTED
    assert process.row().commit_seq is None


def test_a_proof_that_hangs_resolves_as_committed_with_the_proof_pending(place: Place) -> None:
    hold = threading.Event()
    process = place.open(Fault("create", hold=hold, when=named("COMMIT.json")))
    checkpointer = process.checkpointer(commit_timeout=HURRY)
    pending = checkpointer.save(state_of(1), step=1)
    assert pending is not None
    assert pending.exception(timeout=20) is None
    assert checkpointer.last_committed is not None
    assert checkpointer.last_committed.proof_pending
    hold.set()
    eventually(lambda: process.row().proven_at is not None)
    checkpointer.close()


# -- room -------------------------------------------------------------------------------------------
def _check_out_of_space(error: SaveFailed, needed: int) -> None:
    cause = next(one for one in chain_of(error) if isinstance(one, OutOfSpace))
    assert cause.needed is not None
    assert cause.free is not None
    assert cause.needed >= needed > cause.free
    assert str(cause.needed) in str(error)
    assert str(cause.free) in str(error)


def test_a_full_place_fails_the_save_before_it_writes_and_keeps_the_generation_before(place: Place) -> None:
    process = place.open(quota=400_000)
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1)
        checkpointer.wait()
        written = process.backend.counts["write_at"]
        pending = checkpointer.save(state_of(2, numbers=50_000), step=2)
        assert pending is not None
        with pytest.raises(SaveFailed, match=r"needs \d+ bytes but only \d+ are free") as caught:
            pending.result()
        _check_out_of_space(caught.value, 400_000)
        assert process.backend.counts["write_at"] == written
        assert_state(process.repository.latest().load(), 1)
        checkpointer.save(state_of(3), step=3)
    row = process.rows()[1]
    assert process.objects(f"runs/{row.run_key}/{row.key}") == [f"runs/{row.run_key}/{row.key}/COMMIT.json"]
    assert_state(process.repository.latest().load(), 3)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 24 MB."""
    where = tmp_path / "small"
    where.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(where)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_disk_that_fills_up_while_the_save_writes_is_cleaned_and_used_again(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    big = {"w": np.arange(1_000_000.0)}  # 8 MB
    with ckptfmt.open(small_disk / "repository") as repository, repository.checkpointer() as checkpointer:
        checkpointer.save(big, step=1)
        checkpointer.wait()
        ballast.write_bytes(b"x" * (11 << 20))
        pending = checkpointer.save(big, step=2)
        assert pending is not None
        with pytest.raises(SaveFailed) as caught:
            pending.result()
        _check_out_of_space(caught.value, 8_000_000)
        assert not [key for key in small_disk.rglob("*.safetensors") if pending.key in str(key)]
        assert repository.latest().verify().ok
        ballast.unlink()
        checkpointer.save(big, step=3)
    with ckptfmt.open(small_disk / "repository", mode="r") as repository:
        assert repository.latest().step == 3
        assert repository.latest().verify().ok


def test_wrong_arguments_are_refused_at_the_call(place: Place) -> None:
    process = place.open()
    with process.checkpointer() as checkpointer:
        for step in (-1, True, 1.5, "1"):
            with pytest.raises(InvalidInput, match="step"):
                checkpointer.save(state_of(1), step=step)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="tags"):
            checkpointer.save(state_of(1), step=1, tags="best")
    assert not process.rows()
    with pytest.raises(InvalidInput, match="closed"):
        checkpointer.save(state_of(1), step=1)
