"""Two saves in flight: generations are committed in the order of their saves, and no failure is lost or told twice."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_chain import chain_of
from lifecycle_rig import (
    Place,
    assert_state,
    ended,
    eventually,
    run_child,
    set_commit_timeout,
    state_of,
)

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.engine.save import outcome
from ckptfmt.errors import BackendError, InvalidInput, OutcomeUnknown, SaveFailed
from ckptfmt.format import layout
from ckptfmt.format.states import State
from ckptfmt.pending import PendingSave
from ckptfmt.testing.catalog_faults import unreachable
from ckptfmt.testing.faults import Fault

HURRY = 1.5
"""A commit timeout in seconds that a test waits for, long enough to reach the fault on a busy machine."""


def broken() -> BackendError:
    return BackendError("the disk is broken")


def save(checkpointer: Checkpointer, step: int) -> PendingSave:
    pending = checkpointer.save(state_of(step), step=step)
    assert pending is not None
    return pending


def steps_in_order_of_commit(process: Any) -> list[int]:
    rows = [row for row in process.rows() if row.commit_seq is not None]
    return [row.step for row in sorted(rows, key=lambda row: row.commit_seq)]


# -- order --------------------------------------------------------------------------------------------
def test_the_second_save_writes_beside_the_first_and_is_committed_after_it(place: Place) -> None:
    hold = threading.Event()
    first_write = Fault("write_at", hold=hold)
    process = place.open(first_write)
    with process.checkpointer(in_flight_max=2) as checkpointer:
        first = save(checkpointer, 1)
        assert first_write.reached.wait(10)
        second = save(checkpointer, 2)
        second.wait("staged", timeout=20)
        assert checkpointer.in_flight == (first, second)
        assert checkpointer.last_committed is None
        time.sleep(0.1)
        assert [row.state for row in process.rows()] == [State.WRITING, State.WRITING]
        assert not second.done()
        hold.set()
        checkpointer.wait()
        assert checkpointer.in_flight == ()
        assert checkpointer.last_committed is not None
        assert checkpointer.last_committed.step == 2
    assert steps_in_order_of_commit(process) == [1, 2]
    rows = process.rows()
    assert [row.parent_key for row in rows] == [None, rows[0].key]
    for row in rows:
        assert_state(process.repository.generation(row.id).load(), row.step)


def test_the_order_is_that_of_the_saves_though_the_second_begins_first(place: Place) -> None:
    """The first save's C1 is held up: its row comes later and has the higher id."""
    hold = threading.Event()
    begin = Fault("begin_save", hold=hold)
    process = place.open(sql=[begin])
    with process.checkpointer(in_flight_max=2) as checkpointer:
        save(checkpointer, 1)
        assert begin.reached.wait(10)
        second = save(checkpointer, 2)
        second.wait("staged", timeout=20)
        assert [row.step for row in process.rows()] == [2]
        hold.set()
    assert [row.step for row in process.rows()] == [2, 1]
    assert steps_in_order_of_commit(process) == [1, 2]
    assert process.repository.latest().step == 2


def test_a_third_save_waits_for_the_oldest_and_memory_is_two_snapshots(place: Place) -> None:
    hold = threading.Event()
    first_write = Fault("write_at", hold=hold)
    process = place.open(first_write, Fault("write_at", delay=0.1, times=None))
    with process.checkpointer(in_flight_max=2) as checkpointer:
        saves = [save(checkpointer, 0)]
        assert first_write.reached.wait(10)  # that of the first save, not of the second one
        saves.append(save(checkpointer, 1))
        assert checkpointer.in_flight == tuple(saves)
        third = threading.Thread(target=lambda: saves.append(save(checkpointer, 2)))
        third.start()
        third.join(0.2)
        assert third.is_alive()
        assert checkpointer.in_flight == tuple(saves[:2])
        hold.set()
        third.join(20)
        assert saves[0].done()
        assert saves[1].busy_seconds < saves[2].busy_seconds
        saves += [save(checkpointer, step) for step in range(3, 6)]
        assert [pending.done() for pending in saves[:4]] == [True] * 4
        assert len(checkpointer.in_flight) <= 2
    assert steps_in_order_of_commit(process) == list(range(6))
    for row in process.rows():
        assert_state(process.repository.generation(row.id).load(), row.step)


