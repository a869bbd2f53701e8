"""Who may save to a run: leases, fences, and what a new launch does to an older one."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from error_chain import chain_of
from lifecycle_rig import (
    Place,
    Process,
    assert_state,
    ended,
    eventually,
    named,
    run_child,
    start_child,
    state_of,
    wait_for_line,
)

import ckptfmt
from ckptfmt.engine.process import boot_id, host_name, is_gone, pid_started
from ckptfmt.engine.save import launch as launches
from ckptfmt.errors import Conflict, Fenced, InvalidInput, SaveFailed
from ckptfmt.format import layout
from ckptfmt.format.states import State
from ckptfmt.testing.faults import Fault

# -- fencing ----------------------------------------------------------------------------------------
STORAGE_POINTS = [
    ("make_folder", ""),
    ("open_writer", ".safetensors"),
    ("write_at", ".safetensors"),
    ("finish", ".safetensors"),
    ("create", "r00000.part.json"),
    ("create", ".json.zst"),
    ("create", "COMMIT.json"),
]
SQL_POINTS = ["begin_save", "report_rank", "mark_durable", "commit", "set_proven"]


def _overtaken(place: Place, first: Process, hold: threading.Event, reached: threading.Event) -> None:
    """A stops in the middle of step 2; B takes over, restores and saves step 10; then A goes on."""
    a = first.checkpointer()
    a.save(state_of(1), step=1)
    a.wait()
    armed = a.save(state_of(2), step=2)
    assert armed is not None
    assert reached.wait(20)

    second = place.open()
    b = second.checkpointer(takeover=True)
    settled = {row.step: row for row in second.rows()}.get(2)
    restored = dict.fromkeys(state_of(0))
    report = b.restore(restored, strict=False)
    assert report is not None
    finished = settled is not None and settled.commit_seq is not None
    assert report.step == (2 if finished else 1)
    assert_state(second.repository.generation(report.generation_id).load(), report.step)
    pending = b.save(state_of(10), step=10)
    assert pending is not None
    kept = pending.result()
    assert kept.parent_key == second.repository.generation(report.generation_id).key
    before = [(row.id, row.commit_seq) for row in second.rows() if row.commit_seq is not None]

    hold.set()
    error = armed.exception(timeout=30)
    after = [(row.id, row.commit_seq) for row in second.rows() if row.commit_seq is not None]
    assert after == before  # A committed nothing
    if finished:
        assert error is None  # it is committed, by B or before it
    else:
        assert isinstance(error, SaveFailed)
        assert any(isinstance(one, Fenced) for one in chain_of(error)), chain_of(error)
    if error is not None or settled is None or settled.commit_fence != a._context.launch.fence:
        with pytest.raises(Fenced):
            a.save(state_of(3), step=3)
        assert not a.in_flight
    a.close()
    assert second.repository.latest().id == kept.id
    assert_state(second.repository.latest().load(), 10)
    b.save(state_of(11), step=11)
    b.close()
    second.repository.gc(dry_run=False)
    for row in second.rows():
        assert row.state is State.COMMITTED or ended(row)
        if row.state is State.COMMITTED:
            assert second.repository.generation(row.id).verify().ok


@pytest.mark.parametrize(("op", "name"), STORAGE_POINTS)
def test_a_launch_overtaken_while_storage_is_slow_commits_nothing(place: Place, op: str, name: str) -> None:
    hold = threading.Event()
    first = place.open()
    seen = {"n": 0}

    def second_time(call: Any) -> bool:
        """Of the second save: the first one does the same calls."""
        if not call.key.endswith(name) or call.key.endswith("commits"):
            return False
        seen["n"] += 1
        return seen["n"] == 2

    fault = first.backend.add(Fault(op, hold=hold, when=second_time))
    _overtaken(place, first, hold, fault.reached)


@pytest.mark.parametrize("op", SQL_POINTS)
def test_a_launch_overtaken_before_its_transaction_commits_nothing(place: Place, op: str) -> None:
    hold = threading.Event()
    fault = Fault(op, hold=hold, nth=2)
    _overtaken(place, place.open(sql=[fault]), hold, fault.reached)


def test_the_heartbeat_finds_out_that_the_run_was_taken(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "LEASE_SECONDS", 0.6)
    first = place.open()
    a = first.checkpointer(commit_timeout=0.4)  # the beat follows it
    a._lease._renew_after = 0.0
    with place.open().checkpointer(takeover=True):
        a._lease._renew()
        with pytest.raises(Fenced, match="must stop saving"):
            a.save(state_of(1), step=1)
    assert not first.rows()
    a.close()


# -- leases -----------------------------------------------------------------------------------------
HOLDER = """
import sys, time
import numpy as np
import ckptfmt
repository = ckptfmt.open(sys.argv[1])
checkpointer = repository.checkpointer("run")
checkpointer.save({"w": np.arange(5000.0)}, step=1)
checkpointer.wait()
print("holding", flush=True)
while True:
    time.sleep(0.3)
    checkpointer._lease._renew()  # what its heartbeat does every 5 s
