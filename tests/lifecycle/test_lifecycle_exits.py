"""The end of a process: what is in flight is finished or told, never dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import in_child
from lifecycle_rig import Place, Process, run_child, state_of

import ckptfmt
from ckptfmt.errors import BackendError, InvalidInput, SaveFailed
from ckptfmt.testing.faults import Fault

PRELUDE = """
import dataclasses, os, sys, threading, time
import numpy as np
import ckptfmt
from ckptfmt import connect
from ckptfmt.errors import BackendError
from ckptfmt.repository import Repository
from ckptfmt.testing.faults import Fault, FaultyBackend

def opened(*faults):
    connection = connect.open_site(sys.argv[1], mode="w", catalog=None, storage_options=None)
    site = dataclasses.replace(connection.site, backend=FaultyBackend(connection.site.backend, *faults))
    return Repository(dataclasses.replace(connection, site=site), "w")

SLOW = Fault("write_at", delay=0.3)
BROKEN = Fault("write_at", delay=0.3, error=lambda: BackendError("the disk is broken"))
state = {"w": np.arange(5000.0)}
"""

LEAVINGS = {
    "main returns": """
checkpointer = opened({fault}).checkpointer("run")
checkpointer.save(state, step=1)
""",
    "nobody holds the checkpointer": """
opened({fault}).checkpointer("run").save(state, step=1)
""",
    "with block": """
with opened({fault}).checkpointer("run") as checkpointer:
    checkpointer.save(state, step=1)
""",
    "from another thread": """
def main():
    checkpointer = opened({fault}).checkpointer("run")
    checkpointer.save(state, step=1)
threading.Thread(target=main, daemon=False).start()
""",
}
ENDINGS = {
    "sys.exit": LEAVINGS["main returns"] + "sys.exit({code})",
    "sys.exit in a with block": LEAVINGS["with block"] + "    sys.exit({code})",
}


def _run(root: Path, body: str, fault: str, code: int = 0) -> tuple[int, str]:
    body = body.replace("{fault}", fault).replace("{code}", str(code))
    status, _, err = run_child(PRELUDE + body + "\n", root)
    return status, err


def _steps(root: Path) -> list[int]:
    with ckptfmt.open(root, mode="r") as repository:
        for info in repository.generations(run="run"):
            assert repository.generation(info.id).verify().ok
            assert info.proven_at is not None
        assert repository.runs()[0].holder is None  # the lease was given back
        return [info.step for info in repository.generations(run="run")]


@pytest.mark.parametrize("leaving", LEAVINGS)
def test_a_save_in_flight_is_committed_when_main_returns(root: Path, leaving: str) -> None:
    status, err = _run(root, LEAVINGS[leaving], "SLOW")
    assert status == 0, err
    assert _steps(root) == [1]


@pytest.mark.parametrize("leaving", ["main returns", "nobody holds the checkpointer", "with block"])
def test_a_save_that_fails_at_exit_makes_the_status_a_failure(root: Path, leaving: str) -> None:
    status, err = _run(root, LEAVINGS[leaving], "BROKEN")
    assert status != 0
    assert "the disk is broken" in err
    assert _steps(root) == []


@pytest.mark.parametrize(("ending", "code"), [("sys.exit", 7), ("sys.exit in a with block", 0)])
def test_sys_exit_drains(root: Path, ending: str, code: int) -> None:
    status, err = _run(root, ENDINGS[ending], "SLOW", code)
    assert status == code, err
    assert _steps(root) == [1]


def test_sys_exit_with_success_and_a_failed_save_is_no_success(root: Path) -> None:
    status, err = _run(root, ENDINGS["sys.exit"], "BROKEN", 0)
    assert status != 0
    assert "the disk is broken" in err


def test_an_unhandled_exception_stays_the_reason_and_the_save_is_committed(root: Path) -> None:
    status, err = _run(root, LEAVINGS["main returns"] + "raise ValueError('training')", "SLOW")
    assert status == 1
    assert err.rstrip().endswith("ValueError: training")
    assert _steps(root) == [1]


def test_a_failed_save_beside_an_unhandled_exception_is_told_too(root: Path) -> None:
    status, err = _run(root, LEAVINGS["with block"] + "    raise ValueError('training')", "BROKEN")
    assert status == 1
    assert "ValueError: training" in err
    assert "in addition, a checkpoint save failed" in err
    assert "the disk is broken" in err


def _train_and_fail(process: Process, error: Exception) -> None:
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1)
        raise error


def test_the_exception_of_the_body_stays_primary_with_a_note(place: Place) -> None:
    process = place.open(Fault("write_at", error=lambda: BackendError("the disk is broken")))
    error = ValueError("training")
    with pytest.raises(ValueError, match="training") as caught:
        _train_and_fail(process, error)
    assert caught.value is error
    (note,) = error.__notes__
    assert "a checkpoint save failed" in note
    assert "the disk is broken" in note
    assert process.catalog.live_launch("run") is None


def test_the_exception_of_the_body_has_no_note_when_the_save_is_committed(place: Place) -> None:
    process = place.open()
    with pytest.raises(ValueError, match="training") as caught:
        _train_and_fail(process, ValueError("training"))
    assert not hasattr(caught.value, "__notes__")
    assert process.repository.latest().step == 1


def test_no_thread_of_a_save_is_a_daemon(place: Place) -> None:
    hold = threading.Event()
    fault = Fault("write_at", hold=hold)
    process = place.open(fault)
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1)
        assert fault.reached.wait(10)
        working = [
            thread for thread in threading.enumerate() if thread.name.startswith(("ckptfmt-save", "ckptfmt-write"))
        ]
        assert working
        assert not any(thread.daemon for thread in working)
        hold.set()


# -- forks --------------------------------------------------------------------------------------------
def _in_child(what: Callable[[], Any]) -> str:
    """What a forked child says of ``what``: the error's name, or what it returned."""

    def say() -> str:
        try:
            return f"returned {what()!r}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    said: str = in_child(say)
    return said


