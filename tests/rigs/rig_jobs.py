"""What a process does while its power is cut, and what must be true after the machine is up again.

Each job begins on a disk that ``prepare`` has filled, and ``work`` tells through ``say`` what it was told: a
commit that was reported, a save that was reported as failed, a retirement.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from rig_meter import Change, Meter

import ckptfmt
from ckptfmt.engine.keep import gc
from ckptfmt.errors import CkptError, NotCommitted, SaveFailed
from ckptfmt.format import layout
from ckptfmt.format.states import State
from ckptfmt.repository import Repository

Say = Callable[..., None]
RUN: Final = "run"


class Place:
    """Where the repository of this process lies: its root on the disk, and its catalog if that lies elsewhere."""

    def __init__(self, root: Path, catalog: Path | None = None) -> None:
        self.root = root
        self.catalog = catalog

    def open(self, *, mode: Literal["r", "w"] = "w", proof: bool = False) -> Repository:
        apart = None if self.catalog is None else f"sqlite:///{self.catalog}"
        return ckptfmt.open(self.root, mode=mode, catalog="none" if proof else apart)


def state_of(step: int, numbers: int = 3000) -> dict[str, Any]:
    """A small state, made from ``step`` alone; different steps share no bytes."""
    rng = np.random.default_rng(step)
    return {
        "w": rng.standard_normal(numbers),
        "b": rng.integers(-5, 5, size=17, dtype=np.int32),
        "blob": bytes(rng.integers(0, 256, size=9000, dtype=np.uint8)),
        "step": step,
    }


def differences(found: Any, step: int) -> str | None:
    """What is not as ``state_of(step)`` made it, bit by bit; None if all is."""
    wanted = state_of(step, len(found["w"]))
    if list(found) != list(wanted):
        return f"keys {list(found)}"
    for name in ("w", "b"):
        if found[name].dtype != wanted[name].dtype or found[name].tobytes() != wanted[name].tobytes():
            return f"{name} differs"
    return None if (found["blob"], found["step"]) == (wanted["blob"], step) else "plain values differ"


@dataclass
class Facts:
    """Per run: the steps that must open, and those that must not. Any other may do either."""

    must: dict[str, set[int]] = field(default_factory=dict)
    never: dict[str, set[int]] = field(default_factory=dict)
    by_catalog: dict[str, set[int]] = field(default_factory=dict)
    """Must open by the catalog; their proof may be pending."""
    exists: bool = True
    """The repository has been reported as made."""

    def as_json(self) -> dict[str, Any]:
        steps = {name: getattr(self, name) for name in ("must", "never", "by_catalog")}
        lists = {name: {run: sorted(found) for run, found in runs.items()} for name, runs in steps.items()}
        return {**lists, "exists": self.exists}

    @classmethod
    def of(cls, said: dict[str, Any]) -> Facts:
        steps = {name: {run: set(found) for run, found in said[name].items()} for name in said if name != "exists"}
        return cls(**steps, exists=said["exists"])

    def hear(self, said: dict[str, Any]) -> None:
        """Take in what the process was told before the power went."""
        run, step = said.get("run", RUN), said.get("step", -1)
        if said["what"] == "committed":
            self.must.setdefault(run, set()).add(step)
        elif said["what"] == "failed":
            self.never.setdefault(run, set()).add(step)
        elif said["what"] == "retiring":
            self.must.get(run, set()).discard(step)
        elif said["what"] == "retired":
            self.never.setdefault(run, set()).add(step)
        elif said["what"] == "exists":
            self.exists = True


@dataclass(frozen=True)
class Job:
    name: str
    prepare: Callable[[Place, Callable[[Callable[[], None]], None]], Facts]
    """(place, fork): ``fork`` runs a function in a process that may die."""
    work: Callable[[Place, Say], None]
    calls_min: int
    """How many changes it makes at least: fewer means that the meter has gone blind."""
    apart: bool = False
    """The catalog lies on another disk, which keeps its power: nothing there carries our syncs along."""


def save(repository: Repository, say: Say, *steps: int, run: str = RUN, numbers: int = 3000) -> None:
    with repository.checkpointer(run) as checkpointer:
        for step in steps:
            pending = checkpointer.save(state_of(step, numbers), step=step)
            assert pending is not None
            pending.result()
            say(what="committed", run=run, step=step)


def _silent(**_: Any) -> None:
    pass


def _committed(*steps: int, run: str = RUN) -> Callable[[Place, Any], Facts]:
    def prepare(place: Place, fork: Any) -> Facts:
        with place.open() as repository:
            save(repository, _silent, *steps, run=run)
        return Facts(must={run: set(steps)})

    return prepare


def _nothing(place: Place, fork: Any) -> Facts:
    return Facts(exists=False)


# -- the jobs ---------------------------------------------------------------------------------------
def create(place: Place, say: Say) -> None:
    """A new repository and its first save."""
    with place.open() as repository:
        say(what="exists")
        save(repository, say, 1)


def save_twice(place: Place, say: Say) -> None:
    with place.open() as repository:
        save(repository, say, 2, 3)


def save_large(place: Place, say: Say) -> None:
    """Several writes to one pack, from more than one thread."""
    with place.open() as repository:
        save(repository, say, 2, numbers=2_300_000)


def abort(place: Place, say: Say) -> None:
    """A save that fails after its pack was written: aborted, its space freed; then one that succeeds."""

    def refuse(change: Change) -> None:
        if change.name == "link" and change.path.endswith(layout.part_name(0)) and not refused:
            refused.append(change)
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    refused: list[Change] = []
    _extra.append(refuse)
    with place.open() as repository, repository.checkpointer(RUN) as checkpointer:
        pending = checkpointer.save(state_of(2), step=2)
        assert pending is not None
        try:
            pending.result()
        except SaveFailed:
            say(what="failed", step=2)
        pending = checkpointer.save(state_of(3), step=3)
        assert pending is not None
        pending.result()
        say(what="committed", step=3)


def _prepare_gc(place: Place, fork: Any) -> Facts:
    with place.open() as repository:
        save(repository, _silent, 1, 2, 3)
        gc.retire(repository._connection.site, 1)
    fork(lambda: _die_saving(place, RUN, 4, "ftruncate", ".safetensors"))
    with place.open() as repository:
        repository.recover()
    return Facts(must={RUN: {2, 3}}, never={RUN: {1, 4}})


def collect(place: Place, say: Say) -> None:
    """One generation retired earlier, one now, one aborted with its bytes still there."""
    with place.open() as repository:
        site = repository._connection.site
        say(what="retiring", step=2)
        gc.retire(site, 2)
        say(what="retired", step=2)
        gc.collect(site, dry_run=False, grace=timedelta(0))


def _prepare_recover(place: Place, fork: Any) -> Facts:
    with place.open() as repository:
        save(repository, _silent, 1)
        save(repository, _silent, 1, run="proof")
        save(repository, _silent, 1, run="half")
    fork(lambda: _die_saving(place, RUN, 2, "link", ".json.zst"))
    fork(lambda: _die_saving(place, "proof", 2, "link", layout.COMMIT))
    fork(lambda: _die_saving(place, "half", 2, "ftruncate", ".safetensors"))
    return Facts(must={RUN: {1}, "proof": {1}, "half": {1}}, by_catalog={"proof": {2}}, never={"half": {2}})


def recover(place: Place, say: Say) -> None:
    """One generation whose ranks had all acknowledged, one committed without a proof, one cut short."""
    with place.open() as repository:
        actions = {action.action for action in repository.recover().actions}
        assert actions == {"committed", "proved", "aborted"}, actions
        for run in (RUN, "proof"):
            say(what="committed", run=run, step=2)


def _die_saving(place: Place, run: str, step: int, call: str, suffix: str) -> None:
    def die(change: Change) -> None:
        if change.name == call and change.path.endswith(suffix):
            os._exit(0)

    kept = Meter(die).install()
    with place.open() as repository:
        save(repository, _silent, step, run=run)
    raise AssertionError(f"no {call} of {suffix} in {kept}")


_extra: list[Callable[[Change], None]] = []
"""Faults that a job wants besides the cut."""


def faults_of_job(change: Change) -> None:
    for fault in _extra:
        fault(change)


JOBS: Final = {
    job.name: job
    for job in (
        Job("create", _nothing, create, 150),
        Job("save", _committed(1), save_twice, 150),
        Job("apart", _committed(1), save_twice, 50, apart=True),
        Job("large", _committed(1), save_large, 80),
        Job("abort", _committed(1), abort, 150),
        Job("gc", _prepare_gc, collect, 80),
        Job("recover", _prepare_recover, recover, 80),
    )
}


# -- afterwards -------------------------------------------------------------------------------------
def examine(place: Place, facts: Facts) -> list[str]:
    """Everything that is wrong with the repository after the power came back, by every door; best none."""
    problems: list[str] = []
    if facts.exists or (place.root / layout.MARKER).exists():
        for proof in (False, True):
            with suppress_unmade(facts), place.open(mode="r", proof=proof) as repository:
                problems += _visible(repository, facts, "proof" if proof else "the catalog")
    with place.open() as repository:
        problems += _settled(repository, facts)
    return problems


def suppress_unmade(facts: Facts) -> Any:
    """A repository whose making was cut off can't be read before a writer has finished it."""
    return suppress(*(() if facts.exists else (CkptError,)))


