"""Cases on launches of many ranks: joining, reports in bulk, and the message board."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptfmt.errors import Conflict, Fenced, InvalidInput, NotFound
from ckptfmt.format.states import State
from ckptfmt.ports.records import RankReport
from ckptfmt.testing.catalog_job import OTHER_REPOSITORY, Job, MakeCatalog, RawSql, request


def durable(rank: int, digest: str = "d") -> RankReport:
    """The acknowledgement of a rank."""
    return RankReport(rank, "durable", f"r{rank:05d}.part.json", f"{digest}-{rank}", 10 + rank, 0.5, 1.5 + rank, rank)


class RankCases:
    """What a launch with more than one process needs."""

    # -- joining a launch ---------------------------------------------------------------------
    def test_ranks_join_the_launch_of_their_token(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        catalog = make_catalog()
        mine = request(world_size=3)
        with pytest.raises(NotFound) as absent:
            catalog.join_launch("llama", mine, rank=1)
        assert absent.value.kind == "launch_absent"
        catalog.ensure_run("llama", "llama-key")
        with pytest.raises(NotFound) as absent:
            catalog.join_launch("llama", mine, rank=1)
        assert absent.value.kind == "launch_absent"
        launch = catalog.acquire_launch("llama", mine, lease_seconds=60)
        events = catalog.events()
        for rank in (0, 1, 2, 1):
            assert catalog.join_launch("llama", replace(mine, pid=mine.pid + rank), rank=rank) == launch
        assert catalog.events() == events
        rows = raw("SELECT rank, pid FROM launch_ranks WHERE launch_id = :id ORDER BY rank", {"id": launch.id})
        assert rows == [(0, 100), (1, 101), (2, 102)]

    def test_a_rank_is_one_process(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        catalog.ensure_run("llama", "llama-key")
        mine = request(world_size=2)
        catalog.acquire_launch("llama", mine, lease_seconds=60)
        catalog.join_launch("llama", replace(mine, pid=7), rank=1)
        for rank, other in (
            (1, replace(mine, pid=8)),
            (1, replace(mine, pid=7, pid_started="later")),
            (0, replace(mine, pid=7)),
        ):
            with pytest.raises(Conflict, match=rf"rank {rank} of launch.*node1, pid") as taken:
                catalog.join_launch("llama", other, rank=rank)
            assert taken.value.kind == "rank_taken"

    def test_the_coordinator_need_not_be_rank_0(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        catalog.ensure_run("llama", "llama-key")
        mine = request(world_size=3)
        launch = catalog.acquire_launch("llama", mine, lease_seconds=60, rank=2)
        assert catalog.acquire_launch("llama", mine, lease_seconds=60, rank=2) == launch
        assert catalog.join_launch("llama", replace(mine, pid=1), rank=0) == launch
        with pytest.raises(Conflict, match="rank 2 of launch"):
            catalog.join_launch("llama", replace(mine, pid=1), rank=2)
        with pytest.raises(InvalidInput, match="rank"):
            catalog.acquire_launch("llama", request(world_size=3), lease_seconds=60, displace=launch.id, rank=3)

    def test_joining_refuses_what_does_not_fit(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        catalog.ensure_run("llama", "llama-key")
        mine = request(world_size=2)
        launch = catalog.acquire_launch("llama", mine, lease_seconds=60)
        for rank, world_size in ((2, 2), (-1, 2), (1, 4)):
            with pytest.raises(InvalidInput, match="world size"):
                catalog.join_launch("llama", replace(mine, pid=7, world_size=world_size), rank=rank)
        newer = Job.start(catalog, displace=launch.id, pid=200)
        with pytest.raises(Fenced, match="stop saving"):
            catalog.join_launch("llama", replace(mine, pid=7), rank=1)
        catalog.close_launch(newer.launch.id)
        with pytest.raises(
            Conflict, match="before rank 0 joined it: see what its coordinator, host node1, pid 200"
        ) as late:
            catalog.join_launch("llama", request(token=newer.launch.token), rank=0)
        assert late.value.kind == "launch_over"

    # -- reports of many ranks ----------------------------------------------------------------
    def test_one_report_for_all_ranks(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=1200)
        begun = job.begin()
        assert [(row.rank, row.state) for row in catalog.ranks(begun.id)] == [(rank, "writing") for rank in job.ranks]
        reports = [durable(rank) for rank in job.ranks]
        for _ in range(2):
            catalog.report_ranks(begun.id, reports)
        rows = catalog.ranks(begun.id)
        assert [(row.rank, row.state, row.part_digest, row.nbytes, row.retries) for row in rows] == [
            (rank, "durable", f"d-{rank}", 10 + rank, rank) for rank in job.ranks
        ]
        assert {row.stall_seconds for row in rows} == {0.5}
        assert rows[7].write_seconds == 8.5
        assert rows[0].updated_at >= begun.created_at
        done = catalog.mark_durable(begun.id, job.facts(begun), fence=job.fence)
        assert (done.state, len(catalog.packs(begun.id))) == (State.DURABLE, 1200)

    def test_a_bulk_report_is_all_or_nothing(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=3)
        begun = job.begin()
        catalog.report_ranks(begun.id, [])
        catalog.report_ranks(begun.id, [durable(1)])
        bad: dict[Any, tuple[RankReport, ...]] = {
            (Conflict, "two processes"): (durable(0), durable(1, "other")),
            (NotFound, "rank 3"): (durable(0), durable(3)),
            (InvalidInput, "twice"): (durable(0), durable(0)),
            (InvalidInput, "digest"): (durable(0), RankReport(2, "durable")),
            (InvalidInput, "error"): (durable(0), RankReport(2, "failed")),
            (Conflict, "already"): (durable(0), RankReport(1, "failed", error="late")),
        }
        before = catalog.ranks(begun.id)
        for (kind, message), reports in bad.items():
            with pytest.raises(kind, match=message) as refused:
                catalog.report_ranks(begun.id, reports)
            assert catalog.ranks(begun.id) == before, message
            assert (refused.value.kind == "rank_ended") == (message == "already")
        with pytest.raises(NotFound):
            catalog.report_ranks(10**6, [durable(0)])
        assert make_catalog(repository=OTHER_REPOSITORY).ranks(begun.id) == []
        with pytest.raises(NotFound):
            make_catalog(repository=OTHER_REPOSITORY).report_ranks(begun.id, [durable(0)])
        catalog.abort(begun.id, stage="persist", rank=2, reason="silent", fence=job.fence)
        catalog.report_ranks(begun.id, [durable(1)])
        with pytest.raises(Conflict, match="stop writing"):
            catalog.report_ranks(begun.id, [durable(1), durable(2)])

    def test_a_report_keeps_what_it_leaves_open(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=2)
        begun = job.begin()
        catalog.report_ranks(begun.id, [RankReport(0, "staged", nbytes=7, stall_seconds=0.1), RankReport(1, "staged")])
        catalog.report_ranks(begun.id, [RankReport(0, "failed", retries=3, error="No space left on device")])
        first, second = catalog.ranks(begun.id)
        assert (first.state, first.nbytes, first.stall_seconds, first.retries) == ("failed", 7, 0.1, 3)
        assert (first.error, second.state, second.error) == ("No space left on device", "staged", None)

    def test_texts_of_errors_may_hold_anything(self, make_catalog: MakeCatalog) -> None:
        """A NUL or half a surrogate pair, of a file name: the failure must be told nevertheless."""
        catalog = make_catalog()
        job = Job.start(catalog)
        text = "cannot open 'caf\udce9\0': é"
        begun = job.begin()
        catalog.report_ranks(begun.id, [RankReport(0, "failed", error=text)])
        gone = catalog.abort(begun.id, stage="persist", rank=0, reason=text, fence=job.fence)
        told = "cannot open 'caf\\udce9\\x00': é"
        assert (gone.abort_reason, catalog.ranks(begun.id)[0].error) == (told, told)
        assert catalog.events()[-1].detail["reason"] == told
        assert catalog.post(job.launch.id, "failed", 0, {"text": text, "more": [text]}) == {
            "text": told,
            "more": [told],
        }
        assert catalog.abort(begun.id, stage="persist", rank=0, reason="x", fence=job.fence) == gone

    # -- messages -------------------------------------------------------------------------------
    def test_messages_are_made_once(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=2)
        body = {"step": 7, "ratio": 0.1, "text": "é", "none": None, "list": [1, {"a": True}], "big": 2**60}
        assert catalog.posts(job.launch.id, "stop") == {}
        assert catalog.post(job.launch.id, "stop", 1, body) == body
        assert catalog.post(job.launch.id, "stop", 1, body) == body
        assert catalog.post(job.launch.id, "stop", 1, {"step": 8}) == body
        assert catalog.post(job.launch.id, "stop", 0, {}) == {}
        assert catalog.posts(job.launch.id, "stop") == {0: {}, 1: body}
        assert catalog.posts(job.launch.id, "go") == {}
        assert make_catalog(repository=OTHER_REPOSITORY).posts(job.launch.id, "stop") == {}

    def test_messages_refuse_nonsense(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        for topic, rank, body in (("", 0, {}), ("a", -1, {}), ("a", 0, {"x": object()}), ("a", 0, {"x": float("nan")})):
            with pytest.raises(InvalidInput, match="message"):
                catalog.post(job.launch.id, topic, rank, body)
        for call in (
            lambda: catalog.post(10**6, "a", 0, {}),
            lambda: catalog.forget_posts(10**6, "a"),
            lambda: make_catalog(repository=OTHER_REPOSITORY).post(job.launch.id, "a", 0, {}),
        ):
            with pytest.raises(NotFound, match="launch"):
                call()
        assert catalog.posts(10**6, "a") == {}

    def test_messages_go_when_they_are_forgotten(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=2)
        for topic in ("a", "b"):
            for rank in job.ranks:
                catalog.post(job.launch.id, topic, rank, {"rank": rank})
        for _ in range(2):
            catalog.forget_posts(job.launch.id, "a")
        assert (catalog.posts(job.launch.id, "a"), len(catalog.posts(job.launch.id, "b"))) == ({}, 2)
        catalog.close_launch(job.launch.id)
        assert len(catalog.posts(job.launch.id, "b")) == 2
        other = Job.start(catalog, "other")
        catalog.post(other.launch.id, "b", 0, {})
        Job.start(catalog, pid=200)
        assert raw("SELECT launch_id, topic FROM messages", {}) == [(other.launch.id, "b")]

    def test_a_fenced_launch_posts_nothing(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        newer = job.taken_over()
        for call in (
            lambda: catalog.post(job.launch.id, "a", 0, {}),
            lambda: catalog.forget_posts(job.launch.id, "a"),
        ):
            with pytest.raises(Fenced, match="stop saving"):
                call()
        assert catalog.post(newer.launch.id, "a", 0, {"fine": True}) == {"fine": True}
