"""When to save: steps, seconds, signals, and what to do while a save is in flight."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from lifecycle_rig import Place, assert_state, run_child, start_child, state_of, wait_for_line

import ckptfmt
from ckptfmt.errors import InvalidInput
from ckptfmt.format.states import State
from ckptfmt.policy import PreemptionFlag, SavePolicy
from ckptfmt.testing.faults import Fault


# -- on_busy ------------------------------------------------------------------------------------------
def test_skip_returns_none_and_is_recorded_and_counted(place: Place) -> None:
    hold = threading.Event()
    fault = Fault("write_at", hold=hold)
    process = place.open(fault)
    with process.checkpointer(on_busy="skip") as checkpointer:
        first = checkpointer.save(state_of(1), step=1)
        assert fault.reached.wait(10)
        assert checkpointer.save(state_of(2), step=2) is None
        assert checkpointer.save(state_of(3), step=3) is None
        hold.set()
        assert first is not None
        first.wait()
        last = checkpointer.save(state_of(4), step=4)
        assert last is not None
    assert [(row.step, row.save_number) for row in process.rows()] == [(1, 0), (4, 3)]
    assert process.events().count("skip") == 2
    skipped = [event.detail for event in process.catalog.events(run="run") if event.kind == "skip"]
    assert [(one["n"], one["step"]) for one in skipped] == [(1, 2), (2, 3)]


def test_wait_saves_every_step_in_order_and_reports_busy_apart_from_stall(place: Place) -> None:
    process = place.open(Fault("write_at", delay=0.4, times=None))
    with process.checkpointer() as checkpointer:
        first = checkpointer.save(state_of(1), step=1)
        second = checkpointer.save(state_of(2), step=2)
        assert first is not None
        assert second is not None
        assert first.done()
    assert first.busy_seconds < 0.2
    assert second.busy_seconds > 0.3
    assert second.stall_seconds < 0.3
    stalls = [row.stall_seconds for row in process.rows()]
    assert stalls == [pytest.approx(first.stall_seconds), pytest.approx(second.stall_seconds)]
    assert [row.parent_key for row in process.rows()] == [None, process.rows()[0].key]


def test_no_call_to_catalog_or_storage_happens_in_the_stall(place: Place) -> None:
    """C1 is in the background: a catalog that hangs does not block training."""
    process = place.open()
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(0), step=0)
        checkpointer.wait()
        caller = threading.current_thread()
        guilty: list[str] = []
        inner, arrive = process.catalog._call, process.backend._arrive

        def watch_sql(name: str, *rest: Any) -> Any:
            if threading.current_thread() is caller:
                guilty.append(name)
            return inner(name, *rest)

        def watch_storage(op: str, *rest: Any) -> Any:
            if threading.current_thread() is caller:
                guilty.append(op)
            return arrive(op, *rest)

        process.catalog._call = watch_sql  # type: ignore[method-assign]
        process.backend._arrive = watch_storage  # type: ignore[method-assign]
        pending = checkpointer.save(state_of(1), step=1)
        assert guilty == []
        assert pending is not None
        pending.wait()


# -- should_save --------------------------------------------------------------------------------------
def _policy(**options: Any) -> SavePolicy:
    return SavePolicy(**{"every_steps": None, "every_seconds": None, "on_busy": "wait", **options})


def test_every_steps_is_a_pure_function_of_the_step() -> None:
    policy = _policy(every_steps=5)
    wanted = [step for step in range(16) if policy.should_save(step, preempted=False)]
    assert wanted == [5, 10, 15]
    for step in wanted:
        policy.saved(preempted=False)
        assert policy.should_save(step, preempted=False)
    assert [step for step in range(3) if _policy(every_steps=1).should_save(step, preempted=False)] == [0, 1, 2]
    assert not any(_policy().should_save(step, preempted=False) for step in range(10))


def test_every_seconds_counts_from_the_last_save(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    policy = _policy(every_seconds=60)
    assert not policy.should_save(1, preempted=False)
    now[0] = 161.0
    assert policy.should_save(2, preempted=False)
    assert policy.should_save(2, preempted=False)
    policy.saved(preempted=False)
    assert not policy.should_save(3, preempted=False)


def test_a_preemption_asks_for_one_save() -> None:
    policy = _policy(every_steps=100)
    assert not policy.should_save(3, preempted=False)
    assert policy.should_save(4, preempted=True)
    policy.saved(preempted=True)
    assert not policy.should_save(5, preempted=True)
    assert policy.should_save(100, preempted=True)


@pytest.mark.parametrize(
    "options",
    [{"every_steps": 0}, {"every_steps": 1.5}, {"every_seconds": 0}, {"every_seconds": -1}, {"on_busy": "maybe"}],
)
def test_rules_that_cannot_be_right_are_refused(place: Place, options: dict[str, Any]) -> None:
    process = place.open()
    with pytest.raises(InvalidInput, match=next(iter(options))):
        process.repository.checkpointer("run", **options)
    with pytest.raises(InvalidInput, match="commit_timeout"):
        process.repository.checkpointer("run", commit_timeout=0)
    assert not process.catalog.runs() or process.catalog.live_launch("run") is None


# -- signals ------------------------------------------------------------------------------------------
def test_a_signal_only_sets_a_flag(place: Place) -> None:
    process = place.open()
    with process.checkpointer(preempt_signals=[signal.SIGUSR1]) as checkpointer:
        assert not checkpointer.preempted
        assert not checkpointer.should_save(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert checkpointer.preempted
        assert not process.rows()
        assert checkpointer.should_save(2)
        checkpointer.save(state_of(2), step=2)
        assert not checkpointer.should_save(3)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not checkpointer.should_save(4)
    assert [row.step for row in process.rows()] == [2]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_earlier_handlers_are_chained_and_put_back(place: Place) -> None:
    heard: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        process = place.open()
        with process.checkpointer(preempt_signals=[signal.SIGUSR1]) as checkpointer:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert checkpointer.preempted
            assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_flags_on_one_signal_leave_in_any_order(first_out: int) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    try:
        flags = [PreemptionFlag([signal.SIGUSR1]), PreemptionFlag([signal.SIGUSR1])]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [flag.raised for flag in flags] == [True, True]
        assert len(heard) == 1
        flags[first_out].close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(heard) == 2
        flags[1 - first_out].close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(heard) == 3
        if signal.getsignal(signal.SIGUSR1) is not mine:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert len(heard) == 4
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


CLOSED_FLAGS = """
import os, signal, time
from ckptfmt.policy import PreemptionFlag
first, second = PreemptionFlag([signal.SIGTERM]), PreemptionFlag([signal.SIGTERM])
first.close()
second.close()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(5)
print("survived")
"""


def test_a_process_can_be_terminated_again_once_every_flag_is_closed() -> None:
    status, out, _ = run_child(CLOSED_FLAGS)
    assert (status, out) == (-signal.SIGTERM, "")


def test_a_flag_is_set_up_in_the_main_thread_only(place: Place) -> None:
    process = place.open()
    errors: list[BaseException] = []

    def open_there() -> None:
        try:
            process.repository.checkpointer("run", preempt_signals=[signal.SIGUSR1])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=open_there)
    thread.start()
    thread.join()
    assert isinstance(errors[0], InvalidInput)
    assert process.catalog.live_launch("run") is None


TRAINING = """
import os, signal, sys, time
import numpy as np
import ckptfmt
state = {"w": np.zeros(20000), "step": -1}
with ckptfmt.open(sys.argv[1]) as repository, repository.checkpointer(
    "run", every_steps=100, preempt_signals=[signal.SIGTERM]
) as checkpointer:
    report = checkpointer.restore(state)
    start = report.step + 1 if report else 0
    assert state["step"] == start - 1 and (state["w"] == max(0, start)).all()
    if len(sys.argv) > 2 and os.fork() == 0:
        time.sleep(30)  # a worker that inherited the handlers
        os._exit(9)
    print("from", start, flush=True)
    for step in range(start, start + 50):
        state["w"] += 1
        state["step"] = step
        time.sleep(0.02)
        if checkpointer.should_save(step):
            checkpointer.save(state, step=step)
            print("saved", step, flush=True)
        if checkpointer.preempted:
            break
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_terminated_group_saves_once_and_a_kill_soon_after_harms_nothing(root: Path) -> None:
    """FR-023: a forked worker inherits the handler but not the duty."""
    run_child(TRAINING.replace("every_steps=100", "every_steps=10"), root)
    with ckptfmt.open(root, mode="r") as repository:
        before = repository.latest().step
        count = len(repository.generations())
    with start_child(TRAINING, root, "fork", start_new_session=True) as child:
        wait_for_line(child, f"from {before + 1}")
        time.sleep(0.2)
        os.killpg(child.pid, signal.SIGTERM)
        time.sleep(0.1)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    with ckptfmt.open(root) as repository:
        repository.recover()
        rows = repository.generations(run="run", state=None)
        assert len(rows) <= count + 1
        latest = repository.latest()
        assert latest.step >= before
        loaded = latest.load()
        assert loaded["step"] == latest.step
        assert (loaded["w"] == latest.step + 1).all()