def _visible(repository: Repository, facts: Facts, door: str) -> list[str]:
    problems = []
    by_catalog = door == "the catalog"
    seen: dict[str, set[int]] = {}
    for info in repository.generations():
        generation = repository.generation(info.id) if by_catalog else repository.latest(info.run)
        if not by_catalog and generation.id != info.id:
            generation = _by_id(repository, info.run, info.id)
        seen.setdefault(info.run, set()).add(info.step)
        wrong = differences(generation.load(), info.step)
        if wrong:
            problems.append(f"by {door}: generation {info.id} (step {info.step}): {wrong}")
    for run in {*facts.must, *facts.never}:
        found = seen.get(run, set())
        must = facts.must.get(run, set()) | (facts.by_catalog.get(run, set()) if by_catalog else set())
        if must - found:
            problems.append(f"by {door}: run {run}: steps {must - found} are lost")
        if found & facts.never.get(run, set()):
            problems.append(f"by {door}: run {run}: steps {found & facts.never[run]} are open but must not be")
    if by_catalog:
        problems += _hidden(repository)
    return problems


def _by_id(repository: Repository, run: str, number: int) -> Any:
    from ckptfmt import reading

    return reading.find(repository._connection, run, number)


def _hidden(repository: Repository) -> list[str]:
    problems = []
    for info in repository.generations(state=None):
        if info.state == State.COMMITTED:
            continue
        try:
            repository.generation(info.id)
        except NotCommitted:
            continue
        problems.append(f"generation {info.id} is {info.state} and opens")
    return problems