def test_a_second_arena_is_made_only_when_two_saves_overlap(place: Place) -> None:
    made: list[Any] = []
    hold = threading.Event()
    process = place.open()
    with process.checkpointer(in_flight_max=2) as checkpointer:
        make = checkpointer._flights._make_arena

        def count() -> Any:
            made.append(make())
            return made[-1]

        checkpointer._flights._make_arena = count
        checkpointer.prepare(state_of(0))
        for step in range(3):
            save(checkpointer, step).result()
        assert len(made) == 1
        slow = process.backend.add(Fault("write_at", hold=hold))
        save(checkpointer, 3)
        assert slow.reached.wait(10)
        save(checkpointer, 4)
        hold.set()
        for step in range(5, 9):
            save(checkpointer, step)
        checkpointer.wait()
        checkpointer.restore(state_of(0))
        assert len(made) == 2


def test_skip_is_for_the_third_save(place: Place) -> None:
    hold = threading.Event()
    fault = Fault("write_at", hold=hold)
    process = place.open(fault)
    with process.checkpointer(in_flight_max=2, on_busy="skip") as checkpointer:
        save(checkpointer, 1)
        assert fault.reached.wait(10)
        save(checkpointer, 2)
        assert checkpointer.save(state_of(3), step=3) is None
        hold.set()
        checkpointer.wait()
        save(checkpointer, 4)
    assert steps_in_order_of_commit(process) == [1, 2, 4]
    assert [row.save_number for row in process.rows()] == [0, 1, 3]
    assert process.events().count("skip") == 1


# -- failures -----------------------------------------------------------------------------------------
def test_a_failed_first_save_does_not_take_the_second_with_it(place: Place) -> None:
    hold = threading.Event()
    fault = Fault("write_at", error=broken, hold=hold)
    process = place.open(fault)
    with process.checkpointer(in_flight_max=2) as checkpointer:
        first = save(checkpointer, 1)
        assert fault.reached.wait(10)
        second = save(checkpointer, 2)
        hold.set()
        assert_state(second.result(timeout=20).load(), 2)
        with pytest.raises(SaveFailed, match=r"step 1: .*the disk is broken"):
            save(checkpointer, 3)
        assert isinstance(first.exception(), SaveFailed)
        save(checkpointer, 4)
    assert steps_in_order_of_commit(process) == [2, 4]
    rows = process.rows()
    assert ended(rows[0])
    assert [row.parent_key for row in rows[1:]] == [None, rows[1].key]


def _leave(checkpointer: Checkpointer) -> None:
    with checkpointer:
        pass


@pytest.mark.parametrize("way", [Checkpointer.wait, Checkpointer.close, _leave, lambda c: save(c, 3)])
def test_two_failures_surface_together_the_first_first(place: Place, way: Callable[[Checkpointer], Any]) -> None:
    hold = threading.Event()
    process = place.open(Fault("write_at", error=broken, times=2, hold=hold))
    checkpointer = process.checkpointer(in_flight_max=2)
    handles = [save(checkpointer, 1), save(checkpointer, 2)]
    hold.set()  # not before: the second save would tell of the first one's failure
    eventually(lambda: all(pending.done() for pending in handles))
    with pytest.raises(SaveFailed, match="step 1: ") as caught:
        way(checkpointer)
    assert [note for note in caught.value.__notes__ if "step 2: " in note and "the disk is broken" in note]
    assert len(caught.value.__notes__) == 1
    checkpointer.close()  # nothing is told twice
    assert process.repository.generations() == []


def test_a_second_save_that_failed_is_told_while_the_first_still_writes(place: Place) -> None:
    hold = threading.Event()
    process = place.open(Fault("write_at", nth=1, hold=hold), Fault("write_at", nth=2, error=broken))
    with process.checkpointer(in_flight_max=2) as checkpointer:
        first = save(checkpointer, 1)
        eventually(lambda: process.backend.counts["write_at"] == 1)
        second = save(checkpointer, 2)
        assert isinstance(second.exception(timeout=20), SaveFailed)
        assert checkpointer.in_flight == (first,)
        third = save(checkpointer, 3)  # somebody has looked at it
        assert checkpointer.in_flight == (first, third)
        hold.set()
    assert steps_in_order_of_commit(process) == [1, 3]


def test_a_timeout_loses_nothing(place: Place) -> None:
    hold = threading.Event()
    process = place.open(Fault("write_at", nth=1, error=broken), Fault("write_at", nth=2, hold=hold))
    checkpointer = process.checkpointer(in_flight_max=2)
    first = save(checkpointer, 1)
    eventually(first.done)
    second = save_behind_a_failure(checkpointer)
    with pytest.raises(TimeoutError):
        checkpointer.wait(timeout=0.1)
    with pytest.raises(TimeoutError):
        checkpointer.close(timeout=0.1)
    hold.set()
    checkpointer.close()
    assert second.result().step == 2


