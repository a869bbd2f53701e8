"""What a process does while it is ended, and what it was told before: the jobs of ``ckptfmt.testing.crash_points``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import numpy as np

from ckptfmt.engine.keep import gc
from ckptfmt.engine.reports import RecoverReport
from ckptfmt.errors import BackendError, CkptError, OutcomeUnknown, SaveFailed
from ckptfmt.format import layout
from ckptfmt.format.states import State
from ckptfmt.pending import PendingSave
from ckptfmt.testing.crash_life import Life, Operation, Place, Strike
from ckptfmt.testing.faults import Fault

__all__ = [
    "ABORT",
    "GC",
    "RECOVER",
    "RUN",
    "TAKEOVER",
    "Scenario",
    "Told",
    "sample_differences",
    "sample_state",
    "saving",
]

RUN: Final = "run"
NEXT_STEP: Final = 77
"""The step that is saved after everything, to see that it can be."""
_PATIENCE: Final = 60.0

Save = tuple[str, int]
"""(run, step)"""


@dataclass
class Told:
    """What a process knows of its saves. A step of a run is saved once.

    Whatever is in none of the sets was begun and may have either end.
    """

    committed: set[Save] = field(default_factory=set)
    """Reported as committed and proven: opens by every door until it is retired."""
    by_catalog: set[Save] = field(default_factory=set)
    """Reported as committed with its proof pending: opens by the catalog."""
    failed: set[Save] = field(default_factory=set)
    """Reported as failed: never opens."""
    retired: set[Save] = field(default_factory=set)
    """Retired, or perhaps: need not open."""
    errors: list[BaseException] = field(default_factory=list)
    """What saves failed with, in the order in which it was heard."""

    def hear(self, pending: PendingSave) -> None:
        """Wait for the outcome of a save, and keep what its handle says."""
        save = (pending.run, pending.step)
        error = pending.exception(timeout=_PATIENCE)
        if error is not None:
            self.errors.append(error)
            if isinstance(error, SaveFailed) and not isinstance(error, OutcomeUnknown):
                self.failed.add(save)
            return
        proven = pending.row is not None and pending.row.proven_at is not None
        (self.committed if proven else self.by_catalog).add(save)

    def hear_recovered(self, report: RecoverReport) -> None:
        """What ``recover`` reports as committed."""
        for action in report.actions:
            if action.action == "committed":
                pending = "its proof is pending" in action.reason
                (self.by_catalog if pending else self.committed).add((action.run, action.step))

    def runs(self) -> set[str]:
        return {RUN, *(run for run, _ in self.committed | self.by_catalog | self.failed | self.retired)}


@dataclass(frozen=True)
class Scenario:
    """``work`` is counted and ended at every call, each time on a copy of the place that ``prepare`` filled."""

    name: str
    prepare: Callable[[Place], Told]
    work: Callable[[Life, Told], None]
    """Hands to ``Told`` what it hears. A ``CkptError`` that leaves it is as if the process had ended with it."""
    state: Callable[[int], Any] = field(default=lambda step: sample_state(step))
    differences: Callable[[Any, int], str | None] = field(default=lambda found, step: sample_differences(found, step))
    """(what was loaded, step) -> what is not as ``state`` made it; None if all is, bit by bit."""
    repair: Callable[[Place], None] = field(default=lambda place: None)
    """What somebody has to do by hand before the place can be opened again, where the scenario needs that."""
    opened: bool = True
    """False: ``work`` opens the place by itself, through what ``Life`` watches."""


def sample_state(step: int, numbers: int = 3000) -> dict[str, Any]:
    """A small state, made from ``step`` alone; different steps share no bytes."""
    rng = np.random.default_rng(step)
    return {
        "w": rng.standard_normal(numbers),
        "b": rng.integers(-5, 5, size=17, dtype=np.int32),
        "nested": [step, {"deep": [1, 2, step]}],
        "blob": bytes(rng.integers(0, 256, size=9000, dtype=np.uint8)),
    }


def sample_differences(found: Any, step: int) -> str | None:
    if list(found) != list(sample_state(0)):
        return f"keys {list(found)}"
    wanted = sample_state(step, len(found["w"]))
    for name in ("w", "b"):
        if found[name].dtype != wanted[name].dtype or found[name].tobytes() != wanted[name].tobytes():
            return f"{name} differs"
    return None if (found["nested"], found["blob"]) == (wanted["nested"], wanted["blob"]) else "plain values differ"


# -- saving -----------------------------------------------------------------------------------------
def saving(
    name: str,
    *steps: int,
    state: Callable[[int], Any] = sample_state,
    differences: Callable[[Any, int], str | None] = sample_differences,
    sync: str | Sequence[str] | None = None,
    change: Callable[[Any, PendingSave], None] = lambda state, pending: None,
    **options: Any,
) -> Scenario:
    """Save ``steps`` (2 and up) after a first one was committed, as many at once as ``in_flight_max`` allows.

    ``options`` are those of ``Repository.checkpointer``. ``change(state, pending)`` goes on with training: it does to
    the state what an update would do.
    """

    def work(life: Life, told: Told) -> None:
        with life.checkpointer(RUN, launch="the-one-that-ends", **options) as checkpointer:
            handles = []
            for step in steps:
                live = state(step)
                with suppress(SaveFailed):  # of the save before: its handle tells it
                    pending = checkpointer.save(live, step=step, sync=sync)
                    assert pending is not None
                    handles.append(pending)
                    change(live, pending)
            for pending in handles:
                told.hear(pending)

    def prepare(place: Place) -> Told:
        return commit(place, Told(), state(1), 1)

    return Scenario(name, prepare, work, state, differences)


def commit(place: Place, told: Told, state: Any, step: int, run: str = RUN) -> Told:
    """Save one step in a process that ends well. Keys are the same each time."""
    life = Life(place)
    with life.checkpointer(run, launch=f"well-{step}") as checkpointer:
        pending = checkpointer.save(state, step=step)
        assert pending is not None
        told.hear(pending)
    life.end()
    assert (run, step) in told.committed
    return told


def leave(place: Place, step: int, op: str, name: str, run: str = RUN, *, durable_only: bool = False) -> None:
    """Save one step in a process that ends just before the call of ``op`` about an object called ``name``, on any of
    the tiers or on the durable one."""
    life = Life(place)

    def kill() -> BaseException:
        life.die()
        return BackendError("this process is dead")

    for backend in life.storage[: 1 if durable_only else None]:
        backend.add(Fault(op, error=kill, when=lambda call: name in call.key.rpartition("/")[2]))
    checkpointer = life.checkpointer(run, launch=f"badly-{step}")
    pending = checkpointer.save(sample_state(step), step=step)
    assert pending is not None
    pending.exception(timeout=_PATIENCE)
    assert life.dead.is_set(), f"no {op} of {name}"
    life.end()


def _refused_part(life: Life, told: Told) -> None:
    """A save that fails after its pack was written: aborted, its space freed; then one that succeeds."""
    life.backend.add(
        Fault(
            "create",
            error=lambda: BackendError("the disk is broken"),
            when=lambda call: call.key.endswith(layout.part_name(0)),
        )
    )
    with life.checkpointer(RUN, launch="the-one-that-ends") as checkpointer:
        for step in (2, 3):
            with suppress(SaveFailed):
                pending = checkpointer.save(sample_state(step), step=step)
                assert pending is not None
                told.hear(pending)


ABORT: Final = Scenario("abort", lambda place: commit(place, Told(), sample_state(1), 1), _refused_part)


# -- keeping ----------------------------------------------------------------------------------------
def _prepare_gc(place: Place) -> Told:
    told = Told()
    for step in (1, 2, 3):
        commit(place, told, sample_state(step), step)
    life = Life(place)
    gc.retire(life.site, life.site.sql().generations(run=RUN)[-1].id)
    life.end()
    _retired(told, 1)
    leave(place, 4, "finish", ".safetensors")
    told.failed.add((RUN, 4))
    life = Life(place)
    life.repository.recover()
    life.end()
    return told


def _retired(told: Told, step: int) -> None:
    told.committed.discard((RUN, step))
    told.retired.add((RUN, step))


def _collect(life: Life, told: Told) -> None:
    """One generation retired earlier, one now, one aborted with its bytes still there."""
    committed = life.site.sql().generations(run=RUN, states=[State.COMMITTED])
    second = next(row for row in committed if row.step == 2)
    _retired(told, 2)
    gc.retire(life.site, second.id)
    gc.collect(life.site, dry_run=False, grace=timedelta(0))


GC: Final = Scenario("gc", _prepare_gc, _collect)


def _prepare_recover(place: Place) -> Told:
    told = Told()
    for run, op, name in _LEFT:
        commit(place, told, sample_state(1), 1, run)
        leave(place, 2, op, name, run)
    told.by_catalog.add(("proof", 2))
    told.failed.add(("half", 2))
    return told


_LEFT: Final = (
    (RUN, "create", "manifest"),
    ("proof", "create", layout.COMMIT),
    ("half", "finish", ".safetensors"),
)
"""One generation whose ranks had all acknowledged, one committed without a proof, one cut short."""


def _recover(life: Life, told: Told) -> None:
    done = life.repository.recover()
    told.hear_recovered(done)
    if any(action.action == "proved" for action in done.actions):
        told.committed.add(("proof", 2))


RECOVER: Final = Scenario("recover", _prepare_recover, _recover)


def _take_over(life: Life, told: Told) -> None:
    """A new launch settles what the older one left, restores the latest and saves."""
    with life.checkpointer(RUN, launch="the-one-that-ends") as checkpointer:
        into = dict.fromkeys(sample_state(0))
        report = checkpointer.restore(into, strict=False)
        assert report is not None
        assert report.step == 2
        told.committed.add((RUN, 2))
        pending = checkpointer.save(sample_state(3), step=3)
        assert pending is not None
        told.hear(pending)


def _prepare_takeover(place: Place) -> Told:
    told = commit(place, Told(), sample_state(1), 1)
    leave(place, 2, "create", "manifest")
    return told


TAKEOVER: Final = Scenario("takeover", _prepare_takeover, _take_over)


# -- overtaken --------------------------------------------------------------------------------------
@dataclass
class Successor:
    """A newer launch that takes the run over, restores and saves while the older one stands at an operation."""

    place: Place
    told: Told = field(default_factory=Told)
    restored: int | None = None
    commits: int = 0
    """Commits of the run when it was done."""
    error: BaseException | None = None

    def strike(self, operation: Operation) -> Strike:
        return Strike(operation, None, self.run)

    def run(self) -> None:
        life = Life(self.place)
        try:
            with life.checkpointer(RUN, takeover=True) as checkpointer:
                into = dict.fromkeys(sample_state(0))
                report = checkpointer.restore(into, strict=False)
                assert report is not None
                self.restored = report.step
                wrong = sample_differences(into, report.step)
                assert wrong is None, wrong
                pending = checkpointer.save(sample_state(10), step=10)
                assert pending is not None
                self.told.hear(pending)
            self.commits = len(life.repository.generations(run=RUN))
        except (CkptError, AssertionError) as error:
            self.error = error
        finally:
            life.end()
