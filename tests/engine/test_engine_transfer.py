"""Groups of workers: all tasks or the first error, and nobody left running."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest

from ckptfmt.engine import transfer
from ckptfmt.engine.transfer import Heartbeat, copy_memory, run_all, run_apart


def test_every_task_runs_once_on_at_most_so_many_threads() -> None:
    ran: list[int] = []
    seen: set[int] = set()

    def task(number: int) -> None:
        ran.append(number)
        seen.add(threading.get_ident())
        time.sleep(0.001)

    run_all([lambda n=n: task(n) for n in range(50)], threads=3, name="test")  # type: ignore[misc]
    assert sorted(ran) == list(range(50))
    assert len(seen) <= 3


def test_the_first_error_stops_the_others_and_is_the_one_raised() -> None:
    ran: list[int] = []

    def task(number: int) -> None:
        ran.append(number)
        if number == 3:
            raise OSError("third")

    with pytest.raises(OSError, match="third"):
        run_all([lambda n=n: task(n) for n in range(1000)], threads=1, name="test")  # type: ignore[misc]
    assert ran == [0, 1, 2, 3]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-")]


def test_without_more_threads_the_caller_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ran: list[int] = []
    run_all([lambda n=n: ran.append(n) for n in range(5)], threads=4, name="test")  # type: ignore[misc]
    assert ran == [0, 1, 2, 3, 4]


def test_who_asks_is_told_when_all_threads_run() -> None:
    together = threading.Barrier(4)
    running: list[int] = []

    def begun() -> None:
        running.append(len([thread for thread in threading.enumerate() if thread.name.startswith("test-")]))
        together.wait(timeout=60)

    run_all([lambda: together.wait(timeout=60) and None] * 3 + [lambda: None], threads=4, name="test", begun=begun)
    assert running == [3]


class _Slow:
    """A task that takes a moment; whoever starts its threads is interrupted while one of them runs."""

    def __init__(self) -> None:
        self._running = threading.Event()
        self.begun: list[bool] = []
        self.finished: list[bool] = []

    def __call__(self) -> None:
        self.begun.append(True)
        self._running.set()
        time.sleep(0.05)
        self.finished.append(True)

    def interrupt(self) -> None:
        assert self._running.wait(60)
        raise KeyboardInterrupt

    def interrupt_start(self, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
        start = threading.Thread.start

        def interrupted(thread: threading.Thread) -> None:
            if thread.name == at:
                self.interrupt()
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", interrupted)

    def all_that_began_have_finished(self) -> bool:
        return len(self.finished) == len(self.begun) > 0


@pytest.mark.parametrize("when", ["starting", "begun"])
def test_an_interrupt_at_the_start_waits_for_the_threads_that_run(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow()
    if when == "starting":
        slow.interrupt_start(monkeypatch, "test-2")
    with pytest.raises(KeyboardInterrupt):
        run_all([slow] * 3, threads=2 if when == "begun" else 3, name="test", begun=slow.interrupt)
    assert slow.all_that_began_have_finished()


def test_an_interrupt_waits_for_threads_that_run_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow()
    slow.interrupt_start(monkeypatch, "test-1")
    with pytest.raises(KeyboardInterrupt):
        run_apart([slow] * 3, threads=2, name="test", begin=lambda: None)
    assert slow.all_that_began_have_finished()


def test_an_interrupt_waits_for_the_threads_that_use_the_callers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    finished: list[bool] = []
    join = threading.Thread.join
    interrupts = [KeyboardInterrupt()]

    def interrupted_join(self: threading.Thread, timeout: float | None = None) -> None:
        if interrupts:
            release.set()
            raise interrupts.pop()
        join(self, timeout)

    def slow() -> None:
        if threading.current_thread() is not threading.main_thread():
            release.wait(10)
            time.sleep(0.05)
            finished.append(True)
        else:
            time.sleep(0.02)  # leave the other task to the helper

    monkeypatch.setattr(threading.Thread, "join", interrupted_join)
    with pytest.raises(KeyboardInterrupt):
        run_all([slow, slow], threads=2, name="test")
    assert finished == [True]


@pytest.mark.parametrize(
    "sizes",
    [
        [0, 1, 3],
        [transfer._COPY_BYTES + 5, 7],
        [5] * 1000,
        [transfer._COPY_BYTES - 1, 1, 4],
        [2, 2 * transfer._COPY_BYTES, 9],
    ],
)
def test_copies_arrive_whole(sizes: list[int]) -> None:
    rng = np.random.default_rng(1)
    sources = [rng.integers(0, 255, size, dtype=np.uint8) for size in sizes]
    targets = [np.zeros_like(source) for source in sources]
    copy_memory([(t.ctypes.data, s.ctypes.data, s.nbytes) for t, s in zip(targets, sources, strict=True)])
    for target, source in zip(targets, sources, strict=True):
        assert np.array_equal(target, source)
    assert ctypes.sizeof(ctypes.c_void_p) == 8  # addresses are passed as plain integers


def test_a_heartbeat_outlives_an_error_and_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    beats: list[int] = []
    enough = threading.Event()

    def beat() -> None:
        beats.append(1)
        if len(beats) == 1:
            raise ValueError("the first one")
        enough.set()

    heart = Heartbeat(beat, seconds=0.01, name="heart")
    assert enough.wait(10)
    heart.stop()
    (found,) = reported
    assert (str(found.exc_value), found.thread and found.thread.name) == ("the first one", "heart")