"""


@pytest.mark.slow
def test_a_live_holder_in_another_process_is_named(root: Path) -> None:
    with start_child(HOLDER, root) as child:
        try:
            wait_for_line(child, "holding")
            with ckptfmt.open(root) as repository:
                began = time.monotonic()
                with pytest.raises(Conflict, match=rf"held by {host_name()}:{child.pid} .*takeover=True"):
                    repository.checkpointer("run")
                assert time.monotonic() - began < 15  # a beat of the holder, not a lapse of its lease
                assert repository.runs()[0].holder == f"{host_name()}:{child.pid}"
                report = repository.recover()
                assert not report.actions
        finally:
            child.kill()


def test_a_killed_holder_counts_as_gone_at_once(root: Path) -> None:
    with start_child(HOLDER, root) as child:
        wait_for_line(child, "holding")
        child.send_signal(signal.SIGKILL)
        child.wait()
    began = time.monotonic()
    with ckptfmt.open(root) as repository, repository.checkpointer("run") as checkpointer:
        assert time.monotonic() - began < 10  # the lease has 30 s
        report = checkpointer.restore({"w": None}, strict=False)
        assert report is not None
        assert report.step == 1


def test_a_clean_close_gives_the_lease_back(place: Place) -> None:
    process = place.open()
    with process.checkpointer():
        assert process.catalog.live_launch("run") is not None
    assert process.catalog.live_launch("run") is None
    with place.open().checkpointer():
        pass
    assert [launch.closed_at is not None for launch in process.catalog.launches("run")] == [True, True]


def test_the_same_process_cannot_open_a_run_twice_and_hears_so_at_once(place: Place) -> None:
    process = place.open()
    with process.checkpointer():
        began = time.monotonic()
        with pytest.raises(Conflict, match=f"pid {os.getpid()}"):
            process.repository.checkpointer("run")
        with pytest.raises(Conflict):
            place.open().repository.checkpointer("run")
        assert time.monotonic() - began < 3
        with process.checkpointer("another"):
            pass


@pytest.mark.slow
def test_a_holder_that_stops_renewing_is_waited_for_and_no_longer(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A dead holder on another host: only the database's clock can tell."""
    process = place.open()
    monkeypatch.setattr(launches.process, "host_name", lambda: "elsewhere")
    launches.acquire(process.catalog, _run(process), token="dead", takeover=False, lease_seconds=1.0)
    monkeypatch.undo()
    began = time.monotonic()
    with process.checkpointer() as checkpointer:
        assert 0.5 < time.monotonic() - began < 10
        checkpointer.save(state_of(1), step=1)
    assert "held by elsewhere" in caplog.text


def _run(process: Process) -> str:
    process.catalog.ensure_run("run", layout.run_key("run"))
    return "run"


def test_the_clock_of_the_asking_process_does_not_matter(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """FR-121: two hours ahead, it still may not take a healthy lease."""
    process = place.open()
    with process.checkpointer():
        monkeypatch.setattr(time, "time", lambda: 4e9)
        monkeypatch.setattr(launches.process, "host_name", lambda: "elsewhere")
        with pytest.raises(Conflict, match="held by"):
            launches.acquire(place.open().catalog, "run", token="ahead", takeover=False, wait=False)


def test_a_launch_token_is_used_once(place: Place) -> None:
    process = place.open()
    with process.checkpointer(launch="job-1"):
        pass
    with pytest.raises(Conflict, match="start a new launch"):
        process.repository.checkpointer("run", launch="job-1")
    with process.checkpointer(launch="job-2"), pytest.raises(Conflict):
        place.open().repository.checkpointer("run", launch="job-2")
    with pytest.raises(InvalidInput, match="launch token"):
        process.repository.checkpointer("run", launch="has spaces")
    with process.checkpointer(launch="job-3") as checkpointer:
        checkpointer.save(state_of(1), step=1)


def test_several_ranks_in_the_environment_need_a_token(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    process = place.open()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InvalidInput, match="WORLD_SIZE=4"):
        process.repository.checkpointer("run")
    assert process.catalog.live_launch("run") is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1)


def test_keys_differ_between_launches_with_the_same_save_number(place: Place) -> None:
    process = place.open()
    for _ in range(2):
        with process.checkpointer() as checkpointer:
            checkpointer.save(state_of(5), step=5)
    first, second = process.rows()
    assert (first.save_number, first.step) == (second.save_number, second.step) == (0, 5)
    assert first.key != second.key
    assert second.parent_key is None  # it restored nothing


