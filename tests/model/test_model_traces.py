"""What the library really does, recorded call by call, is a path of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import lifecycle_rig
import pytest
from lifecycle_rig import Place, Process, named, state_of
from protocol_model import vector as v
from protocol_model.explorer import Explorer
from protocol_model.machine import CODE, STEPS, Event
from protocol_model.transactions import ALREADY_COMMITTED, FENCED, REFUSED
from protocol_model.variant import Fault as Hazard
from protocol_model.variant import Variant

from ckptfmt.engine.keep import gc as collecting
from ckptfmt.errors import BackendError, CkptError
from ckptfmt.format.states import State
from ckptfmt.testing.faults import Fault

OPS = {step.op for step in STEPS if step.op is not None}


@pytest.fixture(autouse=True)
def _record_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle_rig, "CHANGES", lifecycle_rig.CHANGES | {"acquire_launch", "note", "retire"})


def ops_of(*journals: Sequence[tuple[str, str]]) -> list[str]:
    """The recorded calls under the model's names; several deletes of data are one step there."""
    found: list[str] = []
    for journal in journals:
        for op, key in journal:
            name = _op(op, key)
            if name is not None and not (name == "delete data" and found[-1:] == [name]):
                found.append(name)
    assert set(found) <= OPS
    return found


def _op(op: str, key: str) -> str | None:
    if op == "sweep_debris":
        return None  # temporary objects, which nobody can see
    if not key:
        return op
    name = key.rpartition("/")[2]
    kinds = {"COMMIT.json": "COMMIT.json", "RETIRED.json": "RETIRED.json"}
    kind = kinds.get(name) or ("manifest" if name.startswith("manifest-") else "")
    if op == "finish":
        return "finish pack"
    if op == "create":
        return f"create {kind or ('part' if name.endswith('.part.json') else 'hint' if '/commits/' in key else name)}"
    return f"delete {kind or 'data'}" if op == "delete" else None


class Replay:
    """All states in which the model may be after the calls that were recorded."""

    def __init__(self, *actors: str, parent_exists: bool = False, faults: frozenset[Hazard] = frozenset()) -> None:
        variant = Variant("replay", actors, faults, ranks=1, parent_exists=parent_exists)
        self._explorer = Explorer(variant)
        self.states = self._silently({self._explorer.first})

    @staticmethod
    def _visible(event: Event) -> str | None:
        if not event.effect or event.outcome in (FENCED, REFUSED, ALREADY_COMMITTED):
            return None  # a catalog that refuses changes nothing, and is not recorded
        return STEPS[CODE[event.step]].op

    def _silently(self, states: set[bytes]) -> set[bytes]:
        found, waiting = set(states), list(states)
        while waiting:
            for event, raw in self._explorer.successors(waiting.pop()):
                t = bytes(raw)
                if self._visible(event) is None and t not in found:
                    found.add(t)
                    waiting.append(t)
        return found

    def follow(self, ops: Sequence[str]) -> int:
        """Follow the calls; returns how many of them the model can do, in this order."""
        for count, op in enumerate(ops):
            following = {
                bytes(raw)
                for s in self.states
                for event, raw in self._explorer.successors(s)
                if self._visible(event) == op
            }
            if not following:
                return count
            self.states = self._silently(following)
        return len(ops)

    def row_states(self) -> set[tuple[State | None, ...]]:
        return {tuple(v.STATES.get(s[row + v.STATE]) for row in v.ROWS) for s in self.states}


def _save(process: Process, step: int, *, takeover: bool = False) -> BaseException | None:
    checkpointer = process.checkpointer(takeover=takeover)
    pending = checkpointer.save(state_of(step, 50), step=step)
    assert pending is not None
    error = pending.exception()
    if not process.machine.dead.is_set():
        process.catalog._inner.close_launch(checkpointer._context.launch.id)
    return error


SAVE = [
    "begin_save",
    "finish pack",
    "create part",
    "report_rank",
    "create manifest",
    "mark_durable",
    "commit",
    "create COMMIT.json",
    "create hint",
    "set_proven",
]


def test_a_save(place: Place) -> None:
    process = place.open()
    assert _save(process, 1) is None
    ops = ops_of(process.journal)
    assert ops == ["acquire_launch", *SAVE]
    replay = Replay("A.0")
    assert replay.follow(ops[1:]) == len(SAVE)
    assert replay.row_states() == {(None, State.COMMITTED, None)}


@pytest.mark.parametrize("at", range(len(SAVE) - 1))
def test_no_two_steps_of_a_save_may_change_places(at: int) -> None:
    """The replay is no rubber stamp."""
    swapped = [*SAVE[:at], SAVE[at + 1], SAVE[at], *SAVE[at + 2 :]]
    assert Replay("A.0").follow(swapped) == at


