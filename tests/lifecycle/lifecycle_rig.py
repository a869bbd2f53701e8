"""A repository over a store in memory and a SQLite catalog, where every call can be counted, broken, held or killed.

``Place`` is the disk: it survives. ``Place.open`` is a process: its backend and its catalog share one journal in the
order in which calls took effect, and one crash ends both.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ckptfmt import connect
from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import BackendError, CatalogError
from ckptfmt.format.states import State
from ckptfmt.ports.records import GenerationRecord
from ckptfmt.repository import Repository
from ckptfmt.testing.catalog_faults import FaultyCatalog
from ckptfmt.testing.faults import MUTATIONS, Call, Fault, FaultyBackend

CHANGES = frozenset(
    {"begin_save", "skip_save", "report_rank", "mark_durable", "commit", "set_proven", "abort", "adopt", "mark_swept"}
)
"""Catalog methods that change what the catalog says of a generation."""


def dead_storage() -> BackendError:
    return BackendError("this process is dead")


def dead_catalog() -> CatalogError:
    return CatalogError("this process is dead")


class Machine:
    """What the backend and the catalog of one process share: its journal, and whether it is still alive."""

    def __init__(self) -> None:
        self.journal: list[tuple[str, str]] = []
        """(op, key or '') of every call that changed something, in the order in which they took effect."""
        self.dead = threading.Event()
        self.lock = threading.Lock()

    def note(self, op: str, key: str) -> None:
        with self.lock:
            self.journal.append((op, key))


class JournalCatalog(FaultyCatalog):
    """A ``FaultyCatalog`` that shares its machine's journal and its death."""

    def __init__(self, inner: Any, machine: Machine, *faults: Fault) -> None:
        super().__init__(inner, *faults)
        self._machine = machine

    def _arrive(self, op: str, key: str, offset: int | None, nbytes: int | None) -> list[Fault]:
        firing = super()._arrive(op, key, offset, nbytes)
        if self._machine.dead.is_set():  # perhaps only since this call was held up
            raise dead_catalog()
        return firing

    def _call(self, name: str, method: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        def noted(*arguments: Any, **named: Any) -> Any:
            answer = method(*arguments, **named)
            if name in CHANGES:
                self._machine.note(name, "")
            return answer

        return super()._call(name, noted, arguments, named)


class JournalBackend(FaultyBackend):
    """A ``FaultyBackend`` that shares its machine's journal and its death."""

    def __init__(self, inner: Any, machine: Machine, *faults: Fault, quota: int | None = None) -> None:
        super().__init__(inner, *faults, quota=quota)
        self._machine = machine

    def _arrive(self, op: str, key: str, offset: int | None, nbytes: int | None) -> list[Fault]:
        if self._machine.dead.is_set():
            raise dead_storage()
        firing = super()._arrive(op, key, offset, nbytes)
        if self._machine.dead.is_set():  # it died while this call was held up
            raise dead_storage()
        if op in MUTATIONS:
            self._machine.note(op, key)
        return firing


class Process:
    """One opening of the place: a repository whose parts can be reached."""

    def __init__(self, place: Place, faults: Sequence[Fault], sql: Sequence[Fault], quota: int | None) -> None:
        self.machine = Machine()
        self.faults = [*faults, *sql]
        connection = connect.open_site(place.url, mode="w", catalog=place.catalog_url, storage_options=None)
        self.backend = JournalBackend(connection.site.backend, self.machine, *faults, quota=quota)
        self.catalog = JournalCatalog(connection.site.sql(), self.machine, *sql)
        self.site = dataclasses.replace(connection.site, backend=self.backend, catalog=self.catalog)
        self.repository = Repository(dataclasses.replace(connection, site=self.site), "w")
        self.checkpointers: list[Checkpointer] = []

    @property
    def journal(self) -> list[tuple[str, str]]:
        return self.machine.journal

    def checkpointer(self, run: str = "run", **options: Any) -> Checkpointer:
        opened = self.repository.checkpointer(run, **options)
        self.checkpointers.append(opened)
        return opened

    def die(self) -> None:
        """From now on neither storage nor catalog hears anything from this process."""
        self.machine.dead.set()

    def kill(self) -> BaseException:
        """The error of a call at which the process ends: use as ``error=process.kill``."""
        self.die()
        return dead_storage()

    def release(self) -> None:
        """Let go of every call that a fault holds, so that a test that failed half-way ends."""
        for fault in (*self.faults, *self.backend._faults, *self.catalog._faults):
            if fault.hold is not None:
                fault.hold.set()

    def rows(self, run: str = "run") -> list[GenerationRecord]:
        """All generations, oldest first."""
        return sorted(self.site.sql().generations(run=run), key=lambda row: row.id)

    def row(self, run: str = "run") -> GenerationRecord:
        """The newest generation by id."""
        return self.rows(run)[-1]

    def events(self, run: str = "run") -> list[str]:
        return [event.kind for event in self.site.sql().events(run=run)]

    def objects(self, prefix: str = "runs") -> list[str]:
        return [info.key for info in self.backend.list(prefix)]


class Place:
    """Storage and catalog that outlive the processes that open them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"memory://t{uuid.uuid4().hex}"
        self.catalog_url = f"sqlite:///{folder}/catalog.sqlite"
        self._processes: list[Process] = []

    def open(self, *faults: Fault, sql: Sequence[Fault] = (), quota: int | None = None) -> Process:
        process = Process(self, faults, sql, quota)
        self._processes.append(process)
        return process

    def forget(self) -> None:
        """Close whatever a test left open; a process that still works is drained, a dead one ends at once."""
        for process in self._processes:
            process.release()
            for checkpointer in process.checkpointers:
                try:
                    checkpointer.close(timeout=20)
                except Exception:
                    process.die()
                    checkpointer.close()
            process.repository.close()
        MemoryBackend(self.url.partition("://")[2]).forget()


def state_of(seed: int, numbers: int = 3000) -> dict[str, Any]:
    """A small state of several kinds of values, made from ``seed`` alone."""
    rng = np.random.default_rng(seed)
    return {
        "w": rng.standard_normal(numbers),
        "b": rng.integers(-5, 5, size=17, dtype=np.int32),
        "nested": [seed, {"deep": [1, 2, seed]}],
        "blob": bytes(rng.integers(0, 256, size=70_000, dtype=np.uint8)),
        "step": seed,
    }


def assert_state(found: Any, seed: int, numbers: int = 3000) -> None:
    wanted = state_of(seed, numbers)
    assert list(found) == list(wanted)
    for name in ("w", "b"):
        assert found[name].dtype == wanted[name].dtype
        assert found[name].tobytes() == wanted[name].tobytes(), name
    assert (found["nested"], found["blob"], found["step"]) == (wanted["nested"], wanted["blob"], seed)


def ended(row: GenerationRecord) -> bool:
    """Whether the generation was aborted (and perhaps swept already), never committed."""
    return row.state in (State.ABORTED, State.DELETED) and row.commit_seq is None


def eventually(what: Callable[[], bool], seconds: float = 10.0) -> None:
    """Fail unless ``what`` becomes true in time."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


def set_commit_timeout(checkpointer: Checkpointer, seconds: float) -> None:
    """Of the saves to come."""
    saving = checkpointer._saving
    saving._context = dataclasses.replace(saving._context, commit_timeout=seconds)


def named(suffix: str) -> Callable[[Call], bool]:
    """Condition of a fault: the key ends in ``suffix``."""
    return lambda call: call.key.endswith(suffix)


def under(part: str) -> Callable[[Call], bool]:
    """Condition of a fault: the key holds ``part``."""
    return lambda call: part in call.key


def start_child(source: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start a Python child on ``source``; what it prints comes through a pipe."""
    here = Path(__file__).parent
    prelude = f"import sys; sys.path[:0] = {[str(here), str(here.parent)]!r}\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + textwrap.dedent(source), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run_child(source: str, *arguments: object, timeout: float = 60, **options: Any) -> tuple[int, str, str]:
    """Run a child to its end: (status, stdout, stderr)."""
    with start_child(source, *arguments, **options) as child:
        try:
            out, err = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
            raise AssertionError(f"the child did not end in {timeout} s:\n{out}\n{err}") from None
        return child.returncode, out, err


def wait_for_line(child: subprocess.Popen[str], wanted: str) -> None:
    """Read the child's output up to the line ``wanted``."""
    assert child.stdout is not None
    seen = []
    for line in child.stdout:
        seen.append(line)
        if line.rstrip("\n") == wanted:
            return
    assert child.stderr is not None
    raise AssertionError(f"the child ended without {wanted!r}: {seen} {child.stderr.read()}")
