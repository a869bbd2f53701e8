"""Cases on runs, launches, leases and fences."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from ckptfmt.errors import Conflict, Fenced, InvalidInput, NotFound
from ckptfmt.ports.catalog import Catalog
from ckptfmt.testing.catalog_job import OTHER_REPOSITORY, Job, MakeCatalog, RawSql, request


class LaunchCases:
    """Who may write to a run."""

    def test_ensure_run_answers_the_same_twice(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        first = catalog.ensure_run("llama", "llama-1")
        assert catalog.ensure_run("llama", "llama-1") == first
        assert (first.name, first.key, first.fence, first.next_commit_seq) == ("llama", "llama-1", 0, 1)
        assert first.retention_hold is False
        assert first.created_at.tzinfo is not None

    def test_run_name_and_key_belong_together(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        catalog.ensure_run("llama", "llama-1")
        with pytest.raises(Conflict, match="llama-1"):
            catalog.ensure_run("llama", "llama-2")
        with pytest.raises(Conflict, match="llama-1"):
            catalog.ensure_run("gpt", "llama-1")
        with pytest.raises(InvalidInput):
            catalog.ensure_run("", "x")

    def test_runs_are_sorted_and_of_this_repository_only(self, make_catalog: MakeCatalog) -> None:
        catalog, other = make_catalog(), make_catalog(repository=OTHER_REPOSITORY)
        for name in ("b", "a", "c"):
            catalog.ensure_run(name, f"{name}-key")
        other.ensure_run("a", "a-key")
        assert [run.name for run in catalog.runs()] == ["a", "b", "c"]
        assert [run.name for run in other.runs()] == ["a"]
        assert other.runs()[0].id != catalog.runs()[0].id

    def test_launch_of_an_unknown_run(self, make_catalog: MakeCatalog) -> None:
        with pytest.raises(NotFound, match="'gpt'"):
            make_catalog().acquire_launch("gpt", request(), lease_seconds=1)

    def test_each_launch_raises_the_fence(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        first = Job.start(catalog)
        assert first.launch.live
        assert first.fence == 1 == catalog.runs()[0].fence
        catalog.close_launch(first.launch.id)
        second = Job.start(catalog)
        assert second.fence == 2
        assert [launch.id for launch in catalog.launches("llama")] == [second.launch.id, first.launch.id]

    def test_a_live_launch_keeps_others_out_and_is_named(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        with pytest.raises(Conflict, match=r"node1, pid 100.*takeover"):
            catalog.acquire_launch("llama", request(pid=7), lease_seconds=60)
        with pytest.raises(Conflict):
            catalog.acquire_launch("llama", request(pid=7), lease_seconds=60, displace=job.launch.id + 1)
        assert catalog.live_launch("llama") == job.launch
        assert catalog.runs()[0].fence == job.fence

    def test_a_closed_launch_lets_the_next_in(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        catalog.close_launch(job.launch.id)
        catalog.close_launch(job.launch.id)
        assert catalog.live_launch("llama") is None
        assert [event.kind for event in catalog.events(run="llama")].count("close") == 1
        with pytest.raises(Conflict, match="closed"):
            catalog.renew_lease(job.launch.id, lease_seconds=60)
        assert Job.start(catalog).launch.live

    def test_a_lapsed_lease_lets_the_next_in(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        past = catalog.database_now() - timedelta(seconds=1)
        raw("UPDATE launches SET lease_until = :past WHERE id = :id", {"past": past, "id": job.launch.id})
        assert catalog.live_launch("llama") is None
        assert not catalog.launches("llama")[0].live
        newer = Job.start(catalog, pid=200)
        assert newer.fence == job.fence + 1
        with pytest.raises(Fenced, match="newer launch"):
            catalog.renew_lease(job.launch.id, lease_seconds=60)

    def test_a_lapsed_lease_that_nobody_took_may_be_renewed(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        past = catalog.database_now() - timedelta(seconds=1)
        raw("UPDATE launches SET lease_until = :past WHERE id = :id", {"past": past, "id": job.launch.id})
        assert catalog.renew_lease(job.launch.id, lease_seconds=60).live

    def test_displace_takes_over_at_once(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        newer = job.taken_over()
        assert catalog.live_launch("llama") == newer.launch
        old = catalog.launches("llama")[1]
        assert (old.id, old.live, old.closed_at) == (job.launch.id, False, None)
        assert old.lease_until <= newer.launch.created_at
        catalog.close_launch(job.launch.id)

    def test_the_same_request_again_gets_the_first_answer(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        catalog.ensure_run("llama", "llama-1")
        wanted = request()
        first = catalog.acquire_launch("llama", wanted, lease_seconds=60)
        assert catalog.acquire_launch("llama", wanted, lease_seconds=60) == first
        assert catalog.runs()[0].fence == 1
        assert [event.kind for event in catalog.events()] == ["run", "launch"]

    def test_a_token_belongs_to_one_process(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        catalog.ensure_run("llama", "llama-1")
        wanted = request()
        first = catalog.acquire_launch("llama", wanted, lease_seconds=60)
        for other in (replace(wanted, pid=7), replace(wanted, host="node2"), replace(wanted, pid_started="later")):
            with pytest.raises(Conflict, match="token"):
                catalog.acquire_launch("llama", other, lease_seconds=60, displace=first.id)
        catalog.close_launch(first.id)
        with pytest.raises(Conflict, match="closed"):
            catalog.acquire_launch("llama", wanted, lease_seconds=60)

    def test_heartbeat_moves_lease_and_step(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        renewed = catalog.renew_lease(job.launch.id, lease_seconds=600, last_step=12)
        assert renewed.lease_until > job.launch.lease_until
        assert renewed.last_step == 12
        assert catalog.renew_lease(job.launch.id, lease_seconds=600).last_step == 12
        with pytest.raises(NotFound):
            catalog.renew_lease(10**6, lease_seconds=1)

    def test_restored_from_is_kept(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        key = job.proven().key
        catalog.set_restored_from(job.launch.id, key)
        catalog.set_restored_from(job.launch.id, key)
        assert catalog.launches("llama")[0].restored_from == key
        assert [event.kind for event in catalog.events()].count("restore") == 1

    def test_runs_do_not_hold_each_other(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        first, second = Job.start(catalog, "a"), Job.start(catalog, "b")
        assert catalog.live_launch("a") == first.launch
        assert catalog.live_launch("b") == second.launch
        assert catalog.live_launch("none") is None
        assert catalog.launches("none") == []

    def test_a_fenced_launch_is_refused_everywhere(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        committed, _ = job.proven(1), job.proven(2)
        aborted, durable, writing = job.aborted(3), job.durable(4), job.written(5)
        job.taken_over()
        before = _everything(catalog)
        old = job.fence
        calls: dict[str, Callable[[], object]] = {
            "begin_save": lambda: job.begin(9),
            "skip_save": lambda: catalog.skip_save(job.launch.id, n=99, step=9, fence=old, token=job.launch.token),
            "mark_durable": lambda: catalog.mark_durable(writing.id, job.facts(writing), fence=old),
            "commit": lambda: catalog.commit(durable.id, fence=old),
            "abort": lambda: catalog.abort(writing.id, stage="persist", rank=0, reason="late", fence=old),
            "adopt": lambda: catalog.adopt(aborted.id, job.verdict(aborted), fence=old),
            "retire": lambda: catalog.retire(committed.id, fence=old),
            "renew_lease": lambda: catalog.renew_lease(job.launch.id, lease_seconds=60),
            "set_restored_from": lambda: catalog.set_restored_from(job.launch.id, committed.key),
        }
        for name, call in calls.items():
            with pytest.raises(Fenced, match="stop saving"):
                call()
            assert _everything(catalog) == before, name

    def test_a_stolen_fence_does_not_revive_a_launch(self, make_catalog: MakeCatalog) -> None:
        """Knowing the run's fence is not enough to begin a save under an older launch."""
        catalog = make_catalog()
        job = Job.start(catalog)
        newer = job.taken_over()
        with pytest.raises(Fenced):
            catalog.skip_save(job.launch.id, n=0, step=0, fence=newer.fence, token=job.launch.token)

    def test_the_newer_launch_settles_what_the_older_left(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        durable = job.durable(2)
        writing = job.begin(3)
        newer = job.taken_over()
        done = catalog.commit(durable.id, fence=newer.fence)
        gone = catalog.abort(writing.id, stage="takeover", rank=None, reason="launch ended", fence=newer.fence)
        assert (done.fence, done.commit_fence) == (job.fence, newer.fence)
        assert gone.abort_stage == "takeover"

    def test_threads_share_a_catalog_object(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()

        def work(number: int) -> list[int | None]:
            job = Job.start(catalog, f"run-{number}")
            return [job.proven(step).commit_seq for step in range(3)]

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == [[1, 2, 3]] * 4
        assert len(catalog.generations()) == 12


def _everything(catalog: Catalog) -> object:
    return catalog.generations(), catalog.events(), catalog.launches("llama"), catalog.runs()
