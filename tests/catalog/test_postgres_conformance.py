"""The PostgreSQL catalog against the suite that every SQL catalog passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_catalog_spec import QUERIES, assert_answers

from ckptfmt.catalog.views import VIEWS
from ckptfmt.testing import catalogs
from ckptfmt.testing.catalog_machine import check_random_sequences
from ckptfmt.testing.catalog_views import history
from ckptfmt.testing.catalogs import CatalogConformance, Job, MakeCatalog, RawSql


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
    check_random_sequences(make_catalog(), sequences=2, steps=15)


def test_ranks_of_many_hosts_join(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog()
    job = Job.start(catalog, world_size=3)
    for rank in (1, 2):
        other = catalogs.request(f"node{rank + 1}", 7, world_size=3, token=job.launch.token)
        assert catalog.join_launch("llama", other, rank=rank) == job.launch


@pytest.mark.parametrize("view", sorted(VIEWS))
def test_every_column_of_a_view_is_there(view: str, make_catalog: MakeCatalog, raw: RawSql) -> None:
    make_catalog()
    query = "SELECT attname::text FROM pg_attribute WHERE attrelid = CAST(:view AS regclass) ORDER BY attnum"
    assert [name for (name,) in raw(query, {"view": view})] == [column.name for column in VIEWS[view].columns]


def test_the_dashboard_queries_run(make_catalog: MakeCatalog, raw: RawSql) -> None:
    history(make_catalog)
    assert_answers([raw(query, {}) for query in QUERIES])
