"""Migrations, check and condition of a PostgreSQL catalog."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest
import second_revision
from alembic import command
from forked import at_once

from ckptfmt.catalog import repair, upgrade
from ckptfmt.catalog.database import database_of
from ckptfmt.catalog.open import open_catalog
from ckptfmt.catalog.revision import HEAD
from ckptfmt.catalog.schema import metadata
from ckptfmt.errors import CatalogError, CkptError, Conflict, InvalidInput
from ckptfmt.ports.catalog import DAMAGED
from ckptfmt.testing.catalogs import REPOSITORY, Job, MakeCatalog, RawSql

if TYPE_CHECKING:
    from postgres_rig import PostgresServer


@pytest.fixture
def empty_url(postgres: PostgresServer) -> str:
    """A database that holds nothing."""
    return postgres.url(postgres.new_database())


def _upgrade_to(url: str, revision: str) -> None:
    with database_of(url).migrating() as (connection, _):
        command.upgrade(upgrade.alembic_config(connection), revision)


def test_an_empty_database_is_upgraded(empty_url: str) -> None:
    assert upgrade.current(empty_url) is None
    assert upgrade.check(empty_url).problems != ()
    assert upgrade.upgrade(empty_url) == HEAD
    assert upgrade.current(empty_url) == HEAD
    assert upgrade.check(empty_url).problems == ()
    assert upgrade.upgrade(empty_url) == HEAD


def test_a_catalog_of_the_first_revision_is_upgraded(empty_url: str, postgres: PostgresServer) -> None:
    _upgrade_to(empty_url, "0001")
    assert upgrade.current(empty_url) == "0001"
    with pytest.raises(CatalogError, match="db upgrade") as caught:
        open_catalog(empty_url, repository=REPOSITORY, display_url="/c", mode="w", create=True)
    assert caught.value.kind == "catalog_older"
    ((uuid,),) = postgres.run("SELECT uuid FROM catalog_meta", database=_name(empty_url))
    assert upgrade.upgrade(empty_url) == HEAD
    catalog = open_catalog(empty_url, repository=REPOSITORY, display_url="/c", mode="w", create=True)
    assert catalog.identity().uuid == uuid
    assert upgrade.check(empty_url).problems == ()


def test_a_catalog_of_the_second_revision_is_upgraded(empty_url: str, postgres: PostgresServer) -> None:
    """Views are replaced and not dropped: those who may read them still may, and what stands on them stays."""
    _upgrade_to(empty_url, "0002")

    def run(sql: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        return postgres.run(re.sub(r"(?<!:):(\w+)", r"%(\1)s", sql), database=_name(empty_url), **parameters)

    before = second_revision.fill(run)
    watcher = f"watcher_{_name(empty_url)}"
    run(f"CREATE ROLE {watcher}", {})
    run(f"GRANT SELECT ON stalls, in_flight TO {watcher}", {})
    run("CREATE VIEW mine AS SELECT run, stall_seconds FROM stalls", {})
    assert upgrade.upgrade(empty_url) == HEAD
    second_revision.check(run, before)
    (problem,) = upgrade.check(empty_url).problems
    assert "view mine is none of ckptfmt's" in problem
    for view in ("stalls", "in_flight"):
        assert run(f"SELECT has_table_privilege('{watcher}', '{view}', 'SELECT')", {}) == [(True,)]
    assert run("SELECT * FROM mine", {}) == [("llama", 0.5), ("llama", 0.5)]
    second_revision.check_goes_on(
        open_catalog(empty_url, repository=REPOSITORY, display_url="/ckpts", mode="w", create=False)
    )


def test_four_upgrades_at_once(empty_url: str) -> None:
    def work(number: int) -> str:
        return upgrade.upgrade(empty_url)

    assert at_once(work, 4) == [HEAD] * 4
    assert upgrade.check(empty_url).problems == ()


def test_a_failed_migration_leaves_nothing(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptfmt.migrations import r0002

    monkeypatch.setattr(r0002, "POSTGRESQL", (*r0002.POSTGRESQL, "CREATE TABLE broken ("))
    with pytest.raises(CkptError):
        upgrade.upgrade(empty_url)
    monkeypatch.undo()
    assert upgrade.current(empty_url) is None
    assert upgrade.upgrade(empty_url) == HEAD


def test_a_backup_names_its_own_tool(pg_url: str) -> None:
    with pytest.raises(InvalidInput, match="pg_dump"):
        upgrade.backup(pg_url, "copy")


def test_a_sound_catalog_has_no_problem(pg_url: str, pg_make_catalog: MakeCatalog) -> None:
    Job.start(pg_make_catalog()).retired()
    found = upgrade.check(pg_url)
    assert (found.revision, found.problems) == (HEAD, ())
    assert repair.condition(pg_url).state == "sound"


_SAME_GUARD = "CREATE TRIGGER ckptfmt_runs_guard {0} ON runs FOR EACH ROW EXECUTE FUNCTION ckptfmt_runs_guard()"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("DROP TRIGGER ckptfmt_events_guard ON events", "trigger ckptfmt_events_guard is missing"),
        ("ALTER TABLE events DISABLE TRIGGER ckptfmt_events_guard", "trigger ckptfmt_events_guard was changed"),
        (
            f"DROP TRIGGER ckptfmt_runs_guard ON runs; {_SAME_GUARD.format('AFTER INSERT OR UPDATE OR DELETE')}",
            "trigger ckptfmt_runs_guard was changed",
        ),
        (
            f"DROP TRIGGER ckptfmt_runs_guard ON runs; {_SAME_GUARD.format('BEFORE UPDATE OF name')}",
            "trigger ckptfmt_runs_guard was changed",
        ),
        (
            "CREATE OR REPLACE FUNCTION ckptfmt_runs_guard() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RETURN NEW; END $$",
            r"function ckptfmt_runs_guard\(\) was changed",
        ),
        ("DROP VIEW stalls", "view stalls is missing"),
        ("DROP VIEW stalls; CREATE VIEW stalls AS SELECT 1 AS repository", "view stalls was changed"),
        ("DROP INDEX ix_readers_generation_id", "drifted.*ix_readers_generation_id"),
        ("ALTER TABLE ranks DROP CONSTRAINT ck_ranks_durable_part", "constraint ck_ranks_durable_part.*missing"),
        ("ALTER TABLE runs DROP COLUMN key CASCADE", "drifted|constraint"),
        ("ALTER TABLE ranks ALTER COLUMN nbytes TYPE INTEGER", "drifted|view"),
        ("DROP TABLE messages", "drifted.*messages"),
        ("DELETE FROM catalog_meta", "catalog_meta"),
    ],
)
def test_check_finds_damage(pg_url: str, pg_raw: RawSql, damage: str, problem: str) -> None:
    if "nbytes TYPE" in damage:  # views stand on the column
        pg_raw("DROP VIEW stalls, space_by_run", {})
    pg_raw(damage, {})
    if "catalog_meta" not in damage:
        assert re.search(problem, "\n".join(upgrade.check(pg_url).problems))
    condition = repair.condition(pg_url)
    assert condition.state == "damaged"
    assert re.search(problem, condition.why)
    with pytest.raises(CatalogError, match=r"pg_dump.*createdb") as caught:
        repair.set_aside(pg_url)
    assert caught.value.kind == DAMAGED


@pytest.mark.parametrize(
    "made",
    [
        "CREATE TABLE mine (x INT)",
        "CREATE VIEW mine AS SELECT step FROM generations",
        "CREATE INDEX mine ON events (actor)",
        "ALTER TABLE runs ADD COLUMN mine TEXT",
    ],
)
def test_what_is_somebodys_own_is_told_and_no_damage(pg_url: str, pg_raw: RawSql, made: str) -> None:
    pg_raw(made, {})
    problems = upgrade.check(pg_url).problems
    assert len(problems) == 1
    assert "mine" in problems[0]
    assert repair.condition(pg_url).state == "sound"


@pytest.mark.parametrize(
    "tables", [["catalog_meta", "messages"], pytest.param(sorted(metadata.tables), marks=pytest.mark.slow)]
)
def test_every_table_counts(pg_url: str, pg_raw: RawSql, tables: list[str]) -> None:
    for table in tables:
        pg_raw(f"ALTER TABLE {table} RENAME TO elsewhere", {})
        assert repair.condition(pg_url).state == "damaged", table
        pg_raw(f"ALTER TABLE elsewhere RENAME TO {table}", {})
    assert repair.condition(pg_url).state == "sound"


def test_an_empty_database_needs_not_be_set_aside(empty_url: str) -> None:
    assert repair.condition(empty_url).state == "empty"
    assert repair.set_aside(empty_url) is None


def test_only_one_rebuilds(pg_url: str) -> None:
    def work(number: int) -> str:
        try:
            with repair.exclusive(pg_url):
                return "alone"
        except Conflict as error:
            return error.kind

    with repair.exclusive(pg_url):
        assert at_once(work, 2) == ["rebuild_running"] * 2
    with repair.exclusive(pg_url):
        pass


def test_a_schema_of_its_own(postgres: PostgresServer) -> None:
    """The first schema of the search path holds the catalog; what others have in the database is left alone."""
    name = postgres.new_database()
    postgres.run("CREATE TABLE precious (x INT)", database=name)
    postgres.run("CREATE SCHEMA ckpts", database=name)
    url = f"{postgres.url(name)}&options=-csearch_path%3Dckpts"
    catalog = open_catalog(url, repository=REPOSITORY, display_url="/c", mode="w", create=True)
    Job.start(catalog).proven()
    assert upgrade.check(url).problems == ()
    found = postgres.run("SELECT COUNT(*) FROM pg_tables WHERE schemaname = 'ckpts'", database=name)
    assert found == [(len(metadata.tables) + 1,)]


def _name(url: str) -> str:
    return url.rpartition("/")[2].partition("?")[0]


def test_the_command_line(pg_url: str, empty_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    from ckptfmt.cli.main import main

    secret = pg_url.replace("postgres@", "postgres:s3cr3t@")
    calls = {("check", secret): 0, ("current", secret): 0, ("upgrade", empty_url): 0, ("backup", secret, "copy"): 2}
    for arguments, code in calls.items():
        with pytest.raises(SystemExit) as ended:
            main(["db", *arguments])
        assert ended.value.code == code
    told = "".join(capsys.readouterr())
    assert "sound" in told
    assert "upgraded from nothing" in told
    assert "pg_dump" in told
    assert "postgres:***@" in told
    assert "s3cr3t" not in told
