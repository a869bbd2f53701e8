"""Cases on the transition table: enumerated from it, through the catalog and by raw SQL."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptfmt.errors import Conflict, NotCommitted
from ckptfmt.format.states import TRANSITIONS, State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import GenerationRecord
from ckptfmt.testing.catalog_job import Job, MakeCatalog, RawSql, require

ORDINARY = {(step.source, step.target) for step in TRANSITIONS if not step.repair}
REPAIRS = {(step.source, step.target) for step in TRANSITIONS if step.repair}
FROZEN = (
    "manifest_digest = 'forged'",
    "manifest_name = 'forged'",
    "manifest_bytes = 1",
    "nbytes = 1",
    "parent_key = 'forged'",
    "tiers = 'forged'",
    "commit_seq = 99",
    "commit_seq = NULL",
    "epoch = 9",
    "commit_fence = 9",
    "committed_at = created_at",
    "\"key\" = 'forged'",
    "step = 99",
    "id = 99",
    "run_id = 99",
    "launch_id = 99",
    "save_number = 99",
    "fence = 99",
)
"""Changes to a committed generation that are refused."""

# Fills in what the checks of the table ask for, so that only the trigger can refuse.
_MOVE = """
UPDATE generations SET state = :target, manifest_name = COALESCE(manifest_name, 'm'),
  manifest_digest = COALESCE(manifest_digest, 'd'), manifest_bytes = COALESCE(manifest_bytes, 1),
  nbytes = COALESCE(nbytes, 1), aborted_at = COALESCE(aborted_at, created_at),
  abort_stage = COALESCE(abort_stage, 's'), abort_reason = COALESCE(abort_reason, 'r')
