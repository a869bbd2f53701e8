"""The handle of a save in flight, with the manners of ``concurrent.futures``. Dropping it loses nothing."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptfmt.engine.reports import human_bytes
from ckptfmt.engine.save.deferral import Deferral
from ckptfmt.engine.save.progress import ORDER, Stage
from ckptfmt.errors import InvalidInput
from ckptfmt.ports.records import GenerationRecord

if TYPE_CHECKING:
    from ckptfmt.generation import Generation

log = logging.getLogger("ckptfmt")

Done = Callable[["PendingSave"], object]


class PendingSave:
    """One save. ``key`` is its identity, ``stall_seconds`` the time for which it blocked training on the copy (in
    ``save``, and with a deferred freeze in the update after it), ``busy_seconds`` the time it waited for the save
    before it."""

    def __init__(
        self, *, key: str, step: int, run: str, open_generation: Callable[[GenerationRecord], Generation]
    ) -> None:
        self.key = key
        self.step = step
        self.run = run
        self.stall_seconds = 0.0
        self.busy_seconds = 0.0
        self.generation_id: int | None = None
        self.seconds: float | None = None
        """From the call of ``save`` to the outcome."""
        self._called = time.perf_counter()
        self._pid = os.getpid()
        self._open = open_generation
        self._condition = threading.Condition()
        self._stage: Stage = "freezing"
        self._row: GenerationRecord | None = None
        self._error: BaseException | None = None
        self._observed = False
        self._callbacks: list[Done] = []
        self._deferral: Deferral | None = None

    @property
    def stage(self) -> Stage:
        """``freezing``, ``frozen``, ``staged``, ``durable``, ``committed`` or ``failed``."""
        return self._stage

    def done(self) -> bool:
        """Whether it is committed or has failed."""
        return self._row is not None or self._error is not None

    def wait(self, until: Stage = "committed", timeout: float | None = None) -> None:
        """Block until the save has reached ``until``. Raises its ``SaveFailed``, or ``TimeoutError``."""
        if until not in ORDER:
            raise InvalidInput(f"wait(until={until!r}): give one of {', '.join(ORDER)}")
        self._check_owner()
        goal = ORDER.index(until)
        with self._condition:
            reached = self._condition.wait_for(
                lambda: self._error is not None or ORDER.index(self._stage) >= goal, timeout
            )
            if not reached:
                raise TimeoutError(f"{self!r} has not reached {until!r} within {timeout} s")
        if self._error is not None:
            self._observed = True
            raise self._error

    def result(self, timeout: float | None = None) -> Generation:
        """The committed generation, once it is committed and proven."""
        self.wait("committed", timeout)
        if self._row is None:
            raise AssertionError("committed without a row")
        return self._open(self._row)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The save's error, or None once it is committed. ``TimeoutError`` if it is neither in time."""
        self.wait_done(timeout)
        self._observed = self._observed or self._error is not None
        return self._error

    def add_done_callback(self, fn: Done) -> None:
        """Call ``fn(self)`` when done: from the save's thread, or at once. What it raises is logged."""
        with self._condition:
            if not self.done():
                self._callbacks.append(fn)
                return
        self._call(fn)

    def before_update(self) -> None:
        """Return when everything that is saved may be changed: at once unless ``freeze="deferred"``.

        torch optimizers call it by themselves ahead of each ``step``. Call it before anything else changes their
        parameters or their state: a captured CUDA graph, ``.data``, a view by numpy, ``load_state_dict``. Never raises
        what the save met: that is told by the handle.
        """
        deferral = self._deferral
        if deferral is not None:
            deferral.before_update()
            self.lift()

    # -- the Listener of the save's threads -------------------------------------------------------
    def advance(self, stage: Stage) -> None:
        with self._condition:
            if not self.done() and ORDER.index(stage) > ORDER.index(self._stage):
                self._stage = stage
                self._condition.notify_all()

    def blocked(self, seconds: float) -> None:
        self.stall_seconds += seconds

    def began(self, generation_id: int) -> None:
        self.generation_id = generation_id

    def succeeded(self, row: GenerationRecord) -> None:
        self._finish("committed", row, None)

    def failed(self, error: BaseException) -> None:
        self._finish("failed", None, error)

    def _finish(self, stage: Stage, row: GenerationRecord | None, error: BaseException | None) -> None:
        with self._condition:
            if self.done():
                return
            self._stage, self._row, self._error = stage, row, error
            self.seconds = time.perf_counter() - self._called
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for fn in callbacks:
            self._call(fn)

    def _call(self, fn: Done) -> None:
        try:
            fn(self)
        except Exception:
            log.exception("a done-callback of %r failed", self)

    # -- for the checkpointer ---------------------------------------------------------------------
    def defer(self, deferral: Deferral) -> None:
        """Part of the state is still to be copied."""
        self._deferral = deferral

    def lift(self) -> None:
        """Take the hooks of optimizers away if all is copied; on the thread that updates, between updates."""
        if self._deferral is not None and self._deferral.lift():
            self._deferral = None

    @property
    def row(self) -> GenerationRecord | None:
        return self._row

    @property
    def error(self) -> BaseException | None:
        """The error, without counting as a look at it."""
        return self._error

    def wait_done(self, timeout: float | None = None) -> None:
        """Wait for the outcome without looking at it."""
        self._check_owner()
        with self._condition:
            if not self._condition.wait_for(self.done, timeout):
                raise TimeoutError(f"{self!r} is not done within {timeout} s")

    def _check_owner(self) -> None:
        """A forked child has a copy of the handle, but not the thread that would finish it."""
        if os.getpid() != self._pid and not self.done():
            raise InvalidInput(
                f"{self!r} belongs to process {self._pid}: only there its outcome is known; in a child open the "
                "repository again and look at the catalog"
            )

    def unseen_error(self) -> BaseException | None:
        """The error if nobody has been told of it yet."""
        return None if self._observed else self._error

    def __repr__(self) -> str:
        number = "?" if self.generation_id is None else self.generation_id
        return f"<PendingSave #{number} of run {self.run!r}, step {self.step}, {self._stage}>"


def log_commit(pending: PendingSave, row: GenerationRecord, *, last_step: int | None) -> None:
    """One line for each commit."""
    log.info(
        "%s #%d step %d committed: stall %.0f ms, %s in %.1f s, lag %d steps",
        row.run,
        row.id,
        row.step,
        (row.stall_seconds or 0.0) * 1e3,
        human_bytes(row.nbytes or 0),
        pending.seconds or 0.0,
        0 if last_step is None else max(0, last_step - pending.step),
    )
