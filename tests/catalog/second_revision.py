"""What a catalog of revision 0002 held, written past the library, and how it reads after an upgrade."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from ckptfmt.format.states import State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import ReplicaPack
from ckptfmt.testing.catalog_job import require
from ckptfmt.testing.catalogs import COPY, REPOSITORY, Job, RawSql

BEGUN = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
_GENERATION = """INSERT INTO generations (repository_id, run_id, launch_id, save_number, "key", step, state, fence,
    world_size, epoch, created_at) VALUES (1, 1, 1, {n}, 'old-{n}', {n}, 'writing', 1, 2, 1, :begun)"""
_RANK = """INSERT INTO ranks (generation_id, rank, state, part_name, part_digest, nbytes, stall_seconds, write_seconds,
    retries, updated_at) VALUES ({generation}, {rank}, '{state}', 'part', 'digest', 1000, 0.5, 2.0, 0, :later)"""
_MADE = (
    f"INSERT INTO repositories (uuid, url, created_at) VALUES ('{REPOSITORY}', '/ckpts', :begun)",
    """INSERT INTO runs (repository_id, name, "key", fence, next_commit_seq, created_at)
    VALUES (1, 'llama', 'llama-key', 1, 2, :begun)""",
    """INSERT INTO launches (run_id, token, kind, fence, host, pid, boot_id, pid_started, world_size, lease_until,
    created_at) VALUES (1, 'old', 'training', 1, 'node1', 100, 'boot', 'started', 2, :later, :begun)""",
    _GENERATION.format(n=0),
    _GENERATION.format(n=1),
    """INSERT INTO saves (launch_id, n, run_id, step, outcome, generation_id, tags, created_at)
    VALUES (1, 0, 1, 0, 'begun', 1, '["best"]', :begun)""",
    *(_RANK.format(generation=generation, rank=0, state="durable") for generation in (1, 2)),
    _RANK.format(generation=1, rank=1, state="durable"),
    _RANK.format(generation=2, rank=1, state="staged"),
    """UPDATE generations SET state = 'durable', durable_at = :later, manifest_name = 'm', manifest_digest = 'd',
    manifest_bytes = 1, nbytes = 2000 WHERE id = 1""",
    """UPDATE generations SET state = 'committed', commit_seq = 1, commit_fence = 1, committed_at = :later,
    proven_at = :later WHERE id = 1""",
    """INSERT INTO packs (repository_id, generation_key, name, rank, nbytes, header_digest)
    VALUES (1, 'old-0', 'p', 0, 2000, 'h')""",
    "INSERT INTO generation_packs (generation_id, pack_id) VALUES (1, 1)",
    "INSERT INTO tags (run_id, name, generation_id, tagged_at) VALUES (1, 'best', 1, :later)",
    """INSERT INTO events (run_id, seq, generation_id, at, kind, actor, detail, library)
    VALUES (1, 1, 1, :later, 'prove', 'node1', '{}', '0.1')""",
)
_TABLES = ("repositories", "runs", "launches", "generations", "saves", "ranks", "packs", "tags", "events")


def fill(run: RawSql) -> dict[str, list[Any]]:
    """Make a committed and an open generation; return all rows, by table."""
    for sql in _MADE:
        times = {"begun": BEGUN, "later": BEGUN + timedelta(seconds=7)}
        run(sql, {name: time for name, time in times.items() if f":{name}" in sql})
    return _rows(run)


def _rows(run: RawSql) -> dict[str, list[Any]]:
    return {table: sorted(map(repr, run(f"SELECT * FROM {table}", {}))) for table in _TABLES}


def check(run: RawSql, before: dict[str, list[Any]]) -> None:
    """Nothing of a row was lost: columns were added at its end."""
    for table, rows in _rows(run).items():
        assert len(rows) == len(before[table]), table
        for now, then in zip(rows, before[table], strict=True):
            assert now.startswith(then[:-1]), table


def check_goes_on(catalog: Catalog) -> None:
    """The upgraded catalog tells what it told, knows when ranks were durable, and goes on."""
    old = require(catalog.latest("llama"))
    assert (old.id, old.commit_seq, old.tags, old.tiers) == (1, 1, ("best",), ())
    durable, staged = catalog.ranks(2)
    assert durable.durable_at == durable.updated_at == BEGUN + timedelta(seconds=7)
    assert (staged.state, staged.durable_at, staged.staged_at, staged.staged_bytes) == ("staged", None, None, None)
    stall, flying = catalog.view("stalls")
    assert round(stall["durable_seconds"]) == round(stall["freed_seconds"]) == 7
    assert (flying["durable_seconds"], flying["freed_seconds"]) == (None, None)
    assert catalog.bytes_held() == 2000 + 2 * 1000
    catalog.ensure_tier(COPY, role="replica", url="/copy", host=None)
    assert catalog.view("replica_lag")[0]["bytes_behind"] == 2000
    catalog.note_replicas(1, COPY, [ReplicaPack("old-0", "p", "p")])
    catalog.mark_replicated(1, COPY)
    assert catalog.view("replica_lag")[0]["generations_behind"] == 0
    job = Job.start(catalog, displace=1)
    catalog.abort(2, stage="takeover", rank=1, reason="its launch is gone", fence=job.fence)
    assert job.proven(9).commit_seq == 2
    catalog.untag(1, "best")
    assert catalog.retire(1).state is State.RETIRED