def save_behind_a_failure(checkpointer: Checkpointer) -> PendingSave:
    with pytest.raises(SaveFailed, match="step 1: "):
        save(checkpointer, 2)
    return save(checkpointer, 2)


# -- deadlines ----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_first_save_that_hangs_is_aborted_and_the_second_committed(place: Place) -> None:
    hold = threading.Event()
    fault = Fault("write_at", hold=hold)
    process = place.open(fault)
    checkpointer = process.checkpointer(in_flight_max=2, commit_timeout=HURRY)
    first = save(checkpointer, 1)
    assert fault.reached.wait(10)
    second = save(checkpointer, 2)
    began = time.monotonic()
    assert_state(second.result(timeout=20).load(), 2)
    assert time.monotonic() - began < 8
    with pytest.raises(SaveFailed, match=r"step 1: .*not committed within 1\.5 s"):
        checkpointer.wait()
    assert first.done()
    assert not hold.is_set()
    set_commit_timeout(checkpointer, 30.0)
    for step in (3, 4, 5):  # the hung writer keeps its arena, and nobody else's
        save(checkpointer, step)
    checkpointer.wait()
    hold.set()
    eventually(lambda: process.backend.counts["abort"] == 1)
    checkpointer.close()
    assert steps_in_order_of_commit(process) == [2, 3, 4, 5]
    assert ended(process.rows()[0])
    for row in process.rows()[1:]:
        assert_state(process.repository.generation(row.id).load(), row.step)


@pytest.mark.slow
def test_two_saves_that_hang_are_both_aborted(place: Place) -> None:
    hold = threading.Event()
    process = place.open(Fault("write_at", hold=hold, times=2))
    checkpointer = process.checkpointer(in_flight_max=2, commit_timeout=HURRY)
    handles = [save(checkpointer, 1), save(checkpointer, 2)]
    eventually(lambda: process.backend.counts["write_at"] == 2)
    errors = [pending.exception(timeout=20) for pending in handles]
    assert all(isinstance(error, SaveFailed) for error in errors)
    assert [row.state for row in process.rows()] == [State.ABORTED, State.ABORTED]
    hold.set()
    checkpointer.close()
    assert all(ended(row) for row in process.rows())


@pytest.mark.slow
def test_an_unknown_first_outcome_is_settled_by_the_second(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "SETTLE_SECONDS", 0.3)
    hold = threading.Event()
    process = place.open()
    with process.checkpointer(in_flight_max=2, commit_timeout=HURRY) as checkpointer:
        outage = Fault(error=unreachable, times=None)

        def begin_outage() -> BaseException:
            process.catalog.add(outage)
            return unreachable()

        commit = Fault("commit", error=begin_outage, hold=hold)
        process.catalog.add(commit)
        first = save(checkpointer, 1)
        assert commit.reached.wait(10)
        set_commit_timeout(checkpointer, 30.0)
        second = save(checkpointer, 2)
        second.wait("staged", timeout=20)
        hold.set()
        assert isinstance(first.exception(timeout=20), OutcomeUnknown)
        process.catalog.heal()
        assert_state(second.result(timeout=20).load(), 2)
    rows = process.rows()
    assert [row.state for row in rows] == [State.COMMITTED, State.COMMITTED]
    assert rows[1].parent_key == rows[0].key
    assert all(row.proven_at is not None for row in rows)


# -- crashes and ends ---------------------------------------------------------------------------------
@pytest.mark.parametrize("begun_first", [1, 2])
def test_a_crash_with_two_in_flight_aborts_the_torn_one_and_finishes_the_whole_one(
    place: Place, begun_first: int
) -> None:
    """Also where the second save's row came first: its C3 is refused while the first save's row is open."""
    hold = threading.Event()
    begin = Fault("begin_save", nth=1, hold=hold)
    keys: list[str] = []
    write = Fault("write_at", hold=threading.Event(), when=lambda call: keys[0] in call.key)
    process = place.open(write, sql=[begin] if begun_first == 2 else [])
    checkpointer = process.checkpointer(in_flight_max=2)
    launch = process.catalog.live_launch("run")
    assert launch is not None
    keys.append(layout.generation_key(launch.token, layout.run_key("run"), 0))  # the first write may come at once
    assert save(checkpointer, 1).key == keys[0]
    assert begin.reached.wait(10) if begun_first == 2 else write.reached.wait(10)
    second = save(checkpointer, 2)
    second.wait("staged", timeout=20)
    hold.set()
    assert write.reached.wait(10)
    eventually(lambda: len(process.rows()) == 2)
    process.die()
    process.release()

    fresh = place.open()
    assert [row.step for row in fresh.rows()] == [begun_first, 3 - begun_first]
    fresh.catalog.close_launch(fresh.catalog.live_launch("run").id)
    foretold = [(one.step, one.action) for one in fresh.repository.recover(dry_run=True).actions]
    with fresh.checkpointer() as successor:
        assert foretold == [(1, "aborted"), (2, "committed")]
        into = state_of(0)
        report = successor.restore(into)
        assert report is not None
        assert report.step == 2
        assert_state(into, 2)
        save(successor, 3)
    assert steps_in_order_of_commit(fresh) == [2, 3]
    assert not fresh.repository.recover().actions


