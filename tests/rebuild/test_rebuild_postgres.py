"""A catalog on a PostgreSQL server is lost, put back from a copy, or damaged."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rebuild_rig import abort, assert_sound, goes_on, make_history, save, site_of, sweep, told

import ckptfmt
from ckptfmt.catalog import repair
from ckptfmt.catalog.revision import HEAD
from ckptfmt.cli.repair import repair_catalog
from ckptfmt.errors import CatalogBehind, CatalogError, Conflict, InvalidInput

if TYPE_CHECKING:
    from postgres_rig import PostgresServer


@pytest.fixture
def new_database(postgres: PostgresServer) -> Iterator[Callable[..., str]]:
    """Makes databases, empty or as copies; they go with the test."""
    made: list[str] = []

    def new(template: str | None = None) -> str:
        made.append(postgres.new_database(template))
        return made[-1]

    yield new
    for name in reversed(made):
        postgres.run(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ckpts"


@pytest.mark.slow
def test_a_lost_database_comes_back_in_an_empty_one(
    root: Path, postgres: PostgresServer, new_database: Callable[..., str]
) -> None:
    first = postgres.url(new_database())
    make_history(root, first)
    with site_of(root, first) as site:
        before = told(site)
        used = max(row.id for row in site.sql().generations())
    assert not (root / "catalog.sqlite").exists()
    second = postgres.url(new_database())
    with pytest.raises(CatalogError, match="db rebuild"):
        ckptfmt.open(root, catalog=second)
    with pytest.raises(CatalogError, match="is empty"):
        repair_catalog(root, how="merge", catalog=second)
    report = repair_catalog(root, how="rebuild", catalog=second)
    assert (report.epoch, report.set_aside) == (2, None)
    assert_sound(root, before, second)
    goes_on(root, used, second)
    with pytest.raises(Conflict):  # the old one does not govern any more
        ckptfmt.open(root, catalog=first)
    with pytest.raises(InvalidInput, match="nothing to rebuild"):
        repair_catalog(root, how="rebuild", catalog=second)


@pytest.mark.slow
def test_yesterdays_copy_is_merged(root: Path, postgres: PostgresServer, new_database: Callable[..., str]) -> None:
    today = new_database()
    make_history(root, postgres.url(today))
    yesterday = postgres.url(new_database(today))
    save(root, 61, 62, catalog=postgres.url(today))
    with site_of(root, postgres.url(today)) as site:
        after = told(site)
        used = max(row.id for row in site.sql().generations())
    with pytest.raises(CatalogBehind, match="rebuild --merge"):
        ckptfmt.open(root, catalog=yesterday)
    assert repair_catalog(root, how="merge", catalog=yesterday).epoch == 2
    assert_sound(root, after, yesterday)
    goes_on(root, used, yesterday)


@pytest.mark.slow
def test_a_damaged_one_is_left_where_it_is(
    root: Path, postgres: PostgresServer, new_database: Callable[..., str]
) -> None:
    name = new_database()
    url = postgres.url(name)
    save(root, 10, catalog=url)
    postgres.run("DROP VIEW stalls", database=name)
    with pytest.raises(CatalogError, match=r"view stalls is missing.*db rebuild"):
        repair_catalog(root, how="merge", catalog=url)
    with pytest.raises(CatalogError, match=r"nothing is moved on a server.*pg_dump"):
        repair_catalog(root, how="rebuild", catalog=url)
    assert postgres.run("SELECT COUNT(*) FROM generations", database=name) == [(1,)]


@pytest.mark.parametrize("revision", [None, HEAD])
def test_one_whose_tables_were_dropped(
    root: Path, postgres: PostgresServer, new_database: Callable[..., str], revision: str | None
) -> None:
    """Without a row the table of the version holds nothing; with one, its database passes for one that has a schema."""
    name = new_database()
    url = postgres.url(name)
    save(root, 10, catalog=url)
    postgres.run("DROP SCHEMA public CASCADE; CREATE SCHEMA public", database=name)
    postgres.run("CREATE TABLE ckptfmt_alembic_version (version_num VARCHAR(32) PRIMARY KEY)", database=name)
    if revision is None:
        assert repair_catalog(root, how="rebuild", catalog=url).epoch == 2
        return
    postgres.run("INSERT INTO ckptfmt_alembic_version VALUES (%(revision)s)", database=name, revision=revision)
    with pytest.raises(CatalogError, match=r"nothing is moved on a server.*DROP SCHEMA"):
        repair_catalog(root, how="rebuild", catalog=url)


def test_a_verdict_with_a_reason_that_no_server_keeps(
    root: Path, postgres: PostgresServer, new_database: Callable[..., str]
) -> None:
    """JSON has NUL characters and halves of surrogate pairs; PostgreSQL has neither."""
    save(root, 10)
    with site_of(root) as site:
        row = abort(site)
        with closing(sqlite3.connect(root / "catalog.sqlite")) as connection, connection:
            connection.execute("UPDATE generations SET abort_reason = 'a' || char(0) || 'b' WHERE id = ?", (row.id,))
        sweep(site)
    (verdict,) = root.glob(f"runs/*/{row.key}/COMMIT.json")
    assert rb"a\u0000b" in verdict.read_bytes()
    second = postgres.url(new_database())
    repair_catalog(root, how="rebuild", catalog=second)
    with site_of(root, second) as site:
        found = site.sql().generation(row.id)
    assert found is not None
    assert found.abort_reason == r"a\x00b"


@pytest.mark.slow
def test_a_copied_root_gets_a_database_of_its_own(
    root: Path, tmp_path: Path, postgres: PostgresServer, new_database: Callable[..., str]
) -> None:
    first, second = postgres.url(new_database()), postgres.url(new_database())
    save(root, 10, 20, catalog=first)
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    with pytest.raises(Conflict, match="db adopt"):
        ckptfmt.open(copy, catalog=first)
    with pytest.raises(Conflict, match="one of its own"):
        repair_catalog(copy, how="adopt", catalog=first)
    repair_catalog(copy, how="adopt", catalog=second)
    assert save(copy, 30, catalog=second)[0] > 2
    assert len(save(root, 30, catalog=first)) == 1


def test_two_rebuilds_at_once(root: Path, postgres: PostgresServer, new_database: Callable[..., str]) -> None:
    save(root, 10, catalog=postgres.url(new_database()))
    second = postgres.url(new_database())
    with repair.exclusive(second), pytest.raises(Conflict, match="another process is rebuilding"):
        repair_catalog(root, how="rebuild", catalog=second)


@pytest.mark.slow
def test_a_copy_whose_original_is_out_of_sight(
    root: Path, tmp_path: Path, postgres: PostgresServer, new_database: Callable[..., str]
) -> None:
    """As on two hosts: each sees its own disk under the same path, and both see the server."""
    url = postgres.url(new_database())
    save(root, 10, run="a", catalog=url)
    save(root, 20, run="b", catalog=url)
    moved = root.rename(tmp_path / "moved")
    save(moved, 21, run="b", catalog=url)  # nothing is missing from it: it was moved
    copy = Path(shutil.copytree(moved, tmp_path / "copy"))
    original = moved.rename(tmp_path / "out of sight")
    (goes_on,) = save(copy, 22, run="b", catalog=url)  # so far it cannot be told from one that was moved
    copy.rename(tmp_path / "out of sight, too")
    with pytest.raises(Conflict, match=rf"does not hold generation {goes_on} of run 'b'.*db adopt") as refused:
        ckptfmt.open(original, catalog=url)
    assert refused.value.kind == "copied_root"
    assert ckptfmt.load(original, run="a", catalog=url)["seed"] == 10
    repair_catalog(original, how="adopt", catalog=postgres.url(new_database()))
