"""Cases on replicas: which packs a tier holds, which generations it holds whole, and what it lacks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from threading import Barrier

import pytest

from ckptfmt.errors import Conflict, InvalidInput, NotFound
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import GenerationRecord, PackRecord, ReplicaPack
from ckptfmt.testing.catalog_job import COPY, OTHER_REPOSITORY, Job, MakeCatalog, RawSql, require
from ckptfmt.testing.catalog_repair import plan_of, proven

SECOND = "6f0f6f1c-9f0e-4b55-8c0f-0000000000c2"
PACK = "r00000-p000.safetensors"


def known(catalog: Catalog) -> None:
    """Two replicas."""
    catalog.ensure_tier(COPY, role="replica", url="s3://copy/ckpts", host=None)
    catalog.ensure_tier(SECOND, role="replica", url="/mnt/copy", host=None)


def sharing(job: Job, owner: GenerationRecord, step: int = 1) -> GenerationRecord:
    """A proven generation that has a pack of its own, and refers to the first of ``owner``."""
    written = job.written(step)
    facts = job.facts(written)
    facts = replace(facts, packs=(*facts.packs, PackRecord(owner.key, PACK, 0, 1000, "header-0")))
    job.catalog.commit(job.catalog.mark_durable(written.id, facts, fence=job.fence).id, fence=job.fence)
    return job.catalog.set_proven(written.id)


class ReplicaCases:
    """What copying between tiers asks of a catalog."""

    def test_packs_of_a_tier_are_noted(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        known(catalog)
        job = Job.start(catalog, world_size=2)
        generation = job.durable()
        events = catalog.events()
        first, second = (pack.name for pack in catalog.packs(generation.id))
        catalog.note_replicas(generation.id, COPY, [ReplicaPack(generation.key, second, second)])
        catalog.note_replicas(generation.id, SECOND, [ReplicaPack(generation.key, first, first)])
        one, other = catalog.replicas(generation.id)
        assert (one.generation_key, one.pack, one.tier, one.name, one.nbytes) == (
            generation.key,
            second,
            COPY,
            second,
            1001,
        )
        assert (other.pack, other.tier, other.nbytes) == (first, SECOND, 1000)
        assert one.verified_at >= generation.created_at
        # Verified again, and repaired.
        both = [ReplicaPack(generation.key, first, first), ReplicaPack(generation.key, second, "other")]
        for _ in range(2):
            catalog.note_replicas(generation.id, COPY, both)
        rows = catalog.replicas(generation.id)
        assert [(row.tier, row.pack, row.name) for row in rows] == [
            (COPY, first, first),
            (COPY, second, "other"),
            (SECOND, first, first),
        ]
        assert rows[1].verified_at > one.verified_at
        assert rows[2] == other
        assert catalog.events() == events
        assert make_catalog(repository=OTHER_REPOSITORY).replicas(generation.id) == []
        assert make_catalog(mode="r").replicas(generation.id) == rows

    def test_what_cannot_be_noted(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        known(catalog)
        job = Job.start(catalog)
        generation, elsewhere = job.proven(), job.proven(1)
        pack = ReplicaPack(generation.key, PACK, PACK)
        for bad, tier, kind in (
            ([replace(pack, pack="absent")], COPY, NotFound),
            ([pack, replace(pack, generation_key=elsewhere.key)], COPY, NotFound),
            ([pack, replace(pack, name="twice")], COPY, InvalidInput),
            ([pack], "unknown", NotFound),
        ):
            with pytest.raises(kind):
                catalog.note_replicas(generation.id, tier, bad)
            assert catalog.replicas(generation.id) == []
        with pytest.raises(NotFound):
            catalog.note_replicas(10**6, COPY, [pack])
        with pytest.raises(NotFound):
            make_catalog(repository=OTHER_REPOSITORY).note_replicas(generation.id, COPY, [pack])
        catalog.note_replicas(generation.id, COPY, [])

    @pytest.mark.parametrize("state", list(State))
    def test_by_state(self, make_catalog: MakeCatalog, raw: RawSql, state: State) -> None:
        """Packs are noted of what is durable or committed, and a tier holds committed generations whole."""
        catalog = make_catalog()
        known(catalog)
        job = Job.start(catalog)
        generation = job.in_state(state)
        packs = [ReplicaPack(pack.generation_key, pack.name, pack.name) for pack in catalog.packs(generation.id)]
        copied = """INSERT INTO replicas (pack_id, tier_id, name, verified_at)
            SELECT p.id, t.id, p.name, p_at.created_at FROM packs AS p, tiers AS t, repositories AS p_at
            WHERE p.generation_key = :key AND t.uuid = :tier AND p_at.id = p.repository_id"""
        whole = """INSERT INTO replicated_generations (generation_id, tier_id, replicated_at)
            SELECT :id, t.id, t.created_at FROM tiers AS t WHERE t.uuid = :tier"""
        if state in (State.DURABLE, State.COMMITTED):
            catalog.note_replicas(generation.id, COPY, packs)
            assert len(catalog.replicas(generation.id)) == 1
            raw(copied, {"key": generation.key, "tier": SECOND})
        else:
            with pytest.raises(Conflict, match=f"generation {generation.id} is {state}") as refused:
                catalog.note_replicas(generation.id, COPY, packs)
            assert refused.value.kind == "not_kept"
            if packs:
                with pytest.raises(Exception, match="durable or committed"):
                    raw(copied, {"key": generation.key, "tier": SECOND})
        if state is State.COMMITTED:
            catalog.mark_replicated(generation.id, COPY)
            raw(whole, {"id": generation.id, "tier": SECOND})
        else:
            with pytest.raises(Conflict, match=f"generation {generation.id} is {state}"):
                catalog.mark_replicated(generation.id, COPY)
            with pytest.raises(Exception, match="holds a committed generation whole once it holds its packs"):
                raw(whole, {"id": generation.id, "tier": SECOND})

    def test_a_generation_is_whole_once_its_packs_are_there(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        catalog = make_catalog()
        known(catalog)
        job = Job.start(catalog, world_size=2)
        generation = job.proven()
        catalog.note_replicas(generation.id, COPY, [ReplicaPack(generation.key, PACK, PACK)])
        with pytest.raises(Conflict, match=r"pack r00001-p000\.safetensors was not noted") as refused:
            catalog.mark_replicated(generation.id, COPY)
        assert refused.value.kind == "replica_incomplete"
        assert catalog.unreplicated("llama", COPY) == [generation]
        job.noted(generation)
        for _ in range(2):
            catalog.mark_replicated(generation.id, COPY)
        told = [event.detail for event in catalog.events(generation_id=generation.id) if event.kind == "replicate"]
        assert told == [{"tier": COPY}]
        assert catalog.unreplicated("llama", COPY) == []
        for sql, message in (
            ("DELETE FROM replicas", "a tier that holds a generation whole holds its packs"),
            ("UPDATE replicas SET tier_id = tier_id + 1", "never change"),
            ("UPDATE replicated_generations SET tier_id = tier_id + 1", "never change"),
        ):
            with pytest.raises(Exception, match=message):
                raw(sql, {})
        raw("DELETE FROM replicated_generations", {})
        raw("DELETE FROM replicas", {})

    def test_what_a_tier_lacks_comes_oldest_commit_first(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        known(catalog)
        job = Job.start(catalog)
        steps = (1000, 900, 910, 920)
        first, second, third, fourth = (job.proven(step) for step in steps)
        Job.start(catalog, "gpt").proven()
        job.durable(930)
        job.replicated(second)
        job.noted(third)
        catalog.quarantine(fourth.id, reason="damaged")
        assert [row.step for row in catalog.unreplicated("llama", COPY)] == [1000, 910]
        assert [row.step for row in catalog.unreplicated("llama", SECOND)] == [1000, 900, 910]
        assert catalog.unreplicated("llama", COPY)[0] == first
        assert catalog.unreplicated("none", COPY) == []
        assert len(catalog.unreplicated("llama", "unknown")) == 3

    # -- what is gone --------------------------------------------------------------------------
    def test_dropped_packs_are_no_longer_there(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        known(catalog)
        job = Job.start(catalog, world_size=2)
        generation = job.replicated(job.replicated(job.proven()), SECOND)
        for _ in range(2):
            catalog.drop_replicas(generation.id, COPY, packs=[PACK, "absent"])
        assert [(row.tier, row.pack[:6]) for row in catalog.replicas(generation.id)] == [
            (COPY, "r00001"),
            (SECOND, "r00000"),
            (SECOND, "r00001"),
        ]
        assert catalog.unreplicated("llama", COPY) == [generation]
        assert catalog.unreplicated("llama", SECOND) == []
        for _ in range(2):
            catalog.drop_replicas(generation.id, SECOND)
        assert [row.tier for row in catalog.replicas(generation.id)] == [COPY]
        told = [event.detail for event in catalog.events(generation_id=generation.id) if event.kind == "drop"]
        assert told == [{"tier": COPY, "packs": 1}, {"tier": SECOND, "packs": 2}]
        with pytest.raises(NotFound):
            catalog.drop_replicas(generation.id, "unknown")
        with pytest.raises(NotFound):
            make_catalog(repository=OTHER_REPOSITORY).drop_replicas(generation.id, COPY)

    def test_a_pack_of_two_generations(self, make_catalog: MakeCatalog) -> None:
        """It is one row of a tier; without it neither generation is whole there."""
        catalog = make_catalog()
        known(catalog)
        job = Job.start(catalog)
        owner = job.proven()
        second = sharing(job, owner)
        job.replicated(owner)
        own = ReplicaPack(second.key, PACK, PACK)
        catalog.note_replicas(second.id, COPY, [own])
        catalog.mark_replicated(second.id, COPY)
        assert len(catalog.replicas(second.id)) == 2
        assert len(catalog.replicas(owner.id)) == 1
        catalog.drop_replicas(owner.id, COPY, packs=[PACK])
        assert [row.id for row in catalog.unreplicated("llama", COPY)] == [owner.id, second.id]
        assert [row.generation_key for row in catalog.replicas(second.id)] == [second.key]
        # The owner may be gone where the pack is not.
        catalog.mark_swept(catalog.retire(owner.id).id)
        catalog.note_replicas(second.id, COPY, [ReplicaPack(owner.key, PACK, "elsewhere"), own])
        catalog.mark_replicated(second.id, COPY)
        assert [row.name for row in catalog.replicas(owner.id)] == ["elsewhere"]
        assert catalog.unreplicated("llama", COPY) == []

    def test_what_gc_has_not_removed_from_a_tier_is_known(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        known(catalog)
        job = Job.start(catalog)
        generation = job.replicated(job.proven())
        job.proven(1)
        catalog.mark_swept(catalog.retire(generation.id).id)
        assert [row.tier for row in catalog.replicas(generation.id)] == [COPY]
        catalog.drop_replicas(generation.id, COPY)
        assert catalog.replicas(generation.id) == []

    def test_a_generation_without_packs_is_whole_when_it_is_said(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        known(catalog)
        job = Job.start(catalog)
        written = job.written()
        facts = replace(job.facts(written), packs=())
        generation = catalog.commit(catalog.mark_durable(written.id, facts, fence=job.fence).id, fence=job.fence)
        assert catalog.unreplicated("llama", COPY) == [generation]
        catalog.mark_replicated(generation.id, COPY)
        assert catalog.unreplicated("llama", COPY) == []
        catalog.drop_replicas(generation.id, COPY)
        assert catalog.unreplicated("llama", COPY) == [generation]

    def test_packs_of_many_ranks(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        known(catalog)
        job = Job.start(catalog, world_size=1200)
        generation = job.replicated(job.proven())
        assert len(catalog.replicas(generation.id)) == 1200
        (lag, _) = catalog.view("replica_lag")
        assert (lag["generations_behind"], lag["bytes_behind"]) == (0, 0)
        catalog.drop_replicas(generation.id, COPY)
        assert catalog.replicas(generation.id) == []

    def test_many_copy_to_one_tier_at_once(self, make_catalog: MakeCatalog) -> None:
        """Whoever comes first makes the tier known; ranks of one generation note their packs beside each other."""
        catalog = make_catalog()
        job = Job.start(catalog, world_size=4)
        shared = job.proven()
        barrier = Barrier(4)

        def work(rank: int) -> int:
            mine = make_catalog()
            other = Job.start(mine, f"run-{rank}")
            barrier.wait(30)
            tier = mine.ensure_tier(COPY, role="replica", url=f"s3://copy/{rank}", host=None)
            name = f"r{rank:05d}-p000.safetensors"
            for step in range(3):
                other.replicated(other.proven(step))
                mine.note_replicas(shared.id, COPY, [ReplicaPack(shared.key, name, name)])
            return tier.id

        with ThreadPoolExecutor(4) as pool:
            (id,) = set(pool.map(work, range(4)))
        assert [tier.id for tier in catalog.tiers()] == [id]
        catalog.mark_replicated(shared.id, COPY)
        assert {row["generations_behind"] for row in catalog.view("replica_lag")} == {0}
        assert len(catalog.view("replica_lag")) == 5

    # -- what it lacks -------------------------------------------------------------------------
    def test_view_replica_lag(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        assert catalog.view("replica_lag") == []
        known(catalog)
        catalog.ensure_tier("a-stage", role="stage", url="/nvme", host="node1")
        empty, _ = catalog.view("replica_lag")
        assert (empty["run"], empty["tier"], empty["url"]) == ("llama", COPY, "s3://copy/ckpts")
        assert (empty["newest_step"], empty["replicated_step"], empty["seconds_behind"]) == (None, None, None)
        assert (empty["generations_behind"], empty["bytes_behind"]) == (0, 0)
        owner = job.proven(1000)
        second, third = sharing(job, owner, 900), job.proven(910)
        hour = {"at": third.created_at - timedelta(hours=1), "id": owner.id}
        with pytest.raises(Exception, match="never changes"):
            raw("UPDATE generations SET committed_at = :at WHERE id = :id", hour)
        behind, alike = catalog.view("replica_lag")
        assert {**alike, "tier": COPY, "url": behind["url"], "seconds_behind": behind["seconds_behind"]} == behind
        assert (behind["newest_generation_id"], behind["newest_step"]) == (third.id, 910)
        assert (behind["generations_behind"], behind["bytes_behind"]) == (3, 3000), "the shared pack counts once"
        job.replicated(owner)
        job.noted(second)
        lag, other = catalog.view("replica_lag", run="llama")
        assert (lag["replicated_generation_id"], lag["replicated_step"]) == (owner.id, 1000)
        assert (lag["generations_behind"], lag["bytes_behind"]) == (2, 1000)
        assert 0 <= lag["seconds_behind"] <= other["seconds_behind"] < 60
        # A hole is behind, however new the newest is.
        job.replicated(third)
        (lag, _) = catalog.view("replica_lag")
        assert (lag["replicated_step"], lag["generations_behind"], lag["bytes_behind"]) == (910, 1, 0)
        assert lag["seconds_behind"] >= 0
        catalog.mark_replicated(second.id, COPY)
        (lag, other) = catalog.view("replica_lag")
        assert (lag["generations_behind"], lag["seconds_behind"], other["generations_behind"]) == (0, None, 3)
        catalog.forget_tier(SECOND)
        job.proven(920)
        catalog.quarantine(third.id, reason="damaged")
        (lag,) = catalog.view("replica_lag")
        assert (lag["newest_step"], lag["replicated_step"], lag["generations_behind"]) == (920, 900, 1)

    # -- after a loss --------------------------------------------------------------------------
    def test_a_merge_keeps_what_tiers_hold(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        known(catalog)
        job = Job.start(catalog)
        kept = job.replicated(job.proven(1))
        before = catalog.tiers(), catalog.replicas(kept.id)
        catalog.restore(plan_of(catalog, proven(kept.id, 1, key=kept.key), proven(40, 7)))
        assert (catalog.tiers(), catalog.replicas(kept.id)) == before
        assert [row.id for row in catalog.unreplicated("llama", COPY)] == [40]

    def test_after_a_rebuild_tiers_are_found_again(self, make_catalog: MakeCatalog) -> None:
        """The verdict tells which tiers held all packs; what is there now, whoever compares the bytes."""
        catalog = make_catalog()
        one = proven(5, 2)
        assert one.adoption is not None
        durable = replace(one.adoption.durable, tiers=(COPY,))
        catalog.restore(plan_of(catalog, replace(one, adoption=replace(one.adoption, durable=durable))))
        assert require(catalog.generation(5)).tiers == (COPY,)
        assert (catalog.tiers(), catalog.replicas(5)) == ([], [])
        known(catalog)
        lag, _ = catalog.view("replica_lag")
        assert (lag["newest_generation_id"], lag["generations_behind"], lag["bytes_behind"]) == (5, 1, 1000)
        catalog.note_replicas(5, COPY, [ReplicaPack(one.key, "p", "p")])
        catalog.mark_replicated(5, COPY)
        assert catalog.unreplicated("llama", COPY) == []