@pytest.mark.parametrize("broken", ["part.json", "zst"])
def test_a_save_that_fails(place: Place, broken: str) -> None:
    process = place.open(Fault("create", error=lambda: BackendError("refused"), when=named(broken)))
    assert _save(process, 1) is not None
    ops = ops_of(process.journal)
    assert ops[-1] == "mark_swept"
    assert "abort" in ops
    # The create that was refused is recorded when it arrives; the model knows it as given up.
    ops.remove({"part.json": "create part", "zst": "create manifest"}[broken])
    replay = Replay("A.0")
    assert replay.follow(ops[1:]) == len(ops) - 1
    assert (None, process.row().state, None) in replay.row_states()


def _faults(process: Process, op: str) -> None:
    """Let the process die right after the operation took effect."""
    storage: dict[str, Callable[..., bool]] = {
        "create part": named("part.json"),
        "create manifest": named("zst"),
        "create COMMIT.json": named("COMMIT.json"),
        "create hint": lambda call: "/commits/" in call.key,
    }
    if op in storage:
        process.backend.add(Fault("create", error=process.kill, when=storage[op], timing="after"))
    elif op == "finish pack":
        process.backend.add(Fault("finish", error=process.kill, timing="after"))
    else:
        process.catalog.add(Fault(op, error=process.kill, timing="after"))


@pytest.mark.parametrize("op", SAVE)
@pytest.mark.parametrize("opener", ["takeover", "recover"])
def test_what_settles_a_save_that_died_at_any_step(place: Place, op: str, opener: str) -> None:
    dead = place.open()
    _faults(dead, op)
    _save(dead, 1)
    fresh = place.open()
    if opener == "takeover":
        fresh.checkpointer(takeover=True).close()
        actors = ("B", "prover")
    else:
        holder = fresh.site.sql().live_launch("run")
        assert holder is not None
        fresh.catalog._inner.close_launch(holder.id)  # its lease has lapsed
        fresh.repository.recover()
        actors = ("recover", "prover")
    ops = ops_of(dead.journal, fresh.journal)[1:]
    replay = Replay("A.0", *actors)
    assert replay.follow(ops) == len(ops), ops
    assert (None, fresh.row().state, None) in replay.row_states()
    assert fresh.row().state is (State.ABORTED if op in SAVE[:3] else State.COMMITTED)


def test_an_older_launch_that_wakes_up(place: Place) -> None:
    """It is fenced at C4, and finds that its successor has finished the save."""
    old = place.open()
    fresh = place.open()
    after: list[list[tuple[str, str]]] = []

    def taken_over() -> CkptError:
        fresh.checkpointer(takeover=True).close()
        after.append(list(fresh.journal))
        return BackendError("late")

    old.catalog.add(Fault("mark_durable", error=taken_over, timing="after"))
    assert _save(old, 1) is None
    assert len(after) == 1
    mine = ops_of(old.journal)[1:]
    until = mine.index("mark_durable") + 1
    ops = [*mine[:until], *ops_of(*after), *mine[until:]]
    replay = Replay("A.0", "B", "prover")
    assert replay.follow(ops) == len(ops), ops
    assert (None, State.COMMITTED, None) in replay.row_states()


def test_retire_and_gc(place: Place) -> None:
    first = place.open()
    assert _save(first, 1) is None
    process = place.open()
    assert _save(process, 2) is None
    collecting.retire(process.site, process.rows()[0].id)
    collecting.collect(process.site, dry_run=False, grace=timedelta(0))
    ops = ops_of(process.journal)[1:]
    # gc finds it durable, by the note.
    assert ops.count("create RETIRED.json") == 1
    replay = Replay("A.0", "retire", "gc", parent_exists=True)
    assert replay.follow(ops) == len(ops), ops
    assert (State.DELETED, State.COMMITTED, None) in replay.row_states()


def test_gc_of_what_died(place: Place) -> None:
    dead = place.open()
    _faults(dead, "create part")
    _save(dead, 1)
    fresh = place.open()
    fresh.checkpointer(takeover=True).close()
    collecting.collect(fresh.site, dry_run=False, grace=timedelta(0))
    ops = ops_of(dead.journal, fresh.journal)[1:]
    assert ops[-3:] == ["create COMMIT.json", "delete data", "mark_swept"]
    replay = Replay("A.0", "B", "gc")
    assert replay.follow(ops) == len(ops), ops
    assert (None, State.DELETED, None) in replay.row_states()
