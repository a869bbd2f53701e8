"""Cases on the save: C1 to C5, repeats, ranks, aborts and adoption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ckptfmt.errors import CatalogBehind, Conflict, Fenced, InvalidInput, NotFound
from ckptfmt.format.states import State
from ckptfmt.ports.records import GenerationRecord, PackRecord
from ckptfmt.testing.catalog_job import Job, MakeCatalog, require


class SaveCases:
    """One generation from begin to proof."""

    def test_a_save_from_begin_to_proof(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=2)
        begun = job.begin(900, tags=["best"])
        assert (begun.state, begun.step, begun.key, begun.save_number) == (State.WRITING, 900, job.key(0), 0)
        assert (begun.run, begun.run_key, begun.launch_token) == ("llama", "llama-key", job.launch.token)
        assert (begun.fence, begun.world_size, begun.tags, begun.commit_seq) == (job.fence, 2, (), None)
        assert begun.deadline == begun.created_at + timedelta(seconds=600)
        for rank in job.ranks:
            job.report(begun.id, rank)
        facts = job.facts(begun, parent_key="parent")
        durable = catalog.mark_durable(begun.id, facts, fence=job.fence)
        assert (durable.state, durable.manifest_digest, durable.manifest_bytes) == (
            State.DURABLE,
            facts.manifest_digest,
            321,
        )
        assert (durable.nbytes, durable.parent_key, durable.stall_seconds) == (987, "parent", 1.25)
        assert durable.durable_at is not None
        committed = catalog.commit(begun.id, fence=job.fence)
        assert (committed.state, committed.commit_seq, committed.commit_fence) == (State.COMMITTED, 1, job.fence)
        assert committed.epoch == catalog.identity().epoch
        assert committed.tags == ("best",)
        assert committed.committed_at is not None
        assert committed.proven_at is None
        proven = catalog.set_proven(begun.id)
        assert proven.proven_at is not None
        assert replace(proven, proven_at=None) == committed
        assert catalog.generation(begun.id) == proven == catalog.generation_by_key(begun.key)
        assert sorted(catalog.packs(begun.id), key=lambda pack: pack.rank) == list(facts.packs)
        kinds = [event.kind for event in catalog.events(generation_id=begun.id)]
        assert kinds == ["begin", "durable", "commit", "tag", "prove"]

    def test_every_call_may_be_repeated(self, make_catalog: MakeCatalog) -> None:
        """The answer to a COMMIT can be lost: the repeat gives the same answer and writes no second event."""
        catalog = make_catalog()
        job = Job.start(catalog)
        begun = job.begin(7)
        again = catalog.begin_save(
            job.launch.id,
            n=0,
            step=7,
            key=job.key(0),
            ranks=[0],
            deadline_seconds=600,
            fence=job.fence,
            token=job.launch.token,
        )
        assert (again.generation, again.created) == (begun, False)
        for _ in range(2):
            job.report(begun.id, 0)
        calls: tuple[Callable[[], GenerationRecord], ...] = (
            lambda: catalog.mark_durable(begun.id, job.facts(begun), fence=job.fence),
            lambda: catalog.commit(begun.id, fence=job.fence),
            lambda: catalog.set_proven(begun.id),
        )
        for call in calls:
            first = call()
            events = catalog.events()
            assert call() == first
            assert catalog.events() == events
        # A late repeat of an earlier call still succeeds, and changes nothing.
        done = catalog.generation(begun.id)
        job.report(begun.id, 0)
        assert catalog.mark_durable(begun.id, job.facts(begun), fence=job.fence) == done
        assert catalog.commit(begun.id, fence=job.fence) == done

    def test_begin_disagreements_are_conflicts(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        job.begin(7)

        def begin(n: int, step: int, key: str) -> None:
            catalog.begin_save(
                job.launch.id,
                n=n,
                step=step,
                key=key,
                ranks=[0],
                deadline_seconds=None,
                fence=1,
                token=job.launch.token,
            )

        with pytest.raises(Conflict, match="step 7"):
            begin(0, 8, job.key(0))
        with pytest.raises(Conflict, match="launch token"):
            begin(0, 7, "other")
        with pytest.raises(Conflict, match="never used twice"):
            begin(1, 8, job.key(0))
        assert len(catalog.generations()) == 1

    def test_begin_refuses_nonsense(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=2)
        known: dict[str, Any] = {"n": 0, "key": "k", "deadline_seconds": None, "fence": 1, "token": job.launch.token}
        for ranks in ([], [0, 0], [2], [-1]):
            with pytest.raises(InvalidInput, match="ranks"):
                catalog.begin_save(job.launch.id, step=0, ranks=ranks, **known)
        with pytest.raises(InvalidInput, match="negative"):
            catalog.begin_save(job.launch.id, step=-1, ranks=[0], **known)
        with pytest.raises(InvalidInput, match="tag"):
            job.begin(tags=[""])
        assert catalog.generations() == []

    def test_a_closed_launch_begins_nothing(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        catalog.close_launch(job.launch.id)
        with pytest.raises(Conflict, match="closed"):
            job.begin()

    def test_who_has_another_token_is_another_launch(self, make_catalog: MakeCatalog) -> None:
        """Its id and its fence were handed out again, by a catalog that was put back from a copy."""
        catalog = make_catalog()
        job = Job.start(catalog)
        with pytest.raises(Fenced, match="is another one now"):
            catalog.begin_save(
                job.launch.id, n=0, step=1, key="k", ranks=[0], deadline_seconds=None, fence=1, token="forgotten"
            )
        with pytest.raises(Fenced, match="is another one now"):
            catalog.skip_save(job.launch.id, n=0, step=1, fence=job.fence, token="forgotten")
        assert catalog.generations() == []
        assert job.begin(1).save_number == 0

    def test_skip_is_remembered(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        for _ in range(2):
            catalog.skip_save(job.launch.id, n=0, step=5, fence=job.fence, token=job.launch.token)
        assert [event.kind for event in catalog.events()].count("skip") == 1
        with pytest.raises(Conflict, match="skip it too"):
            job.begin(5)
        with pytest.raises(Conflict, match="step 5"):
            catalog.skip_save(job.launch.id, n=0, step=6, fence=job.fence, token=job.launch.token)
        begun = job.begin(6)
        with pytest.raises(Conflict, match=f"generation {begun.id}"):
            catalog.skip_save(job.launch.id, n=begun.save_number, step=6, fence=job.fence, token=job.launch.token)

    def test_durable_waits_for_every_rank(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=3)
        begun = job.begin()
        job.report(begun.id, 1)
        catalog.report_rank(begun.id, 2, state="staged")
        with pytest.raises(Conflict, match=r"0 \(writing\), 2 \(staged\)"):
            catalog.mark_durable(begun.id, job.facts(begun), fence=job.fence)
        job.report(begun.id, 0)
        job.report(begun.id, 2)
        assert catalog.mark_durable(begun.id, job.facts(begun), fence=job.fence).state is State.DURABLE
        assert [(rank.rank, rank.state) for rank in catalog.ranks(begun.id)] == [(r, "durable") for r in range(3)]

    def test_durable_waits_for_lower_saves(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        lower, higher = job.durable(1), job.written(2)
        with pytest.raises(Conflict, match=f"generation {lower.id}"):
            catalog.mark_durable(higher.id, job.facts(higher), fence=job.fence)
        catalog.commit(lower.id, fence=job.fence)
        assert catalog.mark_durable(higher.id, job.facts(higher), fence=job.fence).state is State.DURABLE

    def test_durable_again_with_other_facts_is_a_conflict(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        durable = job.durable()
        for change in ({"manifest_digest": "x"}, {"manifest_bytes": 1}, {"parent_key": "p"}, {"nbytes": 0}):
            with pytest.raises(Conflict, match=next(iter(change))):
                catalog.mark_durable(durable.id, replace(job.facts(durable), **change), fence=job.fence)
        assert catalog.generation(durable.id) == durable

    def test_rank_reports(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=2)
        begun = job.begin()
        with pytest.raises(InvalidInput, match="digest"):
            catalog.report_rank(begun.id, 0, state="durable")
        with pytest.raises(InvalidInput, match="error"):
            catalog.report_rank(begun.id, 0, state="failed")
        with pytest.raises(NotFound, match="rank 2"):
            catalog.report_rank(begun.id, 2, state="staged")
        job.report(begun.id, 0)
        with pytest.raises(Conflict, match="two processes"):
            catalog.report_rank(begun.id, 0, state="durable", part_name="p", part_digest="other")
        with pytest.raises(Conflict, match="already"):
            catalog.report_rank(begun.id, 0, state="writing")
        catalog.report_rank(begun.id, 1, state="failed", error="No space left on device")
        first, second = catalog.ranks(begun.id)
        assert (first.state, first.nbytes, first.stall_seconds, first.write_seconds) == ("durable", 1000, 0.25, 2.0)
        assert (second.state, second.error, second.part_digest) == ("failed", "No space left on device", None)
        with pytest.raises(Conflict, match=r"1 \(failed\)"):
            catalog.mark_durable(begun.id, job.facts(begun), fence=job.fence)
        catalog.abort(begun.id, stage="persist", rank=1, reason="No space left", fence=job.fence)
        late = job.begin()
        catalog.abort(late.id, stage="persist", rank=1, reason="No space left", fence=job.fence)
        with pytest.raises(Conflict, match="stop writing"):
            job.report(late.id, 0)

    def test_a_foreign_pack_needs_a_committed_holder(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        owner = job.proven()
        shared = PackRecord(owner.key, "r00000-p000.safetensors", 0, 1000, "header-0")
        second = job.written(1)
        facts = job.facts(second)
        both = replace(facts, packs=(*facts.packs, shared))
        catalog.commit(catalog.mark_durable(second.id, both, fence=job.fence).id, fence=job.fence)
        catalog.set_proven(second.id)
        assert catalog.pack_users(owner.key, shared.name) == [owner.id, second.id]
        catalog.retire(owner.id)
        catalog.mark_swept(owner.id)
        assert catalog.pack_users(owner.key, shared.name) == [second.id]
        third = job.written(2)
        for bad in (replace(shared, name="other"), replace(shared, nbytes=1)):
            with pytest.raises(Conflict, match=r"write the bytes again|never change"):
                catalog.mark_durable(third.id, replace(job.facts(third), packs=(bad,)), fence=job.fence)
        assert require(catalog.generation(third.id)).state is State.WRITING
        with pytest.raises(InvalidInput, match="twice"):
            catalog.mark_durable(third.id, replace(job.facts(third), packs=(shared, shared)), fence=job.fence)

    def test_commit_order_is_the_sequence(self, make_catalog: MakeCatalog) -> None:
        """After a roll-back from 1000 to 900 the next commit is the latest."""
        catalog = make_catalog()
        job = Job.start(catalog)
        for step in (1000, 900, 9, 910):
            job.proven(step)
        assert [generation.commit_seq for generation in catalog.generations()] == [4, 3, 2, 1]
        assert require(catalog.latest("llama")).step == 910
        assert catalog.runs()[0].next_commit_seq == 5

    def test_abort_keeps_the_first_reason(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        aborted = job.aborted()
        assert (aborted.abort_stage, aborted.abort_rank, aborted.abort_reason) == ("persist", 0, "disk full")
        again = catalog.abort(aborted.id, stage="commit", rank=3, reason="other", fence=job.fence)
        assert again == aborted
        with pytest.raises(Conflict, match="disk full"):
            catalog.commit(aborted.id, fence=job.fence)
        with pytest.raises(Conflict, match="disk full"):
            catalog.mark_durable(aborted.id, job.facts(aborted), fence=job.fence)
        with pytest.raises(InvalidInput):
            catalog.abort(aborted.id, stage="", rank=None, reason="x", fence=job.fence)

    def test_committed_is_never_aborted(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        committed = job.committed()
        with pytest.raises(Conflict, match="treat the save as committed"):
            catalog.abort(committed.id, stage="commit", rank=None, reason="timeout", fence=job.fence)
        assert catalog.generation(committed.id) == committed

    def test_anyone_may_abort_after_the_deadline_only(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        endless, patient, late = (job.begin(step, deadline_seconds=d) for step, d in enumerate((None, 600.0, 0.0)))
        for generation in (endless, patient):
            with pytest.raises(Conflict, match=r"no deadline|has until"):
                catalog.abort(generation.id, stage="deadline", rank=None, reason="silent", fence=None)
        gone = catalog.abort(late.id, stage="deadline", rank=0, reason="rank 0 silent", fence=None)
        assert (gone.state, gone.abort_rank) == (State.ABORTED, 0)

    @pytest.mark.parametrize("state", [State.WRITING, State.DURABLE, State.ABORTED])
    def test_adoption_takes_the_verdict_as_it_is(self, make_catalog: MakeCatalog, state: State) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        lost = job.in_state(state)
        verdict = job.verdict(lost)
        adopted = catalog.adopt(lost.id, verdict, fence=job.fence)
        assert adopted.state is State.COMMITTED
        assert (adopted.commit_seq, adopted.committed_at, adopted.commit_fence, adopted.epoch) == (
            verdict.commit_seq,
            verdict.committed_at,
            verdict.commit_fence,
            verdict.epoch,
        )
        assert adopted.manifest_digest == verdict.durable.manifest_digest
        assert adopted.proven_at is not None
        assert len(catalog.packs(lost.id)) == 1
        assert catalog.runs()[0].next_commit_seq == 51
        assert catalog.adopt(lost.id, verdict, fence=job.fence) == adopted
        assert catalog.events()[-1].kind == "adopt"
        for wrong in (replace(verdict, commit_seq=49), replace(verdict, commit_fence=9)):
            with pytest.raises(Conflict, match="commit"):
                catalog.adopt(lost.id, wrong, fence=job.fence)

    def test_adoption_refuses_what_cannot_be(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        committed, aborted = job.committed(), job.aborted(1)
        with pytest.raises(Conflict, match=f"generation {committed.id}"):
            catalog.adopt(aborted.id, job.verdict(aborted, commit_seq=1), fence=job.fence)
        with pytest.raises(CatalogBehind, match="epoch 2"):
            catalog.adopt(aborted.id, job.verdict(aborted, epoch=2), fence=job.fence)
        swept = catalog.mark_swept(aborted.id)
        with pytest.raises(Conflict, match="deleted"):
            catalog.adopt(swept.id, job.verdict(swept), fence=job.fence)

    def test_an_old_adoption_does_not_steal_a_tag(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        for step in range(3):
            job.proven(step)
        lost = job.aborted(3, tags=["best"])
        newer = job.proven(4, tags=["best"])
        job.proven(5)
        catalog.adopt(lost.id, job.verdict(lost, commit_seq=50), fence=job.fence)
        assert require(catalog.tagged("llama", "best")).id == lost.id
        other = job.aborted(6, tags=["best"])
        assert newer.commit_seq is not None
        again = job.proven(7, tags=["best"])
        assert again.commit_seq == 51
        catalog.adopt(other.id, job.verdict(other, commit_seq=49), fence=job.fence)
        assert require(catalog.tagged("llama", "best")).id == again.id

    def test_times_survive_to_the_microsecond(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        lost = job.aborted()
        verdict = job.verdict(lost)
        catalog.adopt(lost.id, verdict, fence=job.fence)
        assert require(make_catalog().generation(lost.id)).committed_at == verdict.committed_at
