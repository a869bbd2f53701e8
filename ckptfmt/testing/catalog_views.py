"""Cases on the views: what they show, and that plain SQL sees the columns that their contract says."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ckptfmt.catalog.view_contract import Kind
from ckptfmt.catalog.views import VIEWS
from ckptfmt.errors import InvalidInput
from ckptfmt.testing.catalog_job import REPOSITORY, Job, MakeCatalog, RawSql

_TYPES: dict[Kind, type | tuple[type, ...]] = {"text": str, "integer": int, "real": (int, float), "time": datetime}


def history(make_catalog: MakeCatalog) -> None:
    """A committed, a retired, an aborted and an open generation, a replica, and a run that never saved: no view is
    empty."""
    catalog = make_catalog()
    job = Job.start(catalog)
    retired = job.proven(1)
    job.replicated(job.proven(2))
    catalog.retire(retired.id)
    job.aborted(3)
    job.begin(4)
    catalog.renew_lease(job.launch.id, lease_seconds=60, last_step=5)
    Job.start(catalog, "quiet")


class ViewCases:
    """What dashboards ask."""

    @pytest.mark.parametrize("name", sorted(VIEWS))
    def test_a_view_has_the_columns_that_it_says(self, make_catalog: MakeCatalog, raw: RawSql, name: str) -> None:
        history(make_catalog)
        columns = VIEWS[name].columns
        rows = make_catalog().view(name)
        assert rows
        for row in rows:
            assert list(row) == [column.name for column in columns]
            for column in columns:
                assert row[column.name] is None or isinstance(row[column.name], _TYPES[column.kind]), column
        for values in raw(f"SELECT * FROM {name}", {}):
            for column, value in zip(columns, values, strict=True):
                assert value is None or _is_plain(value, column.kind), (column, value)

    def test_view_latest_committed_and_lag(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        Job.start(catalog, "empty")
        done = job.proven(100)
        job.begin(120)
        catalog.renew_lease(job.launch.id, lease_seconds=60, last_step=117)
        (latest,) = catalog.view("latest_committed")
        assert (latest["repository"], latest["run"], latest["generation_id"]) == (REPOSITORY, "llama", done.id)
        assert latest["committed_at"] == done.committed_at
        assert 0 <= latest["seconds_since_commit"] < 60
        empty, lag = catalog.view("commit_lag")
        assert (lag["lag_steps"], lag["last_step"], lag["committed_step"], lag["live"]) == (17, 117, 100, 1)
        assert 0 <= lag["lag_seconds"] < 60
        assert (empty["run"], empty["committed_step"], empty["lag_steps"]) == ("empty", None, None)
        job.taken_over()
        (lag,) = catalog.view("commit_lag", run="llama")
        assert (lag["last_step"], lag["pid"]) == (None, 200)

    def test_view_in_flight(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=3)
        durable = job.durable(1)
        writing = job.begin(2, deadline_seconds=60.0)
        job.report(writing.id, 0)
        catalog.report_rank(writing.id, 1, state="staged", staged_bytes=900)
        catalog.report_progress(writing.id, 1, 300)
        merging = job.written(3, deadline_seconds=None)
        first, second, third = catalog.view("in_flight")
        assert [first["generation_id"], second["generation_id"], third["generation_id"]] == [
            durable.id,
            writing.id,
            merging.id,
        ]
        assert [first["stage"], second["stage"], third["stage"]] == ["committing", "writing", "merging"]
        assert (second["ranks_expected"], second["ranks_durable"]) == (3, 1)
        assert sorted(second["missing_ranks"].split(",")) == ["1", "2"]
        assert (second["slowest_rank"], second["slowest_rank_state"]) == (2, "writing")
        assert (second["ranks_staged"], second["staged_bytes"], second["replicated_bytes"]) == (1, 900, 300)
        assert (third["ranks_staged"], third["staged_bytes"], third["replicated_bytes"]) == (0, None, None)
        assert 0 < second["seconds_to_deadline"] <= 60
        assert (third["missing_ranks"], third["seconds_to_deadline"], third["slowest_rank_state"]) == (
            None,
            None,
            "durable",
        )
        assert {row["launch_live"] for row in (first, second, third)} == {1}
        job.taken_over()
        assert {row["launch_live"] for row in catalog.view("in_flight")} == {0}

    def test_view_flush_errors(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=2)
        generation = job.begin(5)
        catalog.report_rank(generation.id, 1, state="failed", error="Input/output error")
        catalog.abort(generation.id, stage="persist", rank=1, reason="rank 1 failed", fence=job.fence)
        catalog.mark_swept(generation.id)
        job.proven(6)
        rows = catalog.view("flush_errors")
        told = {(row["source"], row["stage"], row["rank"], row["reason"]) for row in rows}
        assert told == {
            ("rank", "persist", 1, "Input/output error"),
            ("generation", "persist", 1, "rank 1 failed"),
        }
        assert all(row["at"].tzinfo is UTC and row["step"] == 5 for row in rows)

    def test_view_stalls_and_space(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=2)
        job.proven(1)
        job.begin(2)
        first, second = catalog.view("stalls")
        assert (first["stall_seconds"], first["write_seconds"], first["nbytes"]) == (1.25, 3.0, 2001)
        assert first["bytes_per_second"] == pytest.approx(667.0)
        assert (first["retries"], second["retries"]) == (1, 0)
        assert first["commit_seconds"] >= 0
        assert (second["stall_seconds"], second["bytes_per_second"], second["commit_seconds"]) == (None, None, None)
        job.report(job.begun[-1], 0)
        catalog.abort(job.begun[-1], stage="persist", rank=1, reason="silent", fence=job.fence)
        (space,) = catalog.view("space_by_run")
        assert (space["committed_generations"], space["committed_bytes"]) == (1, 2001)
        assert (space["reclaimable_generations"], space["reclaimable_bytes"]) == (1, 1000)
        catalog.mark_swept(job.begun[-1])
        (space,) = catalog.view("space_by_run")
        assert (space["reclaimable_generations"], space["deleted_generations"]) == (0, 1)

    def test_view_stalls_tells_staged_and_durable_apart(self, make_catalog: MakeCatalog, raw: RawSql) -> None:
        catalog = make_catalog()
        job = Job.start(catalog, world_size=2)
        generation = job.begin(1)
        catalog.report_rank(generation.id, 0, state="staged", staged_bytes=700, staged_seconds=0.5)
        catalog.report_rank(generation.id, 1, state="staged", staged_bytes=300, staged_seconds=0.75)
        (stall,) = catalog.view("stalls")
        assert (stall["staged_bytes"], stall["staged_seconds"]) == (1000, 0.75)
        assert stall["freed_seconds"] >= 0
        assert stall["durable_seconds"] is None
        job.report(generation.id, 0)
        direct = job.written(2)
        begun = direct.created_at
        for column, rank, seconds in (("staged_at", 0, 1), ("staged_at", 1, 2), ("durable_at", 0, 9)):
            sql = f"UPDATE ranks SET {column} = :at WHERE generation_id = :id AND rank = :rank"
            at = generation.created_at + timedelta(seconds=seconds)
            raw(sql, {"at": at, "id": generation.id, "rank": rank})
        raw("UPDATE ranks SET durable_at = :at WHERE generation_id = :id", {"at": begun, "id": direct.id})
        first, second = catalog.view("stalls")
        assert (first["freed_seconds"], first["durable_seconds"]) == (pytest.approx(2, abs=0.01), None)
        assert (second["freed_seconds"], second["durable_seconds"]) == (pytest.approx(0), pytest.approx(0))
        assert (second["staged_bytes"], second["staged_seconds"]) == (None, None)
        raw("UPDATE ranks SET durable_at = staged_at WHERE rank = 1 AND staged_at IS NOT NULL", {})
        assert catalog.view("stalls")[0]["durable_seconds"] == pytest.approx(9, abs=0.01)

    def test_view_names_are_checked(self, make_catalog: MakeCatalog) -> None:
        with pytest.raises(InvalidInput, match="latest_committed"):
            make_catalog().view("generations; DROP TABLE runs")


def _is_plain(value: Any, kind: Kind) -> bool:
    """Whether a client without this library is given the kind of value. Times may be texts that sort as they read."""
    if kind == "time" and isinstance(value, str):
        return re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}", value) is not None
    return isinstance(value, _TYPES[kind])
