"""Cases on what may go and what must stay."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ckptfmt.errors import Conflict, InvalidInput, NotCommitted, NotFound
from ckptfmt.format.states import State
from ckptfmt.testing.catalog_job import OTHER_REPOSITORY, Job, MakeCatalog, RawSql, require


class RetentionCases:
    """Retire, sweep, tags, pins, readers, quarantine."""

    def test_retire_then_sweep(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        old, new = job.proven(1), job.proven(2)
        retired = catalog.retire(old.id, fence=job.fence)
        assert retired.state is State.RETIRED
        assert retired.retired_at is not None
        assert catalog.retire(old.id) == retired
        assert catalog.pack_users(old.key, "r00000-p000.safetensors") == [old.id]
        swept = catalog.mark_swept(old.id)
        assert (swept.state, swept.commit_seq) == (State.DELETED, 1)
        assert swept.swept_at is not None
        assert catalog.pack_users(old.key, "r00000-p000.safetensors") == []
        again = catalog.mark_swept(old.id)
        assert again.state is State.DELETED
        assert again.swept_at is not None
        assert again.swept_at >= swept.swept_at
        assert catalog.retire(old.id) == again
        kinds = [event.kind for event in catalog.events(generation_id=old.id)]
        assert kinds == ["begin", "durable", "commit", "prove", "retire", "delete", "sweep"]
        assert require(catalog.latest("llama")).id == new.id

    def test_the_newest_proven_generation_stays(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        only = job.proven(1)
        with pytest.raises(Conflict, match="restore point"):
            catalog.retire(only.id)
        pending = job.committed(2)
        with pytest.raises(Conflict, match="restore point"):
            catalog.retire(only.id)
        with pytest.raises(Conflict, match="not proven"):
            catalog.retire(pending.id)
        catalog.set_proven(pending.id)
        assert catalog.retire(only.id).state is State.RETIRED
        with pytest.raises(Conflict, match="restore point"):
            catalog.retire(pending.id)

    def test_newest_means_commit_order_and_not_step(self, make_catalog: MakeCatalog) -> None:
        """Rolled back from 1000 to 900, then 910 committed: 910 stays, 1000 may go."""
        catalog = make_catalog()
        job = Job.start(catalog)
        abandoned, newest = job.proven(1000), job.proven(910)
        with pytest.raises(Conflict, match="restore point"):
            catalog.retire(newest.id)
        assert catalog.retire(abandoned.id).state is State.RETIRED

    def test_retention_follows_the_sequence_through_many_steps(self, make_catalog: MakeCatalog) -> None:
        """Steps whose text order differs from their number order."""
        catalog = make_catalog()
        job = Job.start(catalog)
        for step in (9, 10, 100, 1000, 9999, 10000):
            job.proven(step)
        for generation in catalog.generations(run="llama", states=[State.COMMITTED])[2:]:
            catalog.retire(generation.id)
        kept = catalog.generations(run="llama", states=[State.COMMITTED])
        assert [generation.step for generation in kept] == [10000, 9999]

    def test_quarantine_moves_the_restore_point(self, make_catalog: MakeCatalog) -> None:
        """A bad newest generation: latest and retention fall back to the one before."""
        catalog = make_catalog()
        job = Job.start(catalog)
        _, good, bad = job.proven(1), job.proven(2), job.proven(3)
        for reason in ("loss is nan", "again"):
            catalog.quarantine(bad.id, reason=reason)
        found = require(catalog.generation(bad.id))
        assert (found.state, found.quarantine_reason) == (State.COMMITTED, "loss is nan")
        assert found.quarantined_at is not None
        assert require(catalog.latest("llama")).id == good.id
        with pytest.raises(Conflict, match="restore point"):
            catalog.retire(good.id)
        assert catalog.retire(bad.id).state is State.RETIRED

    def test_if_all_are_quarantined_the_newest_stays(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        old, new = job.proven(1), job.proven(2)
        for generation in (old, new):
            catalog.quarantine(generation.id, reason="bad")
        assert catalog.latest("llama") is None
        with pytest.raises(Conflict, match="restore point"):
            catalog.retire(new.id)
        assert catalog.retire(old.id).state is State.RETIRED

    def test_pinned_stays(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        old, _ = job.proven(1), job.proven(2)
        for reason in ("paper", "paper", "thesis"):
            catalog.pin(old.id, reason=reason)
        assert require(catalog.generation(old.id)).pinned
        with pytest.raises(Conflict, match=r"pinned \(thesis\)"):
            catalog.retire(old.id)
        for _ in range(2):
            catalog.unpin(old.id)
        kinds = [event.kind for event in catalog.events(generation_id=old.id)]
        assert (kinds.count("pin"), kinds.count("unpin")) == (2, 1)
        assert catalog.retire(old.id).pinned is False

    def test_tagged_stays(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        old, _ = job.proven(1, tags=["best"]), job.proven(2)
        with pytest.raises(Conflict, match="'best'"):
            catalog.retire(old.id)
        catalog.untag(old.id, "best")
        assert catalog.retire(old.id).state is State.RETIRED

    def test_read_stays_until_the_reader_goes_or_lapses(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        first, second, _ = job.proven(1), job.proven(2), job.proven(3)
        closed = catalog.open_reader(first.id, host="node9", pid=42, ttl_seconds=60)
        lapsed = catalog.open_reader(second.id, host="node9", pid=42, ttl_seconds=60)
        for generation in (first, second):
            with pytest.raises(Conflict, match="node9, pid 42"):
                catalog.retire(generation.id)
        for _ in range(2):
            catalog.close_reader(closed)
        assert catalog.retire(first.id).state is State.RETIRED
        past = catalog.database_now() - timedelta(seconds=1)
        raw("UPDATE readers SET expires_at = :past WHERE id = :id", {"past": past, "id": lapsed})
        assert catalog.retire(second.id).state is State.RETIRED
        with pytest.raises(NotCommitted, match="retired"):
            catalog.open_reader(second.id, host="node9", pid=42, ttl_seconds=60)

    def test_lapsed_readers_are_forgotten(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        catalog = make_catalog()
        generation = Job.start(catalog).proven()
        catalog.open_reader(generation.id, host="h", pid=1, ttl_seconds=60)
        raw("UPDATE readers SET expires_at = opened_at", {})
        catalog.open_reader(generation.id, host="h", pid=2, ttl_seconds=60)
        assert raw("SELECT pid FROM readers", {}) == [(2,)]

    def test_what_a_live_launch_restored_stays(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        old, _ = job.proven(1), job.proven(2)
        user = Job.start(catalog, "finetune")
        catalog.set_restored_from(user.launch.id, old.key)
        with pytest.raises(Conflict, match=f"launch {user.launch.id}"):
            catalog.retire(old.id)
        catalog.close_launch(user.launch.id)
        assert catalog.retire(old.id).state is State.RETIRED

    def test_a_held_run_keeps_everything(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        old, _ = job.proven(1), job.proven(2)
        raw("UPDATE runs SET retention_hold = (1 = 1)", {})
        assert catalog.runs()[0].retention_hold
        with pytest.raises(Conflict, match="hold"):
            catalog.retire(old.id)

    def test_tags_move(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        first, second = job.proven(1, tags=["best", "eval", "best"]), job.proven(2, tags=["best"])
        assert first.tags == ("best", "eval")
        assert require(catalog.generation(first.id)).tags == ("eval",)
        assert require(catalog.tagged("llama", "best")).id == second.id
        for _ in range(2):
            catalog.tag(first.id, "best")
        assert require(catalog.tagged("llama", "best")).tags == ("best", "eval")
        assert require(catalog.generation(second.id)).tags == ()
        moves = [event.detail for event in catalog.events() if event.kind == "tag" and event.detail["name"] == "best"]
        assert [move["moved_from"] for move in moves] == [None, first.id, second.id]
        with pytest.raises(NotFound, match="'best'"):
            catalog.untag(second.id, "best")
        catalog.untag(first.id, "best")
        assert catalog.tagged("llama", "best") is None
        other = Job.start(catalog, "gpt").proven(tags=["eval"])
        assert require(catalog.tagged("llama", "eval")).id == first.id
        assert require(catalog.tagged("gpt", "eval")).id == other.id

    def test_an_aborted_save_gives_no_tag(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        kept = job.proven(1, tags=["best"])
        job.aborted(2, tags=["best"])
        assert require(catalog.tagged("llama", "best")).id == kept.id

    def test_marks_need_a_reason_and_a_name(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        generation = Job.start(catalog).proven()
        with pytest.raises(InvalidInput):
            catalog.tag(generation.id, "")
        with pytest.raises(InvalidInput):
            catalog.pin(generation.id, reason="")
        with pytest.raises(InvalidInput):
            catalog.quarantine(generation.id, reason="")
        with pytest.raises(InvalidInput):
            catalog.open_reader(generation.id, host="h", pid=1, ttl_seconds=0)

    def test_another_repository_is_out_of_reach(self, make_catalog: MakeCatalog) -> None:
        """Retention of one repository never touches a generation of another one."""
        job = Job.start(make_catalog())
        old, _ = job.proven(1), job.proven(2)
        other = make_catalog(repository=OTHER_REPOSITORY)
        before = job.catalog.generations(), job.catalog.events()
        for call in (
            lambda: other.retire(old.id),
            lambda: other.mark_swept(old.id),
            lambda: other.tag(old.id, "best"),
            lambda: other.pin(old.id, reason="mine"),
            lambda: other.open_reader(old.id, host="h", pid=1, ttl_seconds=1),
            lambda: other.renew_lease(job.launch.id, lease_seconds=1),
            lambda: other.commit(old.id, fence=job.fence),
        ):
            with pytest.raises(NotFound):
                call()
        assert other.generation(old.id) is None
        assert other.generation_by_key(old.key) is None
        assert other.generations() == []
        assert other.packs(old.id) == []
        assert other.ranks(old.id) == []
        assert other.events() == []
        assert (job.catalog.generations(), job.catalog.events()) == before
