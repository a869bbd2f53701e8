"""Deferred freeze: what an optimizer owns is copied beside training, until the optimizer announces that it changes it.

The copies of host memory run on a thread here, those of a device on its own streams. An announcement makes the updating
thread wait for the former and its device stream for the latter. Who changes an owned tensor unannounced is found out by
the library's count of changes: the save fails, since its bytes may be of two moments.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import msgspec

from ckptfmt.engine.families import Families
from ckptfmt.engine.save.freeze import FrozenLeaf
from ckptfmt.engine.save.progress import Listener
from ckptfmt.engine.transfer import Background
from ckptfmt.errors import InvalidInput, UnsupportedValue
from ckptfmt.ports.arrays import Capture, Ownership

log = logging.getLogger("ckptfmt")

DEFERRED_BYTES_MIN: Final = 64 << 10
"""Smaller tensors in host memory are copied at once: that takes no longer than to keep an eye on them."""


class Watch(msgspec.Struct, frozen=True):
    """The count of changes of one tensor when its copy was ordered. A Struct: one is made per tensor in the stall."""

    name: str
    value: Any
    owner: Ownership
    count: int

    def changed(self) -> bool:
        return self.owner.changes(self.value) != self.count


def watch_owned(
    leaves: Sequence[FrozenLeaf], owners: Sequence[Ownership], families: Families
) -> dict[int, Sequence[Watch]]:
    """Leaf index -> watches, for every leaf that is exactly a tensor with an owner.

    Tensors of the same memory may each have a count of their own (torch: ``parameter`` and ``parameter.data``), so what
    is watched is each tensor that an owner changes, and the saved one.
    """
    if not owners:
        return {}
    alias_of = {id(leaf.value): leaf.spec.alias for leaf in leaves}
    owned: dict[Hashable, list[tuple[Ownership, Any]]] = {}
    for owner in owners:
        for value in owner.values(DEFERRED_BYTES_MIN):
            # Nearly all stand in the state themselves, and are described already.
            for alias in [alias_of[id(value)]] if id(value) in alias_of else _aliases(value, families):
                owned.setdefault(alias, []).append((owner, value))
    owned.pop(None, None)
    found: dict[int, Sequence[Watch]] = {}
    for index, leaf in enumerate(leaves if owned else ()):
        changing = owned.get(leaf.spec.alias)
        if changing is not None:
            if changing[0][1] is not leaf.value and all(value is not leaf.value for _, value in changing):
                changing = [*changing, (changing[0][0], leaf.value)]
            found[index] = [Watch(leaf.name, value, owner, owner.changes(value)) for owner, value in changing]
    return found


def _aliases(value: Any, families: Families) -> list[Hashable]:
    """Of a tensor, or of each box that this rank holds of one that is spread over ranks."""
    family = families.of(value)
    if family is None:
        return []
    try:
        boxes = family.boxes(value, "")
        return [family.describe(value, "").alias] if boxes is None else [spec.alias for _, spec in boxes]
    except UnsupportedValue:  # not in the saved state then, which would have been refused
        return []


class Deferral:
    """The deferred copies of one snapshot: ``copy_host`` makes those of host memory, ``captures`` are under way."""

    def __init__(
        self,
        copy_host: Callable[[], None],
        captures: Sequence[Capture],
        *,
        on_host: Sequence[Watch],
        on_device: Sequence[Watch],
    ) -> None:
        self._owners = list({id(watch.owner): watch.owner for watch in (*on_host, *on_device)}.values())
        self._begun = False
        self._copy_host = copy_host
        self._captures = captures
        self._on_host = on_host
        self._on_device = on_device
        self._listener: Listener | None = None
        self._pid = os.getpid()
        self._thread_id = 0
        self._lock = threading.Lock()
        self._host_final = threading.Event()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._fenced = False
        self._waiting_since: float | None = None
        self.blocked_seconds = 0.0
        """For how long announcements made the host wait."""
        self._undo: list[Callable[[], None]] = []

    def start(self, listener: Listener) -> None:
        """Listen to the owners and begin; call it on the thread that updates, like all announcements.

        ``listener`` hears for how long announcements made the host wait, before whoever waits may go on, and when all
        is frozen.
        """
        with self._lock:
            if self._begun:
                return  # called off
            self._begun = True
        self._listener = listener
        self._thread_id = threading.get_ident()
        try:
            for owner in self._owners:
                self._undo.append(owner.announce(self.before_update))
        except BaseException as error:
            self._undo_all()
            self._fail(error)
            raise
        try:
            Background(self._run, name="ckptfmt-freeze").start()
        except RuntimeError as error:
            log.warning("no thread to copy on: the state is copied at once (%s)", error)
            self._run()

    def call_off(self, error: BaseException) -> None:
        """The save has failed: if not begun, nothing is copied any more, and whoever waits gets ``error``."""
        with self._lock:
            if self._begun:
                return
            self._begun = True
        self._fail(error)

    def before_update(self) -> None:
        """Return when the caller may change what is deferred. Never raises: a failure is the save's."""
        if os.getpid() != self._pid:
            return  # the copies are made in the parent, of its own memory
        with self._lock:
            if self._done.is_set():
                return
            self._fence()
            if not self._host_final.is_set() and self._waiting_since is None:
                self._waiting_since = time.perf_counter()
        self._host_final.wait()

    def lift(self) -> bool:
        """Stop listening if all is copied. Returns whether that is done: only the thread that updates can do it, for it
        is not in the middle of calling its hooks."""
        if self._undo and (not self._done.is_set() or threading.get_ident() != self._thread_id):
            return False
        self._undo_all()
        return True

    def wait_for_host(self) -> None:
        """Block until the copies of host memory are final. Raises why they are not to be used."""
        self._host_final.wait()
        self._raise()

    def wait(self) -> None:
        """Block until all copies are final. Raises why they are not to be used."""
        self._done.wait()
        self._raise()

    def settle(self) -> None:
        """Block until nothing is copied any more, whatever came of it."""
        self._done.wait()

    # -- the copying thread -----------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._try(self._copy_host)
            self._try(lambda: _check(self._on_host))
            self._tell()
            if not self._captures:
                self._end()
            self._host_final.set()
            for capture in self._captures:
                self._try(capture.wait)
            with self._lock:
                if not self._fenced:  # else they were looked at before the update that was let go on
                    self._try(lambda: _check(self._on_device))
        finally:
            self._end()
            self._host_final.set()

    def _tell(self) -> None:
        with self._lock:
            since, self._waiting_since = self._waiting_since, None
            if since is not None and self._listener is not None:
                self.blocked_seconds = time.perf_counter() - since
                self._listener.blocked(self.blocked_seconds)

    def _end(self) -> None:
        if self._done.is_set():
            return
        if self._error is None and self._listener is not None:
            self._listener.advance("frozen")
        # Let go of the sources.
        self._copy_host, self._captures, self._on_host, self._on_device = _nothing, (), (), ()
        self._owners = []
        self._done.set()

    # -- with the lock held -----------------------------------------------------------------------
    def _fence(self) -> None:
        if not self._fenced:
            self._try(lambda: _check(self._on_device))
        for capture in self._captures:
            self._try(capture.fence)
        self._fenced = True

    def _try(self, call: Callable[[], None]) -> None:
        """The first error is the one that the save reports."""
        try:
            call()
        except BaseException as error:
            if self._error is None:
                self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._end()
        self._host_final.set()

    def _undo_all(self) -> None:
        while self._undo:
            self._undo.pop()()


def _check(watches: Sequence[Watch]) -> None:
    for watch in watches:
        if watch.changed():
            raise InvalidInput(
                f"{watch.name}: changed while it was being copied: call pending.before_update() ahead of whatever "
                "changes parameters or optimizer state other than Optimizer.step()",
                kind="changed_while_copied",
            )


def _nothing() -> None:
    pass
