"""Cases on tiers: what ranks report of stages, which tiers there are, and how much is held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptfmt.errors import Conflict, InvalidInput, NotFound
from ckptfmt.ports.records import PackRecord, RankReport
from ckptfmt.testing.catalog_job import COPY, OTHER_REPOSITORY, Job, MakeCatalog, RawSql, require

STAGE = "6f0f6f1c-9f0e-4b55-8c0f-0000000000a1"


class TierCases:
    """What saving through a stage asks of a catalog."""

    # -- tiers ---------------------------------------------------------------------------------
    def test_a_tier_is_noted_once(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        stage = catalog.ensure_tier(STAGE, role="stage", url="/nvme/ckpts", host="node1")
        copy = catalog.ensure_tier(COPY, role="replica", url="s3://copy", host=None)
        assert (stage.uuid, stage.role, stage.url, stage.host) == (STAGE, "stage", "/nvme/ckpts", "node1")
        assert catalog.ensure_tier(STAGE, role="stage", url="/nvme/ckpts", host="node1") == stage
        moved = catalog.ensure_tier(COPY, role="replica", url="s3://elsewhere", host=None)
        assert moved == replace(copy, url="s3://elsewhere")
        assert catalog.tiers() == [stage, moved]
        assert make_catalog(repository=OTHER_REPOSITORY).tiers() == []
        other = make_catalog(repository=OTHER_REPOSITORY).ensure_tier(COPY, role="replica", url="x", host=None)
        assert (other.uuid, other.id == copy.id) == (COPY, False)
        assert make_catalog(mode="r").tiers() == [stage, moved]

    def test_a_tier_keeps_role_and_host(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        stage = catalog.ensure_tier(STAGE, role="stage", url="/nvme", host="node1")
        with pytest.raises(Conflict, match=f"{STAGE}.*stage of host node1, not as a stage of host node2") as refused:
            catalog.ensure_tier(STAGE, role="stage", url="/nvme", host="node2")
        assert refused.value.kind == "tier_differs"
        with pytest.raises(Conflict, match="not as a replica"):
            catalog.ensure_tier(STAGE, role="replica", url="/nvme", host="node1")
        with pytest.raises(InvalidInput, match="host"):
            catalog.ensure_tier(COPY, role="stage", url="/nvme", host=None)
        assert catalog.tiers() == [stage]

    def test_a_forgotten_tier_held_nothing(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        done = job.replicated(job.proven())
        assert len(catalog.replicas(done.id)) == 1
        for _ in range(2):
            catalog.forget_tier(COPY)
        assert (catalog.tiers(), catalog.replicas(done.id), catalog.view("replica_lag")) == ([], [], [])
        with pytest.raises(NotFound, match=COPY):
            catalog.mark_replicated(done.id, COPY)
        again = catalog.ensure_tier(COPY, role="replica", url="s3://copy/ckpts", host=None)
        assert catalog.tiers() == [again]
        assert catalog.replicas(done.id) == []
        assert catalog.unreplicated("llama", COPY) == [require(catalog.generation(done.id))]
        with pytest.raises(NotFound, match="no tier"):
            catalog.forget_tier(STAGE)
        with pytest.raises(NotFound):
            make_catalog(repository=OTHER_REPOSITORY).forget_tier(COPY)

    def test_raw_sql_keeps_tiers_as_they_are(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        catalog = make_catalog()
        tier = catalog.ensure_tier(COPY, role="replica", url="s3://copy", host=None)
        for change in ("uuid = 'x'", "role = 'durable'", "host = 'node1'", "repository_id = 99", "id = 99"):
            with pytest.raises(Exception, match="uuid, role and host of a tier never change"):
                raw(f"UPDATE tiers SET {change}", {})
        with pytest.raises(Exception, match="never deleted"):
            raw("DELETE FROM tiers", {})
        columns = "repository_id, uuid, role, url, host, created_at"
        for role, host in (("cache", "node1"), ("stage", None)):
            values = {"role": role, "host": host}
            copy = (
                f"INSERT INTO tiers ({columns}) SELECT repository_id, 'new', :role, url, :host, created_at FROM tiers"
            )
            with pytest.raises(Exception, match="ck_tiers_"):
                raw(copy, values)
        assert catalog.tiers() == [tier]

    # -- ranks that stage ----------------------------------------------------------------------
    def test_staged_and_durable_are_two_moments(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=2)
        begun = job.begin()
        told = RankReport(0, "staged", nbytes=1000, staged_tier=STAGE, staged_bytes=1010, staged_seconds=0.25)
        catalog.report_ranks(begun.id, [told])
        first, other = catalog.ranks(begun.id)
        assert (first.state, first.staged_tier, first.staged_bytes, first.staged_seconds) == (
            "staged",
            STAGE,
            1010,
            0.25,
        )
        assert first.staged_at == first.updated_at
        assert (first.durable_at, first.replicated_bytes) == (None, None)
        assert (other.staged_at, other.staged_tier, other.staged_bytes) == (None, None, None)
        catalog.report_rank(begun.id, 0, state="staged", replicated_bytes=400)
        again = catalog.ranks(begun.id)[0]
        assert again.updated_at > first.updated_at
        assert replace(again, updated_at=first.updated_at, replicated_bytes=None) == first
        # Staged acknowledges nothing.
        job.report(begun.id, 1)
        with pytest.raises(Conflict, match=r"waits for ranks 0 \(staged\)") as waiting:
            catalog.mark_durable(begun.id, job.facts(begun), fence=job.fence)
        assert waiting.value.kind == "ranks_missing"
        job.report(begun.id, 0)
        last, direct = catalog.ranks(begun.id)
        assert (last.state, last.staged_at, last.staged_tier) == ("durable", first.staged_at, STAGE)
        assert (last.staged_bytes, last.replicated_bytes) == (1010, 400)
        assert last.durable_at == last.updated_at
        assert (direct.staged_at, direct.durable_at) == (None, direct.updated_at)
        job.report(begun.id, 0)
        assert catalog.ranks(begun.id)[0] == last

    def test_a_rank_may_tell_all_at_once(self, make_catalog: MakeCatalog) -> None:
        """Where one process reports for all, what was staged is told with the acknowledgement."""
        catalog = make_catalog()
        job = Job.start(catalog)
        begun = job.begin()
        report = RankReport(0, "durable", "r00000.part.json", "d")
        catalog.report_ranks(begun.id, [replace(report, staged_tier=STAGE, staged_bytes=5, staged_seconds=0.5)])
        (row,) = catalog.ranks(begun.id)
        assert (row.staged_tier, row.staged_bytes, row.staged_seconds, row.staged_at) == (STAGE, 5, 0.5, None)
        assert row.durable_at is not None

    def test_progress_never_goes_back(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=2)
        begun = job.begin()
        events = catalog.events()
        catalog.report_rank(begun.id, 0, state="staged", staged_bytes=900)
        before = catalog.ranks(begun.id)[0]
        for nbytes, kept in ((0, 0), (500, 500), (300, 500), (2**40, 2**40)):
            catalog.report_progress(begun.id, 0, nbytes)
            assert catalog.ranks(begun.id)[0].replicated_bytes == kept
        after = catalog.ranks(begun.id)[0]
        assert after.updated_at > before.updated_at
        assert replace(after, updated_at=before.updated_at, replicated_bytes=None) == before
        catalog.report_rank(begun.id, 0, state="staged", replicated_bytes=7)
        assert catalog.ranks(begun.id)[0].replicated_bytes == 2**40
        job.report(begun.id, 0)
        ended = catalog.ranks(begun.id)[0]
        catalog.report_progress(begun.id, 0, 2**41)
        assert catalog.ranks(begun.id)[0] == ended
        assert catalog.events() == events
        with pytest.raises(NotFound, match="rank 2"):
            catalog.report_progress(begun.id, 2, 1)
        with pytest.raises(NotFound):
            make_catalog(repository=OTHER_REPOSITORY).report_progress(begun.id, 1, 1)
        catalog.abort(begun.id, stage="persist", rank=1, reason="silent", fence=job.fence)
        catalog.report_progress(begun.id, 0, 2**41)  # it has ended, and need not stop
        with pytest.raises(Conflict, match="must stop") as refused:
            catalog.report_progress(begun.id, 1, 1)
        assert refused.value.kind == "not_writing"

    # -- the verdict names tiers ---------------------------------------------------------------
    def test_the_row_names_the_tiers_that_held_all_packs(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        written = job.written()
        facts = replace(job.facts(written), tiers=[STAGE, COPY, COPY])
        done = catalog.mark_durable(written.id, facts, fence=job.fence)
        assert done.tiers == (STAGE, COPY)
        assert catalog.mark_durable(written.id, replace(facts, tiers=(COPY, STAGE)), fence=job.fence) == done
        with pytest.raises(Conflict, match="tiers") as refused:
            catalog.mark_durable(written.id, replace(facts, tiers=()), fence=job.fence)
        assert refused.value.kind == "facts_differ"
        assert catalog.commit(done.id, fence=job.fence).tiers == (STAGE, COPY)
        assert job.durable(1).tiers == ()
        lost = job.aborted(2)
        verdict = job.verdict(lost)
        verdict = replace(verdict, durable=replace(verdict.durable, tiers=(COPY,)))
        assert catalog.adopt(lost.id, verdict, fence=job.fence).tiers == (COPY,)

    # -- how much is held ----------------------------------------------------------------------
    def test_bytes_held(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        assert catalog.bytes_held() == 0
        job = Job.start(catalog, world_size=2)
        owner = job.proven()
        shared = PackRecord(owner.key, "r00000-p000.safetensors", 0, 1000, "header-0")
        written = job.written(1)
        facts = replace(job.facts(written), packs=(*job.facts(written).packs, shared))
        catalog.commit(catalog.mark_durable(written.id, facts, fence=job.fence).id, fence=job.fence)
        catalog.set_proven(written.id)
        assert catalog.bytes_held() == catalog.bytes_held("llama") == 2 * 2001
        job.durable(2)
        other = Job.start(catalog, "gpt")
        other.proven()
        assert (catalog.bytes_held(), catalog.bytes_held("llama")) == (3 * 2001 + 1000, 3 * 2001)
        assert (catalog.bytes_held("gpt"), catalog.bytes_held("none")) == (1000, 0)
        assert make_catalog(repository=OTHER_REPOSITORY).bytes_held() == 0
        # What retention has not removed yet is held; what another generation needs is held after that, too.
        catalog.mark_swept(catalog.retire(owner.id).id)
        assert catalog.bytes_held("llama") == 2 * 2001 + 1000

    def test_a_claim_counts_before_a_byte_is_written(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=2)
        begun = job.begin()
        assert catalog.bytes_held() == 0
        catalog.report_rank(begun.id, 0, state="writing", nbytes=700)
        catalog.report_rank(begun.id, 1, state="staged", staged_bytes=50)
        assert catalog.bytes_held("llama") == 750
        catalog.report_rank(begun.id, 1, state="failed", nbytes=0, error="no room for 50 bytes")
        assert catalog.bytes_held() == 700
        catalog.abort(begun.id, stage="begin", rank=1, reason="no room", fence=job.fence)
        assert catalog.bytes_held() == 700, "until gc has removed what is there"
        catalog.mark_swept(begun.id)
        assert catalog.bytes_held() == 0