def _settled(repository: Repository, facts: Facts) -> list[str]:
    """recover finds nothing the second time, gc leaves only tombstones, the next save commits, nothing is lost."""
    problems = []
    repository.recover()
    again = repository.recover().actions
    if again:
        problems.append(f"recover did something the second time: {again}")
    site = repository._connection.site
    rows = site.sql().generations(states=[State.WRITING, State.DURABLE])
    if rows:
        problems.append(f"recover left {[(row.id, row.state) for row in rows]}")
    runs = {RUN, *facts.must}
    for run in runs:
        save(repository, _silent, 77, run=run)
    gc.collect(site, dry_run=False, grace=timedelta(0))
    for row in site.sql().generations(states=[State.ABORTED, State.RETIRED, State.DELETED]):
        names = {info.key.rpartition("/")[2] for info in site.backend.list(f"runs/{row.run_key}/{row.key}")}
        if names - {layout.COMMIT, layout.RETIRED}:
            problems.append(f"gc left {names} of generation {row.id} ({row.state})")
    unknown = gc.unknown_folders(site)
    debris = site.backend.sweep_debris("runs", dry_run=True)
    if unknown or debris:
        problems.append(f"left over: {unknown} {debris}")
    later = Facts(must={run: {77, *facts.must.get(run, ())} for run in runs}, never=facts.never)
    problems += [f"afterwards, {problem}" for problem in _visible(repository, later, "the catalog")]
    return problems
