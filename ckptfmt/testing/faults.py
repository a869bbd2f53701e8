"""A backend that fails on command: a wrapper that counts every call and breaks the chosen ones.

    backend = FaultyBackend(PosixBackend(root), Fault("finish", error=lambda: Unavailable("lost")))

For every mutating call k of a save, ``timing`` gives the moments at which a process can die: before
the call, in its middle (``torn``), or after it; with ``crash=False`` the last is the lost answer, where
the process lives on and believes that the call failed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ckptfmt.errors import OutOfSpace
from ckptfmt.ports.backend import Backend, Buffer, ObjectInfo, ObjectWriter, Traits

__all__ = ["MUTATIONS", "Call", "Fault", "FaultyBackend"]

MUTATIONS: Final = frozenset(
    {"create", "make_folder", "open_writer", "write_at", "finish", "abort", "delete", "remove_folder", "sweep_debris"}
)
"""Names of the calls that change what is stored: the candidates for crash points."""

Timing = Literal["before", "torn", "after"]


@dataclass(frozen=True)
class Call:
    """One call that reached the wrapper."""

    number: int
    """Counts all calls from 1."""
    nth: int
    """Counts the calls of this ``op`` from 1."""
    op: str
    """Name of the ``Backend`` or ``ObjectWriter`` method."""
    key: str
    """Key or prefix; '' for ``space`` and the root."""
    offset: int | None = None
    nbytes: int | None = None

    @property
    def mutates(self) -> bool:
        return self.op in MUTATIONS


@dataclass(eq=False)
class Fault:
    """What goes wrong, and on which calls. All given conditions must hold.

    ``torn`` does the first half of a ``write_at`` or ``read_into`` and then raises; the other calls are
    all or nothing by contract, so that torn is the same as ``before``.
    """

    op: str | None = None
    """Only calls of this name; None = any."""
    error: Callable[[], BaseException] | None = None
    """Makes the error to raise (or ends the process itself); None = only ``delay`` and ``hold``."""
    timing: Timing = "before"
    nth: int | None = None
    """Only the nth call of its op, counted from 1."""
    number: int | None = None
    """Only call ``number`` of all, counted from 1."""
    when: Callable[[Call], bool] | None = None
    times: int | None = 1
    """How often it fires; None = always."""
    crash: bool = False
    """After firing, every further call raises ``error`` too and does nothing: this process is dead."""
    delay: float = 0.0
    """Seconds to sleep before the call goes on."""
    hold: threading.Event | None = None
    """Wait for this event before the call goes on."""
    reached: threading.Event = field(default_factory=threading.Event)
    """Set when it first fires, before any delay or hold."""
    fired: int = 0

    def matches(self, call: Call) -> bool:
        return (
            (self.times is None or self.fired < self.times)
            and self.op in (None, call.op)
            and self.nth in (None, call.nth)
            and self.number in (None, call.number)
            and (self.when is None or self.when(call))
        )


class FaultyCalls:
    """The machinery of a wrapper whose calls are counted and broken. Thread-safe.

    ``calls`` lists every call in order of arrival and ``counts`` their number by name.
    """

    def __init__(self, *faults: Fault) -> None:
        self._faults = list(faults)
        self._lock: Final = threading.Lock()
        self._crash: Callable[[], BaseException] | None = None
        self.calls: Final[list[Call]] = []
        self.counts: Final[Counter[str]] = Counter()

    def add(self, fault: Fault) -> Fault:
        """Break later calls too."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Forget all faults. A crash stays: open the place again through a new wrapper."""
        with self._lock:
            self._faults.clear()

    @property
    def crashed(self) -> bool:
        return self._crash is not None

    def _arrive(self, op: str, key: str, offset: int | None, nbytes: int | None) -> list[Fault]:
        """Count the call and return the faults that fire on it."""
        with self._lock:
            self.counts[op] += 1
            call = Call(len(self.calls) + 1, self.counts[op], op, key, offset, nbytes)
            self.calls.append(call)
            if self._crash is not None:
                raise self._crash()
            firing = [fault for fault in self._faults if fault.matches(call)]
            for fault in firing:
                fault.fired += 1
        for fault in firing:
            fault.reached.set()
            if fault.delay:
                time.sleep(fault.delay)
            if fault.hold is not None:
                fault.hold.wait()
        return firing

    def _break(self, firing: list[Fault], *timings: Timing) -> None:
        for fault in firing:
            if fault.error is not None and fault.timing in timings:
                if fault.crash:
                    with self._lock:
                        self._crash = fault.error
                raise fault.error()

    @contextmanager
    def _whole(self, op: str, key: str, *, nbytes: int | None = None) -> Iterator[None]:
        """Around a call that is all or nothing."""
        firing = self._arrive(op, key, None, nbytes)
        self._break(firing, "before", "torn")
        yield
        self._break(firing, "after")


