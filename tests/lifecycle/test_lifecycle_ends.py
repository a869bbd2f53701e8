"""Every way in which a process ends while a save is in flight: it is drained, or the next launch goes on from before.

Also what reaches the save from the side: signals, errors of any kind in its threads, forks.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_chain import chain_of
from forked import in_child
from lifecycle_rig import Place, assert_state, ended, named, run_child, state_of
from test_lifecycle_exits import PRELUDE

import ckptfmt
from ckptfmt import connect
from ckptfmt.engine.save.snapshot import Snapshot
from ckptfmt.errors import SaveFailed
from ckptfmt.flights import Flights
from ckptfmt.policy import SavePolicy
from ckptfmt.repository import Repository
from ckptfmt.testing.faults import Fault, FaultyBackend

# -- the end of the interpreter -----------------------------------------------------------------------
BEGIN = """
import signal
checkpointer = opened(Fault("write_at", nth=2, delay=0.4)).checkpointer("run", preempt_signals=SIGNALS)
checkpointer.save({"w": np.full(5000, 1.0)}, step=1)
checkpointer.wait()
checkpointer.save({"w": np.full(5000, 2.0)}, step=2)
"""
ENDS: dict[str, tuple[str, int, list[int]]] = {
    "normal": ("pass", 0, [2, 1]),
    "sys.exit": ("sys.exit(3)", 3, [2, 1]),
    "unhandled exception": ("raise ValueError('training')", 1, [2, 1]),
    "os._exit": ("os._exit(4)", 4, [1]),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, [1]),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)", -signal.SIGTERM, [1]),
    "SIGINT": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", -signal.SIGINT, [2, 1]),
    "daemon thread": (
        "threading.Thread(target=lambda: (checkpointer.wait(), time.sleep(9)), daemon=True).start()",
        0,
        [2, 1],
    ),
    "exception in a thread": ("threading.Thread(target=lambda: 1 / 0).start()", 0, [2, 1]),
    "abort": ("os.abort()", -signal.SIGABRT, [1]),
    "preempted": (
        "assert checkpointer.preempted is False\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "assert checkpointer.preempted and checkpointer.should_save(3)\n"
        "checkpointer.save({'w': np.full(5000, 3.0)}, step=3)",
        0,
        [3, 2, 1],
    ),
}
"""What the program does once its second save is in flight, its exit status, and what is committed in the end."""

FORKED = """
import json, signal
children = {}
for name, root, body in json.loads(sys.argv[2]):
    pid = os.fork()
    if pid == 0:
        children.clear()
        sys.argv[1] = root
        SIGNALS = [signal.SIGUSR1] if name == "preempted" else []
        exec(BEGIN + body)
        break
    children[pid] = name
while children:
    pid, status = os.wait()
    print(json.dumps([children.pop(pid), os.waitstatus_to_exitcode(status)]), flush=True)