def test_restore_waits_for_both(place: Place) -> None:
    process = place.open(Fault("write_at", delay=0.3, times=2))
    with process.checkpointer(in_flight_max=2) as checkpointer:
        handles = [save(checkpointer, 1), save(checkpointer, 2)]
        into = state_of(0)
        report = checkpointer.restore(into)
        assert all(pending.done() for pending in handles)
        assert report is not None
        assert report.step == 2
        assert_state(into, 2)


EXIT = """
import dataclasses, sys
import numpy as np
from ckptfmt import connect
from ckptfmt.repository import Repository
from ckptfmt.testing.faults import Fault, FaultyBackend
connection = connect.open_site(sys.argv[1], mode="w", catalog=None, storage_options=None)
faults = [Fault("write_at", delay=0.4, times=None)]
site = dataclasses.replace(connection.site, backend=FaultyBackend(connection.site.backend, *faults))
checkpointer = Repository(dataclasses.replace(connection, site=site), "w").checkpointer("run", in_flight_max=2)
for step in (1, 2):
    checkpointer.save({"w": np.full(3000, float(step))}, step=step)
assert len(checkpointer.in_flight) == 2
if sys.argv[2] == "kill":
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_exit_of_the_interpreter_drains_both(root: Path) -> None:
    status, out, err = run_child(EXIT, root, "exit")
    assert (status, out) == (0, ""), err
    with ckptfmt.open(root, mode="r") as repository:
        assert [info.step for info in repository.generations()] == [2, 1]
        assert (repository.latest().load()["w"] == 2).all()


def test_a_kill_with_two_in_flight_is_followed_by_the_next_launch(root: Path) -> None:
    status, _, err = run_child(EXIT, root, "kill")
    assert status == -signal.SIGKILL, err
    with ckptfmt.open(root) as repository, repository.checkpointer("run", in_flight_max=2) as checkpointer:
        assert checkpointer.restore({"w": np.zeros(3000)}) is None
        checkpointer.save({"w": np.full(3000, 3.0)}, step=3)
    with ckptfmt.open(root, mode="r") as repository:
        assert [info.step for info in repository.generations()] == [3]


@pytest.mark.parametrize("count", [0, 3, -1, True, 1.5, "2"])
def test_another_number_is_refused_before_the_lease_is_taken(place: Place, count: Any) -> None:
    process = place.open()
    with pytest.raises(InvalidInput, match="in_flight_max"):
        process.repository.checkpointer("run", in_flight_max=count)
    assert not process.catalog.runs()


def test_the_cause_of_a_failure_is_chained(place: Place) -> None:
    process = place.open(Fault("write_at", nth=2, error=broken))
    with process.checkpointer(in_flight_max=2) as checkpointer:
        save(checkpointer, 1)
        eventually(lambda: process.backend.counts["write_at"] == 1)
        second = save(checkpointer, 2)
        assert any(isinstance(error, BackendError) for error in chain_of(second.exception(timeout=20)))


@pytest.mark.parametrize("freeze", ["now", "deferred"])
def test_a_save_for_which_there_is_no_thread_leaves_nothing_in_flight(
    place: Place, monkeypatch: pytest.MonkeyPatch, freeze: Any
) -> None:
    start = threading.Thread.start
    refused: list[str] = []

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name.startswith("ckptfmt-save-") and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    process = place.open()
    with process.checkpointer(in_flight_max=2, freeze=freeze) as checkpointer:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            save(checkpointer, 1)
        assert checkpointer.in_flight == ()
        save(checkpointer, 2)
    assert steps_in_order_of_commit(process) == [2]