def test_a_forked_child_neither_saves_nor_waits_nor_closes(place: Place) -> None:
    hold = threading.Event()
    process = place.open(Fault("write_at", hold=hold))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        assert _in_child(lambda: checkpointer.save(state_of(2), step=2)).startswith("InvalidInput: ")
        assert "open the repository again" in _in_child(lambda: checkpointer.save(state_of(2), step=2))
        for ask in (pending.wait, pending.result, pending.exception, checkpointer.wait):
            assert _in_child(ask).startswith("InvalidInput: ")
        assert _in_child(pending.done) == "returned False"
        assert _in_child(checkpointer.close) == "returned None"
        assert process.catalog.live_launch("run") is not None
        hold.set()
        pending.result()
    assert [row.step for row in process.rows()] == [1]


# -- interrupts ---------------------------------------------------------------------------------------
INTERRUPTED = """
import _thread, signal
checkpointer = opened(Fault("write_at", delay=0.8)).checkpointer("run")
checkpointer.save(state, step=1)
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    checkpointer.{call}()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["wait", "close"])
def test_an_interrupt_while_waiting_is_raised_and_the_save_still_ends_well(root: Path, call: str) -> None:
    status, out, err = run_child(PRELUDE + INTERRUPTED.replace("{call}", call), root)
    assert (status, out) == (0, "interrupted\n"), err
    assert _steps(root) == [1]


def test_closing_has_a_time_limit_and_can_be_repeated(place: Place) -> None:
    hold = threading.Event()
    process = place.open(Fault("write_at", hold=hold))
    checkpointer = process.checkpointer()
    checkpointer.save(state_of(1), step=1)
    with pytest.raises(TimeoutError):
        checkpointer.close(timeout=0.1)
    with pytest.raises(TimeoutError):
        checkpointer.wait(timeout=0.1)
    assert checkpointer.in_flight
    hold.set()
    checkpointer.close()
    checkpointer.close()
    assert process.repository.latest().step == 1
    with pytest.raises(InvalidInput, match="closed"):
        checkpointer.restore({})


def test_a_repository_that_is_closed_first_waits_for_its_saves(place: Place) -> None:
    hold = threading.Event()
    process = place.open(Fault("write_at", hold=hold))
    checkpointer = process.checkpointer()
    pending = checkpointer.save(state_of(1), step=1)
    assert pending is not None
    threading.Timer(0.3, hold.set).start()
    process.repository.close()
    assert pending.stage == "committed"
    checkpointer.close()
    fresh = place.open()
    assert fresh.repository.latest().verify().ok


def test_a_repository_that_closes_over_a_failed_save_says_so(place: Place) -> None:
    process = place.open(Fault("write_at", error=lambda: BackendError("the disk is broken"), times=None))
    process.checkpointer().save(state_of(1), step=1)
    with pytest.raises(SaveFailed, match="the disk is broken"):
        process.repository.close()


def test_closing_a_repository_drains_its_checkpointers(tmp_path: Path) -> None:
    with ckptfmt.open(tmp_path / "r") as repository:
        checkpointer = repository.checkpointer("run")
        pending = checkpointer.save({"w": np.arange(1000)}, step=1)
    assert pending is not None
    assert pending.stage == "committed"
    with pytest.raises(InvalidInput, match="closed"):
        checkpointer.save({}, step=2)
