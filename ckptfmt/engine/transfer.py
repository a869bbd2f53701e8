"""All threads of the engine live here: bounded groups of workers, first error wins.

Worker threads are not daemons: the interpreter waits for them at exit, so that work under way is
finished and never dropped.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar, cast

log = logging.getLogger("ckptfmt")

Task = Callable[[], None]
T = TypeVar("T")

IO_BYTES: Final = 8 << 20
"""Size of one write or read: large enough for the device, small enough to share it."""
_COPY_BYTES: Final = 16 << 20


def thread_count() -> int:
    """Threads that copy, or hash and write: 2 to 4 measured best, and no difference between those for writing."""
    return max(2, min(4, _cores()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def distant_thread_count() -> int:
    """Threads that hash and send to a place that answers after a round trip: one connection is slower than the place.

    More of them than 4 on 2 cores only cost the caches.
    """
    return max(4, min(16, 2 * _cores()))


IO_THREADS: Final = 4
"""Threads that read. They wait for the device, or for the system to hand out fresh memory, most of the time, so
their number does not follow the cores: 4 measured best on 2 cores, and more gained nothing."""


class _Group:
    """Shared state of one ``run_all``: the remaining tasks and the first error."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks: Iterator[Task] = iter(tasks)
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def work(self) -> None:
        while True:
            with self._lock:
                task = next(self._tasks, None) if self.error is None else None
            if task is None:
                return
            if not self.attempt(task):
                return

    def attempt(self, task: Task) -> bool:
        """Whether it was done; what it raised ends the group."""
        try:
            task()
        except BaseException as error:
            with self._lock:
                if self.error is None:
                    self.error = error
            return False
        return True


def run_all(tasks: Sequence[Task], *, threads: int, name: str, begun: Task | None = None) -> None:
    """Run all tasks on up to ``threads`` threads, the caller's included, and return when all are done.

    After the first error no further task is started; that error is raised once the others are back. ``begun`` is called
    when all threads run.
    """
    group = _Group(tasks)
    helpers = [
        threading.Thread(target=group.work, name=f"{name}-{index}", daemon=False)
        for index in range(1, min(threads, len(tasks)))
    ]

    def begin() -> None:
        _start_all(helpers)
        if begun is not None:
            begun()

    group.attempt(begin)  # an interrupt waits as well for those that run by then
    group.work()
    _join(helpers)
    if group.error is not None:
        raise group.error


def run_apart(tasks: Sequence[Task], *, threads: int, name: str, begin: Task) -> None:
    """As ``run_all``, but on threads of their own, which call ``begin`` first: the caller only waits.

    For what changes a thread for good, as a lower priority does.
    """
    group = _Group(tasks)

    def work() -> None:
        begin()
        group.work()

    helpers = [
        threading.Thread(target=work, name=f"{name}-{index}", daemon=False)
        for index in range(max(1, min(threads, len(tasks))))
    ]
    group.attempt(lambda: _start_all(helpers))
    if not any(helper.ident for helper in helpers):
        group.work()
    _join(helpers)
    if group.error is not None:
        raise group.error


def _start_all(threads: Sequence[threading.Thread]) -> None:
    """Start helpers; without them (no more threads, or the interpreter is ending) the caller does the work alone."""
    for thread in threads:
        try:
            thread.start()
        except RuntimeError as error:
            log.debug("no helper thread: %s", error)


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for all that run, also when interrupted: the memory they work on must not be given away under them."""
    interrupted: BaseException | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:
                interrupted = error
    if interrupted is not None:
        raise interrupted


def copy_memory(moves: Sequence[tuple[int, int, int]]) -> None:
    """Copy (destination address, source address, bytes) triples with our own threads.

    Plain ``memmove`` on 2-4 threads keeps its speed beside busy processes, where a parallel copy by an
    OpenMP pool waits for its slowest thread.
    """
    batches = list(_batches(moves))
    memmove = ctypes.memmove

    def copy(batch: Sequence[tuple[int, int, int]]) -> None:
        for target, source, nbytes in batch:
            memmove(target, source, nbytes)

    run_all([lambda batch=batch: copy(batch) for batch in batches], threads=thread_count(), name="ckptfmt-copy")  # type: ignore[misc]


def _batches(moves: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Cut large moves and gather small ones into batches of about ``_COPY_BYTES``."""
    batch: list[tuple[int, int, int]] = []
    room = _COPY_BYTES
    for move in moves:
        target, source, nbytes = move
        while nbytes >= room:
            batch.append((target, source, room))
            yield batch
            target, source, nbytes = target + room, source + room, nbytes - room
            batch, room, move = [], _COPY_BYTES, (target, source, nbytes)
        if nbytes:
            batch.append(move)
            room -= nbytes
    if batch:
        yield batch


