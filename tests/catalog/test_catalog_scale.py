"""Ten thousand generations: listings are one indexed query, however many rows."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptfmt.catalog.clock import SQLITE_NOW
from ckptfmt.catalog.open import open_catalog
from ckptfmt.catalog.snapshot import SqliteSession
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.testing.catalogs import REPOSITORY, Job, MakeCatalog


def _open(path: Path, mode: Any = "r") -> Catalog:
    return open_catalog(f"sqlite:///{path}", repository=REPOSITORY, display_url="/ckpts", mode=mode, create=False)


@pytest.fixture(scope="module")
def full(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10,000 committed generations with their ranks, by raw SQL. Not to be changed."""
    database = Path(shutil.copy(migrated, tmp_path_factory.mktemp("full") / "catalog.sqlite"))
    launch = Job.start(_open(database, "w")).launch
    columns = (
        'repository_id, run_id, launch_id, save_number, "key", step, state, fence, world_size, epoch, created_at,'
        " manifest_name, manifest_digest, manifest_bytes, nbytes"
    )
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.executemany(
            f"INSERT INTO generations ({columns}) VALUES (1, 1, ?, ?, ?, ?, 'writing', 1, 1, 1, {SQLITE_NOW},"
            " 'm', 'd', 1, 1000)",
            [(launch.id, n, f"key-{n}", n * 10) for n in range(10_000)],
        )
        connection.execute("UPDATE generations SET state = 'durable'")
        connection.execute(
            "UPDATE generations SET state = 'committed', commit_seq = id, commit_fence = 1, committed_at = created_at"
        )
        connection.execute(
            "INSERT INTO ranks (generation_id, rank, state, part_name, part_digest, nbytes, stall_seconds, retries,"
            " updated_at) SELECT id, 0, 'durable', 'p', 'd', 1000, 0.1, 0, created_at FROM generations"
        )
        connection.execute("INSERT INTO tags SELECT 1, 'tag-' || id, id, created_at FROM generations WHERE id % 50 = 0")
        connection.execute("INSERT INTO pins SELECT id, 'r', 'a', created_at FROM generations WHERE id % 100 = 0")
    return database


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The queries that were run, with their values."""
    queries: list[tuple[str, dict[str, Any]]] = []
    rows = SqliteSession.rows

    def noted(self: SqliteSession, query: str, **values: Any) -> Any:
        queries.append((query, values))
        return rows(self, query, **values)

    monkeypatch.setattr(SqliteSession, "rows", noted)
    return queries


def test_a_listing_is_two_queries(full: Path, seen: list[tuple[str, dict[str, Any]]]) -> None:
    catalog = _open(full)
    seen.clear()
    started = time.perf_counter()
    listed = catalog.generations(run="llama", states=[State.COMMITTED])
    seconds = time.perf_counter() - started
    assert len(seen) == 2
    assert len(listed) == 10_000
    assert [generation.commit_seq for generation in listed[:3]] == [10_000, 9_999, 9_998]
    assert listed[0].tags == ("tag-10000",)
    assert listed[0].pinned
    assert listed[0].stall_seconds == 0.1
    assert seconds < 5


@pytest.mark.parametrize("call", ["ls", "ls limit", "latest", "step", "key", "id", "tagged"])
def test_no_question_scans_the_table(full: Path, seen: list[tuple[str, dict[str, Any]]], call: str) -> None:
    catalog = _open(full)
    asked = {
        "ls": lambda: catalog.generations(run="llama", states=[State.COMMITTED]),
        "ls limit": lambda: catalog.generations(run="llama", states=[State.COMMITTED], limit=5),
        "latest": lambda: catalog.latest("llama"),
        "step": lambda: catalog.committed_at_step("llama", 5000),
        "key": lambda: catalog.generation_by_key("key-77"),
        "id": lambda: catalog.generation(77),
        "tagged": lambda: catalog.tagged("llama", "tag-50"),
    }
    seen.clear()
    asked[call]()
    statement, parameters = seen[0]
    with closing(sqlite3.connect(full)) as connection:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
    assert not [line for line in plan if line.startswith("SCAN") or "TEMP B-TREE" in line], plan


def test_the_views_answer_at_scale(full: Path) -> None:
    catalog = _open(full)
    for name in ("latest_committed", "commit_lag", "in_flight", "flush_errors", "space_by_run"):
        started = time.perf_counter()
        rows = catalog.view(name)
        assert time.perf_counter() - started < 2, name
        assert len(rows) <= 1
    assert len(catalog.view("stalls")) == 10_000


@pytest.fixture(scope="module")
def copied(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with four packs each, on two replicas that lack the newest ten."""
    database = Path(shutil.copy(full, tmp_path_factory.mktemp("copied") / "catalog.sqlite"))
    catalog = _open(database, "w")
    for tier in ("one", "two"):
        catalog.ensure_tier(tier, role="replica", url=tier, host=None)
    with closing(sqlite3.connect(database)) as connection, connection:
        for rank in range(4):
            connection.execute(
                'INSERT INTO packs (repository_id, generation_key, name, rank, nbytes, header_digest) SELECT 1, "key",'
                f" 'p{rank}', {rank}, 250, 'h' FROM generations"
            )
        for sql in (
            'INSERT INTO generation_packs SELECT g.id, k.id FROM packs AS k JOIN generations AS g ON g."key" ='
            " k.generation_key",
            "INSERT INTO replicas SELECT u.pack_id, t.id, 'p', g.created_at FROM generation_packs AS u JOIN generations"
            " AS g ON g.id = u.generation_id AND g.commit_seq <= 9990 JOIN tiers AS t ON 1 = 1",
            "INSERT INTO replicated_generations SELECT g.id, t.id, g.created_at FROM generations AS g JOIN tiers AS t"
            " ON g.commit_seq <= 9990",
        ):
            connection.execute(sql)
    return database


def test_what_tiers_hold_is_told_at_scale(copied: Path, seen: list[tuple[str, dict[str, Any]]]) -> None:
    catalog = _open(copied)
    started = time.perf_counter()
    lags = catalog.view("replica_lag")
    assert time.perf_counter() - started < 5
    assert [(row["generations_behind"], row["bytes_behind"], row["replicated_generation_id"]) for row in lags] == [
        (10, 10_000, 9990)
    ] * 2
    started = time.perf_counter()
    assert catalog.bytes_held() == catalog.bytes_held("llama") == 10_000 * 1000
    assert time.perf_counter() - started < 2
    started = time.perf_counter()
    seen.clear()
    assert [row.commit_seq for row in catalog.unreplicated("llama", "two")] == list(range(9991, 10_001))
    assert len(seen) == 2
    assert len(catalog.replicas(77)) == 8
    assert time.perf_counter() - started < 2


def test_reused_packs_are_looked_up_once_for_each_generation(
    make_catalog: MakeCatalog, seen: list[tuple[str, dict[str, Any]]]
) -> None:
    catalog = make_catalog()
    job = Job.start(catalog, world_size=100)
    base = job.committed()
    asked = []
    for reused in (1, 100):
        generation = job.written(reused)
        facts = job.facts(generation)
        packs = [*job.facts(base).packs[:reused], *facts.packs[reused:]]
        seen.clear()
        catalog.mark_durable(generation.id, replace(facts, packs=packs), fence=job.fence)
        asked.append(len(seen))
        catalog.commit(generation.id, fence=job.fence)
        assert catalog.packs(generation.id) == sorted(packs, key=lambda pack: (pack.generation_key, pack.name))
    assert asked[1] <= asked[0]
