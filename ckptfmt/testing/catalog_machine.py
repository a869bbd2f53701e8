"""A state machine against a model: random sequences of calls, compared with twenty lines of Python."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ckptfmt.errors import Conflict, Fenced, NotCommitted
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.testing.catalog_job import Job

_run_numbers = itertools.count()


@dataclass
class Expected:
    """What the model knows of one generation."""

    state: State
    job: Job
    step: int
    commit_seq: int | None = None
    proven: bool = False
    quarantined: bool = False
    tag: bool = False


class CatalogMachine(RuleBasedStateMachine):
    """Subclass with ``catalog`` set. Each example works on a run of its own in that catalog."""

    catalog: Catalog

    @initialize()
    def start(self) -> None:
        self.run = f"machine-{next(_run_numbers)}"
        self.job = Job.start(self.catalog, self.run)
        self.jobs = [self.job]
        self.model: dict[int, Expected] = {}
        self.next_seq = 1

    def pick(self, data: st.DataObject, *states: State) -> tuple[int, Expected] | None:
        ids = [id for id, expected in self.model.items() if expected.state in states]
        if not ids:
            return None
        id = data.draw(st.sampled_from(ids))
        return id, self.model[id]

    @rule(step=st.integers(0, 3), tag=st.booleans())
    def begin(self, step: int, tag: bool) -> None:
        generation = self.job.written(step, tags=["best"] if tag else [])
        self.model[generation.id] = Expected(State.WRITING, self.job, step, tag=tag)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), current=st.booleans())
    def mark_durable(self, data: st.DataObject, current: bool) -> None:
        picked = self.pick(data, State.WRITING)
        if picked is None:
            return
        id, expected = picked
        fence = self.job.fence if current else expected.job.fence
        record = self.catalog.generation(id)
        assert record is not None
        lower = any(
            other.state in (State.WRITING, State.DURABLE) and other.job is expected.job and other_id < id
            for other_id, other in self.model.items()
        )
        try:
            self.catalog.mark_durable(id, expected.job.facts(record), fence=fence)
        except Fenced:
            assert fence != self.job.fence
        except Conflict:
            assert lower
        else:
            assert fence == self.job.fence
            assert not lower
            expected.state = State.DURABLE

    @precondition(lambda self: self.model)
    @rule(data=st.data(), current=st.booleans())
    def commit(self, data: st.DataObject, current: bool) -> None:
        picked = self.pick(data, *State)
        if picked is None:
            return
        id, expected = picked
        fence = self.job.fence if current else expected.job.fence
        try:
            record = self.catalog.commit(id, fence=fence)
        except Fenced:
            assert fence != self.job.fence
        except Conflict:
            assert expected.commit_seq is None
            assert expected.state is not State.DURABLE
        else:
            assert fence == self.job.fence
            if expected.commit_seq is None:
                assert expected.state is State.DURABLE
                expected.state, expected.commit_seq = State.COMMITTED, self.next_seq
                self.next_seq += 1
                if expected.tag:
                    for other in self.model.values():
                        other.tag = other.tag and (other.commit_seq is None or other is expected)
            assert record.commit_seq == expected.commit_seq

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def prove(self, data: st.DataObject) -> None:
        picked = self.pick(data, State.COMMITTED)
        if picked is not None:
            self.catalog.set_proven(picked[0])
            picked[1].proven = True

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        picked = self.pick(data, *State)
        if picked is None:
            return
        id, expected = picked
        try:
            self.catalog.abort(id, stage="persist", rank=None, reason="model", fence=self.job.fence)
        except Conflict:
            assert expected.commit_seq is not None
        else:
            assert expected.commit_seq is None
            if expected.state is not State.DELETED:
                expected.state = State.ABORTED

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        picked = self.pick(data, State.COMMITTED)
        if picked is not None:
            self.catalog.quarantine(picked[0], reason="model")
            picked[1].quarantined = True

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        picked = self.pick(data, *State)
        if picked is None:
            return
        id, expected = picked
        proven = [e for e in self.model.values() if e.state is State.COMMITTED and e.proven]
        keep = max(proven, key=lambda e: (not e.quarantined, e.commit_seq or 0), default=None)
        try:
            self.catalog.retire(id)
        except NotCommitted:
            assert expected.commit_seq is None
        except Conflict:
            assert expected.state is State.COMMITTED
            assert expected is keep or expected.tag or not expected.proven
        else:
            assert expected.commit_seq is not None
            if expected.state is State.COMMITTED:
                assert expected is not keep
                assert expected.proven
                assert not expected.tag
                expected.state = State.RETIRED

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def sweep(self, data: st.DataObject) -> None:
        picked = self.pick(data, *State)
        if picked is None:
            return
        id, expected = picked
        try:
            self.catalog.mark_swept(id)
        except Conflict:
            assert expected.state in (State.WRITING, State.DURABLE, State.COMMITTED)
        else:
            assert expected.state in (State.RETIRED, State.ABORTED, State.DELETED)
            expected.state = State.DELETED

    @rule()
    def take_over(self) -> None:
        self.job = self.job.taken_over()
        self.jobs.append(self.job)

    @invariant()
    def the_catalog_equals_the_model(self) -> None:
        if not hasattr(self, "job"):
            return
        records = self.catalog.generations(run=self.run)
        found = {r.id: (r.state, r.commit_seq, r.step, r.proven_at is not None) for r in records}
        assert found == {id: (e.state, e.commit_seq, e.step, e.proven) for id, e in self.model.items()}
        committed = [
            (e.commit_seq, id)
            for id, e in self.model.items()
            if e.state is State.COMMITTED and not e.quarantined and e.commit_seq is not None
        ]
        latest = self.catalog.latest(self.run)
        assert (latest.id if latest else None) == (max(committed)[1] if committed else None)
        tagged = self.catalog.tagged(self.run, "best")
        holders = [id for id, e in self.model.items() if e.tag and e.commit_seq is not None]
        assert [tagged.id] == holders if tagged else holders == []
        assert self.catalog.runs()[-1].fence >= 1
        events = self.catalog.events(run=self.run)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        moved = dict.fromkeys(self.model, "writing")
        for event in events:
            if event.generation_id is not None and event.to_state is not None and event.from_state is not None:
                assert moved[event.generation_id] == event.from_state
                moved[event.generation_id] = event.to_state
        assert moved == {id: e.state.value for id, e in self.model.items()}


def check_random_sequences(shared: Catalog, *, sequences: int, steps: int) -> None:
    """Make so many sequences of at most ``steps`` calls, each on a run of its own, and compare what they leave."""

    class Machine(CatalogMachine):
        catalog = shared

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