"""
_COMMIT = """, commit_seq = COALESCE(commit_seq, 77), commit_fence = COALESCE(commit_fence, 1),
  committed_at = COALESCE(committed_at, created_at)"""
_ADOPT = ", adopted_at = created_at, adopted_by = 'operator'"

_CALLS: dict[str, Callable[[Job, GenerationRecord], object]] = {
    "mark_durable": lambda job, g: job.catalog.mark_durable(g.id, job.facts(g), fence=job.fence),
    "commit": lambda job, g: job.catalog.commit(g.id, fence=job.fence),
    "set_proven": lambda job, g: job.catalog.set_proven(g.id),
    "abort": lambda job, g: job.catalog.abort(g.id, stage="s", rank=None, reason="r", fence=job.fence),
    "adopt": lambda job, g: job.catalog.adopt(g.id, job.verdict(g), fence=job.fence),
    "retire": lambda job, g: job.catalog.retire(g.id),
    "mark_swept": lambda job, g: job.catalog.mark_swept(g.id),
    "tag": lambda job, g: job.catalog.tag(g.id, "t"),
    "pin": lambda job, g: job.catalog.pin(g.id, reason="r"),
    "quarantine": lambda job, g: job.catalog.quarantine(g.id, reason="r"),
    "open_reader": lambda job, g: job.catalog.open_reader(g.id, host="h", pid=1, ttl_seconds=9),
}
_AFTER_COMMIT = {"mark_durable", "commit", "set_proven", "retire"}
_SUCCEEDS: dict[State, set[str]] = {
    State.WRITING: {"mark_durable", "abort", "adopt"},
    State.DURABLE: {"mark_durable", "commit", "abort", "adopt"},
    State.COMMITTED: _AFTER_COMMIT | {"tag", "pin", "quarantine", "open_reader"},
    State.ABORTED: {"abort", "adopt", "mark_swept"},
    State.RETIRED: _AFTER_COMMIT | {"mark_swept"},
    State.DELETED: _AFTER_COMMIT | {"mark_swept"},
}
"""Which calls succeed in which state: the transitions of the table, and repeats of those already taken."""


def _raw_move(raw: RawSql, generation: GenerationRecord, target: State, *, adopt: bool = False) -> None:
    commits = target in (State.COMMITTED, State.RETIRED)
    sql = _MOVE + (_COMMIT if commits else "") + (_ADOPT if adopt else "") + " WHERE id = :id"
    raw(sql, {"target": target.value, "id": generation.id})


def _state(catalog: Catalog, generation: GenerationRecord) -> State:
    return require(catalog.generation(generation.id)).state


class TransitionCases:
    """Nothing, not even raw SQL, leaves the table."""

    @pytest.mark.parametrize(("source", "target"), sorted(ORDINARY))
    def test_raw_sql_may_take_an_allowed_step(
        self, make_catalog: MakeCatalog, raw: RawSql, source: State, target: State
    ) -> None:
        job = Job.start(make_catalog())
        generation = job.in_state(source)
        _raw_move(raw, generation, target)
        assert _state(job.catalog, generation) is target

    @pytest.mark.parametrize("source", list(State))
    def test_raw_sql_may_take_no_other_step(self, make_catalog: MakeCatalog, raw: RawSql, source: State) -> None:
        job = Job.start(make_catalog())
        generation = job.in_state(source)
        targets = [target for target in State if target != source and (source, target) not in ORDINARY]
        assert targets
        for target in targets:
            with pytest.raises(Exception, match="does not allow this transition"):
                _raw_move(raw, generation, target)
            if (source, target) not in REPAIRS:
                with pytest.raises(Exception, match="does not allow this transition"):
                    _raw_move(raw, generation, target, adopt=True)
            assert _state(job.catalog, generation) is source

    @pytest.mark.parametrize(("source", "target"), sorted(REPAIRS))
    def test_a_repair_names_its_author_in_the_same_statement(
        self, make_catalog: MakeCatalog, raw: RawSql, source: State, target: State
    ) -> None:
        job = Job.start(make_catalog())
        generation = job.in_state(source)
        _raw_move(raw, generation, target, adopt=True)
        assert _state(job.catalog, generation) is target

    @pytest.mark.parametrize("state", list(State))
    def test_calls_by_state(self, make_catalog: MakeCatalog, state: State) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        generation = job.in_state(state)
        before = catalog.generation(generation.id), catalog.events()
        for name, call in _CALLS.items():
            if name not in _SUCCEEDS[state]:
                with pytest.raises((Conflict, NotCommitted), match=f"generation {generation.id} is |was aborted"):
                    call(job, generation)
                assert (catalog.generation(generation.id), catalog.events()) == before, name
        for name in sorted(_SUCCEEDS[state]):
            other = Job.start(catalog, name)
            generation = other.in_state(state)
            for _ in range(2):
                _CALLS[name](other, generation)

    def test_a_generation_starts_writing(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        job = Job.start(make_catalog())
        job.durable()
        copy = (
            'INSERT INTO generations (repository_id, run_id, launch_id, save_number, "key", step, state, fence,'
            " world_size, epoch, created_at, manifest_name, manifest_digest, manifest_bytes, nbytes)"
            " SELECT repository_id, run_id, launch_id, 99, 'copy', step, :state, fence, world_size, epoch, created_at,"
            " manifest_name, manifest_digest, manifest_bytes, nbytes FROM generations"
        )
        with pytest.raises(Exception, match="starts in state writing"):
            raw(copy, {"state": "durable"})
        raw(copy, {"state": "writing"})
        assert len(job.catalog.generations()) == 2

    def test_rows_are_never_deleted(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        job = Job.start(make_catalog())
        job.aborted()
        for table in ("generations", "events", "runs"):
            with pytest.raises(Exception, match=r"never deleted|append-only"):
                raw(f"DELETE FROM {table}", {})
        with pytest.raises(Exception, match="append-only"):
            raw("UPDATE events SET actor = 'nobody'", {})

    def test_what_was_committed_never_changes(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        job = Job.start(make_catalog())
        for generation in (job.proven(), job.retired(1)):
            for change in FROZEN:
                with pytest.raises(Exception, match="never change"):
                    raw(f"UPDATE generations SET {change} WHERE id = :id", {"id": generation.id})
            assert job.catalog.generation(generation.id) == generation

    def test_counters_never_go_down(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        job = Job.start(make_catalog())
        job.proven()
        for column in ("fence", "next_commit_seq"):
            with pytest.raises(Exception, match="never go down"):
                raw(f"UPDATE runs SET {column} = {column} - 1", {})
            raw(f"UPDATE runs SET {column} = {column} + 1", {})

    def test_ids_are_never_reused(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        generation = job.proven()
        first = catalog.open_reader(generation.id, host="h", pid=1, ttl_seconds=60)
        catalog.close_reader(first)
        assert catalog.open_reader(generation.id, host="h", pid=1, ttl_seconds=60) > first
        ids = [job.aborted(step).id for step in range(3)]
        assert ids == sorted(set(ids))
        assert min(ids) > generation.id