@pytest.mark.slow
def test_each_of_five_preemptions_is_resumed_at_the_newest(root: Path) -> None:
    """FR-024: preemption saves are ordinary generations, one for each preemption."""
    steps: list[int] = []
    for _ in range(5):
        with start_child(TRAINING, root) as child:
            wait_for_line(child, f"from {steps[-1] + 1 if steps else 0}")
            time.sleep(0.15)
            child.send_signal(signal.SIGTERM)
            out, err = child.communicate(timeout=60)
            assert child.returncode == 0, err
            (line,) = [line for line in out.splitlines() if line.startswith("saved")]
            steps.append(int(line.split()[1]))
    with ckptfmt.open(root, mode="r") as repository:
        rows = repository.generations(run="run", state=None)
        assert [row.step for row in reversed(rows)] == steps
        assert all(row.state == State.COMMITTED for row in rows)
        parents = {row.key: row.parent_key for row in rows}
        assert [parents[row.key] for row in rows[:-1]] == [row.key for row in rows[1:]]


def test_a_save_for_which_there_is_no_thread_raises_and_the_next_one_works(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = place.open()
    with process.checkpointer() as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(RuntimeError, match="no more threads"):
                checkpointer.save(state_of(1), step=1)
        assert checkpointer.in_flight == ()
        pending = checkpointer.save(state_of(2), step=2)
        assert pending is not None
        assert_state(pending.result().load(), 2)


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("no more threads")