class FaultyBackend(FaultyCalls):
    """A ``Backend`` around ``inner``.

    ``quota`` bounds the bytes stored through this wrapper: one object too many is ``OutOfSpace``.
    """

    def __init__(self, inner: Backend, *faults: Fault, quota: int | None = None) -> None:
        super().__init__(*faults)
        self._inner: Final = inner
        self._quota: Final = quota
        self._stored: dict[str, int] = {}

    def _divisible(self, op: str, key: str, offset: int, data: Buffer, do: Callable[[int, memoryview], None]) -> None:
        """Make a call that can stop half-way: ``do(offset, bytes)``."""
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(bytearray())
        firing = self._arrive(op, key, offset, len(view))
        self._break(firing, "before")
        if any(fault.timing == "torn" and fault.error is not None for fault in firing):
            half = len(view) // 2
            if half:
                do(offset, view[:half])
            self._break(firing, "torn")
        do(offset, memoryview(data))
        self._break(firing, "after")

    @contextmanager
    def _reserved(self, key: str, nbytes: int) -> Iterator[None]:
        """Around a call that stores ``nbytes`` more, unless it fails."""
        with self._lock:
            new = key not in self._stored
            if self._quota is not None and new:
                free = self._quota - sum(self._stored.values())
                if nbytes > free:
                    raise OutOfSpace(
                        f"write {self._inner.url}/{key}: needed {nbytes} bytes, free {free} bytes of the quota; "
                        "free space there",
                        needed=nbytes,
                        free=free,
                    )
            self._stored.setdefault(key, nbytes)
        try:
            yield
        except BaseException:
            if new:
                self._release(key)
            raise

    def _release(self, key: str) -> None:
        with self._lock:
            self._stored.pop(key, None)

    # -- Backend -------------------------------------------------------------------------------
    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def storage_options(self) -> Mapping[str, Any]:
        return self._inner.storage_options

    @property
    def traits(self) -> Traits:
        return self._inner.traits

    def create(self, key: str, data: Buffer) -> None:
        nbytes = memoryview(data).nbytes
        with self._whole("create", key, nbytes=nbytes), self._reserved(key, nbytes):
            self._inner.create(key, data)

    def make_folder(self, prefix: str) -> None:
        with self._whole("make_folder", prefix):
            self._inner.make_folder(prefix)

    def remove_folder(self, prefix: str) -> None:
        with self._whole("remove_folder", prefix):
            self._inner.remove_folder(prefix)

    def has_folder(self, prefix: str) -> bool:
        with self._whole("has_folder", prefix):
            return self._inner.has_folder(prefix)

    def open_writer(self, key: str, nbytes: int, *, write_bytes: int = 0) -> ObjectWriter:
        with self._whole("open_writer", key, nbytes=nbytes), self._reserved(key, nbytes):
            return _FaultyWriter(self, key, self._inner.open_writer(key, nbytes, write_bytes=write_bytes))

    def sync(self, key: str) -> None:
        with self._whole("sync", key):
            self._inner.sync(key)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._divisible("read_into", key, offset, buffer, lambda at, view: self._inner.read_into(key, at, view))

    def map_cached(self, key: str, offset: int, memory: memoryview) -> None:
        return None  # every byte comes through ``read_into``, where it can be broken

    def read(self, key: str, *, limit: int) -> bytes:
        with self._whole("read", key):
            return self._inner.read(key, limit=limit)

    def head(self, key: str) -> ObjectInfo:
        with self._whole("head", key):
            return self._inner.head(key)

    def list_folders(self, prefix: str) -> list[str]:
        with self._whole("list_folders", prefix):
            return self._inner.list_folders(prefix)

    def delete(self, key: str) -> None:
        with self._whole("delete", key):
            self._inner.delete(key)
            self._release(key)

    def sweep_debris(
        self, prefix: str, *, dry_run: bool, deep: bool = True, only: Collection[str] | None = None
    ) -> list[ObjectInfo]:
        with self._whole("sweep_debris", prefix):
            return self._inner.sweep_debris(prefix, dry_run=dry_run, deep=deep, only=only)

    def space(self) -> int | None:
        with self._whole("space", ""):
            free = self._inner.space()
            if self._quota is None:
                return free
            with self._lock:
                left = max(0, self._quota - sum(self._stored.values()))
            return left if free is None else min(left, free)

    def list(self, prefix: str) -> list[ObjectInfo]:
        with self._whole("list", prefix):
            return self._inner.list(prefix)

    def close(self) -> None:
        """Close ``inner``. Neither counted nor broken: it changes nothing that is stored."""
        self._inner.close()


class _FaultyWriter:
    """The writer that ``FaultyBackend.open_writer`` hands out."""

    def __init__(self, owner: FaultyBackend, key: str, inner: ObjectWriter) -> None:
        self._owner: Final = owner
        self._key: Final = key
        self._inner: Final = inner

    def write_at(self, offset: int, data: Buffer) -> None:
        self._owner._divisible("write_at", self._key, offset, data, self._inner.write_at)

    def finish(self) -> None:
        with self._owner._whole("finish", self._key):
            self._inner.finish()

    def abort(self) -> None:
        with self._owner._whole("abort", self._key):
            self._inner.abort()
            self._owner._release(self._key)
