"""Cases on reading: order, selection, events, views, read-only opening."""

from __future__ import annotations

from datetime import UTC, timedelta

import pytest

from ckptfmt.errors import CatalogError, InvalidInput, NotFound
from ckptfmt.format.states import State
from ckptfmt.testing.catalog_job import Job, MakeCatalog, RawSql, require


class ReadingCases:
    """What a reader sees."""

    def test_an_empty_catalog(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        assert catalog.runs() == []
        assert catalog.generations() == []
        assert catalog.latest("llama") is None
        assert catalog.generation(1) is None
        assert catalog.generation_by_key("k") is None
        assert catalog.tagged("llama", "best") is None
        assert catalog.committed_at_step("llama", 1) is None
        assert catalog.events() == []
        assert catalog.identity() == make_catalog().identity()
        assert catalog.identity().epoch == 1
        assert catalog.database_now().tzinfo is UTC

    def test_latest_does_not_wait_for_what_is_being_written(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        done = job.proven(10)
        job.durable(20)
        assert require(catalog.latest("llama")).id == done.id

    def test_latest_ignores_step_and_clock(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        job.proven(1080000)
        newest = job.durable(960000)
        # The commit point of the newest lies an hour before that of the one before it.
        past = catalog.database_now() - timedelta(hours=1)
        raw(
            "UPDATE generations SET state = 'committed', commit_seq = 2, commit_fence = 1, committed_at = :past"
            " WHERE id = :id",
            {"past": past, "id": newest.id},
        )
        assert require(catalog.latest("llama")).id == newest.id
        assert catalog.generations()[0].id == newest.id

    def test_a_higher_epoch_is_newer(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        for step in (1, 2, 3):
            job.proven(step)
        raw("UPDATE catalog_meta SET epoch = 2", {})
        raw("UPDATE runs SET next_commit_seq = 10", {})
        newer = job.proven(0)
        assert (newer.epoch, newer.commit_seq) == (2, 10)
        assert require(catalog.latest("llama")).id == newer.id

    def test_order_of_a_listing(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        first, aborted, second = job.proven(5), job.aborted(9), job.proven(1)
        writing = job.begin(2)
        assert [g.id for g in catalog.generations()] == [second.id, first.id, writing.id, aborted.id]
        assert [g.id for g in catalog.generations(limit=2)] == [second.id, first.id]
        committed = catalog.generations(run="llama", states=[State.COMMITTED])
        assert [g.id for g in committed] == [second.id, first.id]
        others = catalog.generations(states=[State.ABORTED, State.WRITING])
        assert [g.id for g in others] == [writing.id, aborted.id]
        assert catalog.generations(run="none") == []
        assert catalog.generations(states=[]) == []
        assert catalog.generations(limit=0) == []
        with pytest.raises(InvalidInput):
            catalog.generations(limit=-1)

    def test_a_listing_equals_single_reads(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=2)
        pinned = job.proven(1, tags=["b", "a"])
        catalog.pin(pinned.id, reason="paper")
        job.aborted(2)
        job.begin(3)
        listed = catalog.generations()
        assert listed == [catalog.generation(generation.id) for generation in listed]
        assert (listed[0].tags, listed[0].pinned) == (("a", "b"), True)

    def test_committed_at_step_is_the_newest_of_that_step(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        job.proven(900)
        again = job.proven(900)
        job.proven(1000)
        job.aborted(900)
        assert require(catalog.committed_at_step("llama", 900)).id == again.id
        assert catalog.committed_at_step("llama", 901) is None

    def test_events_are_numbered_per_run_without_gaps(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        first, second = Job.start(catalog, "a"), Job.start(catalog, "b")
        first.proven(1)
        second.aborted(1)
        first.retired(2)
        for run in ("a", "b"):
            events = catalog.events(run=run)
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            assert {event.run for event in events} == {run}
        events = catalog.events()
        assert events[-3:] == catalog.events(limit=3)
        assert len(events) == len(catalog.events(run="a")) + len(catalog.events(run="b"))
        steps = [(event.kind, event.from_state, event.to_state) for event in catalog.events(run="b")]
        assert steps == [
            ("run", None, None),
            ("launch", None, None),
            ("begin", None, "writing"),
            ("abort", "writing", "aborted"),
        ]
        assert all(":" in event.actor and event.library for event in events)
        assert catalog.events(run="b")[-1].detail["reason"] == "disk full"

    def test_notes(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job, other = Job.start(catalog), Job.start(catalog, "gpt")
        generation = job.proven()
        catalog.note("llama", generation_id=generation.id, kind="fell_back", detail={"from": 7, "why": ["corrupt"]})
        catalog.note("llama", generation_id=None, kind="restored", detail={})
        first, second = catalog.events(run="llama")[-2:]
        assert (first.kind, first.generation_id, first.to_state) == ("fell_back", generation.id, None)
        assert first.detail == {"from": 7, "why": ["corrupt"]}
        assert (second.kind, second.generation_id, second.seq) == ("restored", None, first.seq + 1)
        for run, id, kind in (("llama", None, "commit"), ("llama", None, ""), ("gpt", generation.id, "restored")):
            with pytest.raises(InvalidInput):
                catalog.note(run, generation_id=id, kind=kind, detail={})
        with pytest.raises(NotFound):
            catalog.note("none", generation_id=None, kind="restored", detail={})
        assert len(catalog.events(run="gpt")) == len(catalog.events()) - len(catalog.events(run="llama"))
        assert other.launch.live

    def test_what_is_left_to_prove(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        first = job.committed(1, tags=["best"])
        job.proven(2)
        third = job.committed(3)
        job.durable(4)
        pending = catalog.unproven("llama")
        assert [generation.id for generation in pending] == [first.id, third.id]
        assert pending == [catalog.generation(first.id), catalog.generation(third.id)]
        assert catalog.unproven("none") == []

    def test_a_launch_and_its_last_commit(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        assert catalog.launch(job.launch.id) == job.launch
        assert catalog.last_committed_of(job.launch.id) is None
        job.proven(5)
        newest = job.proven(4)
        job.aborted(6)
        assert catalog.last_committed_of(job.launch.id) == newest
        newer = job.taken_over()
        newer.proven(7)
        assert catalog.last_committed_of(job.launch.id) == newest
        catalog.retire(newest.id)
        assert require(catalog.last_committed_of(job.launch.id)).step == 5
        with pytest.raises(CatalogError, match="launch 999"):
            catalog.launch(999)

    def test_reading_is_read_only(self, make_catalog: MakeCatalog) -> None:
        writer = make_catalog()
        job = Job.start(writer)
        generation = job.proven()
        reader = make_catalog(mode="r")
        assert reader.read_only
        assert not writer.read_only
        assert reader.generations() == [generation]
        assert reader.view("latest_committed") == [
            {**row, "seconds_since_commit": pytest.approx(row["seconds_since_commit"], abs=60)}
            for row in writer.view("latest_committed")
        ]
        with pytest.raises(CatalogError, match="mode='w'"):
            reader.tag(generation.id, "best")
        with pytest.raises(CatalogError, match="mode='w'"):
            reader.ensure_run("gpt", "gpt-1")

    def test_a_closed_catalog_says_so(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        catalog.close()
        catalog.close()
        with pytest.raises(CatalogError, match="closed"):
            catalog.runs()

    def test_the_url_hides_nothing_but_the_password(self, make_catalog: MakeCatalog) -> None:
        assert "://" in make_catalog().url