def test_a_process_counts_as_gone_only_for_certain(place: Place) -> None:
    process = place.open()
    with process.checkpointer():
        held = process.catalog.live_launch("run")
    assert not is_gone(held)
    assert is_gone(dataclasses.replace(held, pid=2**22 + 1))
    assert is_gone(dataclasses.replace(held, pid_started="1"))  # the pid was given to another process
    assert is_gone(dataclasses.replace(held, boot_id="before the reboot"))
    assert not is_gone(dataclasses.replace(held, host="elsewhere", pid=2**22 + 1))
    assert not is_gone(dataclasses.replace(held, boot_id="", pid=2**22 + 1))
    assert held.boot_id == boot_id()
    assert held.pid_started == pid_started(os.getpid())


# -- two jobs in one place ----------------------------------------------------------------------------
RACER = """
import sys
import numpy as np
import ckptfmt
from ckptfmt.errors import Conflict
sys.stdin.readline()
saved = refused = 0
for number in range(int(sys.argv[2])):
    try:
        with ckptfmt.open(sys.argv[1]) as repository:
            with repository.checkpointer("run", takeover=number % 2 == 1) as checkpointer:
                checkpointer.save({"w": np.full(2000, float(sys.argv[3]))}, step=5)
        saved += 1
    except ckptfmt.CkptError as error:
        refused += 1
print(saved, refused)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_two_processes_that_save_the_same_step_never_mix(root: Path, rounds: int) -> None:
    """FR-042: each save is committed under its own id, or refused; every committed one is one job's bytes."""
    children = [start_child(RACER, root, rounds, mark, stdin=-1) for mark in (1, 2)]
    outcomes = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        out, err = child.communicate(timeout=170)
        assert child.returncode == 0, err
        outcomes.append(tuple(map(int, out.split())))
    assert all(saved + refused == rounds for saved, refused in outcomes)
    with ckptfmt.open(root) as repository:
        repository.recover()
        committed = repository.generations(run="run")
        assert len(committed) >= sum(saved for saved, _ in outcomes) > 0
        assert len({info.key for info in committed}) == len(committed)
        seqs = [info.commit_seq for info in committed]
        assert seqs == sorted(seqs, reverse=True)
        for info in committed:
            loaded = repository.generation(info.id).load()["w"]
            assert set(loaded.tolist()) <= {1.0} or set(loaded.tolist()) <= {2.0}


MANY = """
import sys
import numpy as np
import ckptfmt
name = sys.argv[2]
with ckptfmt.open(sys.argv[1]) as repository, repository.checkpointer(name) as checkpointer:
    for step in range(3):
        checkpointer.save({"w": np.full(3000, float(step))}, step=step)
print("saved")
"""


EIGHT = """
import sys
import numpy as np
import ckptfmt
import ckptfmt.catalog.open, ckptfmt.engine.save.session  # once for all eight
from forked import at_once

def work(number):
    with ckptfmt.open(sys.argv[1]) as repository, repository.checkpointer(f"run-{number}") as checkpointer:
        for step in range(5):
            checkpointer.save({"w": np.full(3000, float(step))}, step=step)

at_once(work, 8)
"""


@pytest.mark.slow
def test_eight_processes_save_to_runs_of_one_repository_at_once(root: Path) -> None:
    status, _, err = run_child(EIGHT, root, timeout=170)
    assert status == 0, err
    assert "locked" not in err
    with ckptfmt.open(root, mode="r") as repository:
        assert [(run.name, run.committed, run.in_flight) for run in repository.runs()] == [
            (f"run-{number}", 5, 0) for number in range(8)
        ]


def test_a_launch_that_fails_to_begin_gives_the_lease_back(place: Place) -> None:
    process = place.open()
    with pytest.raises(InvalidInput, match="signal"):
        process.repository.checkpointer("run", preempt_signals=[signal.SIGKILL])
    assert process.catalog.live_launch("run") is None
    eventually(lambda: not [one for one in threading.enumerate() if one.name == "ckptfmt-lease"])


def test_a_child_that_dies_between_two_saves_is_followed_by_the_next(root: Path) -> None:
    status, _, err = run_child(MANY.replace('print("saved")', "import os; os._exit(3)"), root, "run")
    assert status == 3, err
    with ckptfmt.open(root) as repository, repository.checkpointer("run") as checkpointer:
        report = checkpointer.restore({"w": None}, strict=False)
        assert report is not None
        assert report.step == 2


def test_an_overtaken_launch_leaves_what_it_had_committed_unproven_to_its_heir(place: Place) -> None:
    """A dies between C4 and C5: B proves it before it restores."""
    first = place.open()
    first.backend.add(Fault("create", error=first.kill, when=named("COMMIT.json")))
    a = first.checkpointer()
    pending = a.save(state_of(1), step=1)
    assert pending is not None
    pending.exception()
    second = place.open()
    assert second.row().proven_at is None
    with second.checkpointer(takeover=True) as b:
        assert second.row().proven_at is not None
        report = b.restore(dict.fromkeys(state_of(0)), strict=False)
        assert report is not None
        assert report.step == 1
