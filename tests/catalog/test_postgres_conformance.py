"""The PostgreSQL catalog against the suite that every SQL catalog passes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from test_catalog_spec import QUERIES, history

from ckptfmt.catalog.views import VIEWS
from ckptfmt.testing import catalogs
from ckptfmt.testing.catalog_machine import CatalogMachine
from ckptfmt.testing.catalogs import CatalogConformance, Job, MakeCatalog, RawSql

if TYPE_CHECKING:
    from postgres_rig import PostgresServer


@pytest.fixture(autouse=True, scope="module", params=["pooled", pytest.param("connecting", marks=pytest.mark.slow)])
def sessions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sessions from a pooler; and, as everywhere else, one for each transaction."""
    if request.param == "connecting":
        yield
        return
    from postgres_pooler import pooled_sessions

    with pooled_sessions():
        yield


@pytest.fixture
def pg_database(pg_emptied: str) -> str:
    return pg_emptied


@pytest.fixture
def make_catalog(pg_make_catalog: MakeCatalog) -> MakeCatalog:
    return pg_make_catalog


@pytest.fixture
def raw(pg_raw: RawSql) -> RawSql:
    return pg_raw


class TestPostgresCatalog(CatalogConformance):
    """All cases of the suite."""


def test_random_sequences_equal_the_model(make_catalog: MakeCatalog) -> None:
    shared = make_catalog()

    class Machine(CatalogMachine):
        catalog = shared

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=2,
            stateful_step_count=15,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_ranks_of_many_hosts_join(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog()
    job = Job.start(catalog, world_size=3)
    for rank in (1, 2):
        other = catalogs.request(f"node{rank + 1}", 7, world_size=3, token=job.launch.token)
        assert catalog.join_launch("llama", other, rank=rank) == job.launch


@pytest.mark.parametrize("view", sorted(VIEWS))
def test_views_have_the_columns_that_they_say(
    view: str, make_catalog: MakeCatalog, postgres: PostgresServer, pg_database: str
) -> None:
    import psycopg

    history(make_catalog)
    types = {"text": str, "integer": int, "real": float, "time": datetime}
    with psycopg.connect(postgres.url(pg_database)) as connection:
        cursor = connection.execute(f"SELECT * FROM {view}")
        rows = cursor.fetchall()
        assert [column.name for column in cursor.description or ()] == [column.name for column in VIEWS[view].columns]
    assert rows
    for row in rows:
        for column, value in zip(VIEWS[view].columns, row, strict=True):
            assert value is None or isinstance(value, types[column.kind]), (column.name, value)


def test_the_dashboard_queries_run(make_catalog: MakeCatalog, postgres: PostgresServer, pg_database: str) -> None:
    history(make_catalog)
    lag, latest, flight, errors, stalls, space, events = (
        postgres.run(query, database=pg_database) for query in QUERIES
    )
    assert [row[0] for row in lag] == ["quiet"]
    assert [(row[0], row[2]) for row in latest] == [("llama", 2)]
    assert [(row[0], row[2], row[4], row[5]) for row in flight] == [("llama", "writing", "0/1", 0)]
    assert [(row[1], row[2], row[3]) for row in errors] == [("persist", "disk full", 1)]
    assert stalls[0][0:2] == ("llama", 1)
    assert [float(number) for number in stalls[0][2:4]] == [0.25, 0.25]
    assert space[0] == ("llama", 1, 1000, 2, 1000)
    assert [row[2] for row in events] == ["begin", "durable", "commit", "prove", "retire"]