"""


@pytest.fixture(scope="module")
def endings(empty_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, Path]]:
    """One interpreter that has imported everything forks a process for every ending."""
    folder = tmp_path_factory.mktemp("endings")
    jobs = []
    for number, (name, (body, _, _)) in enumerate(ENDS.items()):
        root = folder / str(number)
        shutil.copytree(empty_repository, root)
        jobs.append((name, str(root), body))
    _, out, err = run_child(f"{PRELUDE}\nBEGIN = {BEGIN!r}\n{FORKED}", "nowhere", json.dumps(jobs), timeout=90)
    statuses = dict(json.loads(line) for line in out.splitlines() if line.startswith("["))
    assert len(statuses) == len(ENDS), err
    return {name: (statuses[name], Path(root)) for name, root, _ in jobs}


@pytest.mark.parametrize("name", ENDS)
def test_a_process_ends_with_a_save_in_flight(endings: dict[str, tuple[int, Path]], name: str) -> None:
    """FR-016: what can be finished is committed; else the last commit is there, and the next launch goes on at once."""
    status, root = endings[name]
    _, wanted, steps = ENDS[name]
    assert status == wanted
    began = time.monotonic()
    with ckptfmt.open(root) as repository, repository.checkpointer("run") as checkpointer:
        assert time.monotonic() - began < 10  # nobody waits for the lease of a process that is gone
        state = {"w": np.zeros(5000)}
        report = checkpointer.restore(state)
        assert report is not None
        assert [info.step for info in repository.generations()] == steps
        assert (state["w"] == report.step).all()
        assert report.step == steps[0]
        pending = checkpointer.save({"w": np.full(5000, 9.0)}, step=9)
        assert pending is not None
        assert pending.result().verify().ok
        assert not repository.recover().actions


# -- interrupts in the middle of save -----------------------------------------------------------------
class Interrupting:
    """A piece of state at which Ctrl-C arrives."""

    def state_dict(self) -> dict[str, Any]:
        raise KeyboardInterrupt

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def test_an_interrupt_while_the_state_is_looked_at_leaves_no_trace(place: Place) -> None:
    process = place.open()
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save({**state_of(2), "module": Interrupting()}, step=2)
        assert not checkpointer.in_flight
        checkpointer.save(state_of(3), step=3)
    assert [row.step for row in process.rows()] == [1, 3]
    assert_state(process.repository.latest().load(), 3)


def _interrupt(owner: type, name: str, *, after: bool) -> Callable[..., Any]:
    method = getattr(owner, name)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return method(*arguments, **named)
        if after:
            method(*arguments, **named)
        raise KeyboardInterrupt

    return interrupted


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [(Flights, "start", True), (SavePolicy, "saved", False), (Snapshot, "_settle", False), (Snapshot, "freeze", False)],
)
def test_an_interrupt_before_the_state_is_frozen_aborts_that_save_only(
    place: Place, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: bool
) -> None:
    """What is half a copy, as far as anybody knows, is never committed; nobody waits for its other half."""
    process = place.open()
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1)
        checkpointer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, _interrupt(owner, name, after=after))
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(state_of(2), step=2)
        with pytest.raises(SaveFailed, match="not frozen: KeyboardInterrupt"):
            checkpointer.wait(timeout=20)
        checkpointer.save(state_of(3), step=3)
    assert [info.step for info in process.repository.generations()] == [3, 1]
    assert all(ended(row) for row in process.rows() if row.step == 2)
    assert_state(process.repository.latest().load(), 3)


# -- errors in the threads of a save ------------------------------------------------------------------
ERRORS: list[Callable[[], BaseException]] = [
    lambda: RuntimeError("a bug"),
    lambda: MemoryError("no memory"),
    lambda: OSError(5, "no error of ours"),
    lambda: SystemExit(3),
    lambda: KeyboardInterrupt("in a thread"),
    lambda: AssertionError(),
]
WHERE = [("write_at", ""), ("finish", ""), ("create", "part.json"), ("create", ".json.zst")]


@pytest.mark.parametrize(("op", "name"), WHERE)
def test_any_exception_in_a_writer_fails_its_save_alone(place: Place, op: str, name: str) -> None:
    """FR-014: also one that nobody expected, and one that would end the process in its main thread."""
    process = place.open()
    with process.checkpointer() as checkpointer:
        for step, make in enumerate(ERRORS, start=1):
            error = make()
            fault = process.backend.add(Fault(op, error=lambda error=error: error, when=named(name)))  # type: ignore[misc]
            pending = checkpointer.save(state_of(step), step=step)
            assert pending is not None
            failure = pending.exception(20)
            assert isinstance(failure, SaveFailed), failure
            assert error in chain_of(failure)
            assert fault.fired == 1
            assert ended(process.row())
            assert type(error).__name__ in (process.row().abort_reason or "")
        checkpointer.save(state_of(99), step=99)
    assert [info.step for info in process.repository.generations()] == [99]
    assert_state(process.repository.latest().load(), 99)


@pytest.mark.parametrize("op", ["begin_save", "report_rank", "mark_durable", "commit"])
def test_any_exception_of_the_catalog_fails_its_save_alone(place: Place, op: str) -> None:
    process = place.open()
    with process.checkpointer() as checkpointer:
        for step, make in enumerate(ERRORS, start=1):
            error = make()
            process.catalog.add(Fault(op, error=lambda error=error: error))  # type: ignore[misc]
            pending = checkpointer.save(state_of(step), step=step)
            assert pending is not None
            failure = pending.exception(20)
            assert isinstance(failure, SaveFailed), failure
            assert error in chain_of(failure)
        checkpointer.save(state_of(99), step=99)
    assert [info.step for info in process.repository.generations()] == [99]
    assert all(ended(row) for row in process.rows() if row.step != 99)


# -- forks --------------------------------------------------------------------------------------------
def _save_in_child(root: Path) -> None:
    with ckptfmt.open(root) as own, own.checkpointer("child") as mine:
        mine.save(state_of(2), step=2)


@pytest.mark.parametrize(("op", "name"), [("write_at", ""), ("create", "part.json"), ("create", "COMMIT.json")])
def test_a_child_forked_in_the_middle_of_a_save_opens_and_saves_for_itself(root: Path, op: str, name: str) -> None:
    """FR-119, FR-120: with connections and descriptors of its own, while its parent's save goes on."""
    hold = threading.Event()
    fault = Fault(op, hold=hold, when=named(name))
    connection = connect.open_site(root, mode="w", catalog=None, storage_options=None)
    site = dataclasses.replace(connection.site, backend=FaultyBackend(connection.site.backend, fault))
    with Repository(dataclasses.replace(connection, site=site), "w") as repository:
        checkpointer = repository.checkpointer("parent")
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        try:
            assert fault.reached.wait(20)
            in_child(lambda: _save_in_child(root))
        finally:
            hold.set()
        assert_state(pending.result(20).load(), 1)
        assert_state(repository.latest("child").load(), 2)
        assert not repository.recover().actions