class Background:
    """One non-daemon thread that runs a job; the interpreter waits for it at exit."""

    def __init__(self, job: Task, *, name: str) -> None:
        self._thread = threading.Thread(target=job, name=name, daemon=False)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        if not self.is_current():  # a done-callback may ask from the save's own thread
            self._thread.join(timeout)

    def alive(self) -> bool:
        return self._thread.is_alive()

    def is_current(self) -> bool:
        return self._thread is threading.current_thread()


class Heartbeat:
    """A daemon thread that calls ``beat`` every ``seconds`` until stopped.

    A daemon, since it holds no state worth finishing: when the process goes, its lease should lapse.
    """

    def __init__(self, beat: Callable[[], None], *, seconds: float, name: str) -> None:
        self._beat = beat
        self._seconds = seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._beat()
            except Exception:  # reported as of a thread that ends, which this one does not: others rely on it
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=self._seconds)


class Line:
    """Runs calls on a daemon thread, one after the other, and does not wait for ever: the peer may have stopped."""

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._pid = 0
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], Future[object]]] = queue.SimpleQueue()
        self._late: Future[object] | None = None

    def ask(self, call: Callable[[], T], *, seconds: float) -> T:
        """What ``call`` returns or raises; ``TimeoutError`` if it does not in time, or an earlier one is still out."""
        with self._lock:
            if self._late is not None and not self._late.done():
                raise TimeoutError
            self._late = None
            if self._pid != os.getpid():  # a forked child has no thread
                self._pid, self._calls = os.getpid(), queue.SimpleQueue()
                threading.Thread(target=self._work, args=(self._calls,), name=self._name, daemon=True).start()
            answer: Future[object] = Future()
            self._calls.put((call, answer))
        try:
            return cast(T, answer.result(seconds))
        except TimeoutError:
            if not answer.done():
                with self._lock:
                    self._late = answer
            raise

    @staticmethod
    def _work(calls: queue.SimpleQueue[tuple[Callable[[], object], Future[object]]]) -> None:
        while True:
            call, answer = calls.get()
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)


_Dropped = queue.SimpleQueue[weakref.ref[object] | threading.Event]


class Keeper:
    """Keeps things for as long as what stands for them is referenced, and lets go of them on a daemon thread.

    Foreign code may drop its last reference anywhere, with a lock of its own held that another thread waits for with
    the interpreter's: then no line of Python may run there, which could let another thread run.
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._pid = 0
        self._dropped: _Dropped = queue.SimpleQueue()
        self._kept: dict[int, tuple[weakref.ref[object], object]] = {}

    def keep(self, stand_in: object, kept: object) -> None:
        """Reference ``kept`` until ``stand_in`` is gone, which has no finalizer and nothing else that ends with it."""
        if self._pid != os.getpid():  # a forked child has no thread; what it took along stays until it ends
            self._pid, self._dropped = os.getpid(), queue.SimpleQueue()
            threading.Thread(target=self._work, args=(self._dropped,), name=self._name, daemon=True).start()
        stands = weakref.ref(stand_in, self._dropped.put)  # in C, as all that is done when it goes
        self._kept[id(stands)] = stands, kept

    def settle(self, seconds: float = 10.0) -> None:
        """Wait until what has been dropped by now is let go of, but no longer than ``seconds``."""
        if self._pid == os.getpid():
            done = threading.Event()
            self._dropped.put(done)
            done.wait(seconds)

    def _work(self, dropped: _Dropped) -> None:
        while True:
            came = dropped.get()
            if isinstance(came, threading.Event):
                came.set()
            else:
                self._kept.pop(id(came), None)


DROPPED: Final = Keeper(name="ckptfmt-dropped")
"""Of the whole process."""
