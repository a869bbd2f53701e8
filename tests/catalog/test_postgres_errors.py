"""What the errors of a PostgreSQL server are told as: the table of spec/catalog.md, asked of a server."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psycopg
import pytest
from test_catalog_spec import SPEC

from ckptfmt.catalog import postgres_failures
from ckptfmt.catalog.failures import translated
from ckptfmt.catalog.open import open_catalog
from ckptfmt.catalog.postgres import PostgresSessions
from ckptfmt.errors import CatalogError
from ckptfmt.testing.catalogs import REPOSITORY, MakeCatalog, RawSql

if TYPE_CHECKING:
    from postgres_rig import PostgresServer


def _table() -> dict[str, tuple[str, bool]]:
    """Kind of the error, and whether it is transient, by SQLSTATE or its beginning."""
    rows = re.split(r"^\| kind of the error \|.*\n\|.*\n", SPEC, maxsplit=1, flags=re.MULTILINE)[1].split("\n\n")[0]
    found: dict[str, tuple[str, bool]] = {}
    for row in rows.splitlines():
        kind, transient, codes = (cell.strip() for cell in row.strip("|").split(" | "))
        for code in re.findall(r"\b(?:\d[0-9A-Z]{1,4}|XX\d{3})\b", codes):
            assert code not in found
            found[code] = (kind.strip("`"), transient == "yes")
    return found


TABLE = _table()


def _written(state: str) -> tuple[str, bool]:
    """What the table says of a code."""
    return next((TABLE[state[:length]] for length in (5, 3, 2) if state[:length] in TABLE), ("catalog", False))


@pytest.fixture
def sessions(pg_url: str) -> Iterator[PostgresSessions]:
    sessions = PostgresSessions(pg_url, mode="w")
    yield sessions
    sessions.close()


def _run(sessions: PostgresSessions, *statements: str) -> None:
    with translated("the catalog"), sessions.write() as session:
        for statement in statements:
            session.execute(statement)


def _told(error: CatalogError) -> tuple[str, bool, str]:
    assert isinstance(error.__cause__, psycopg.Error)
    return error.kind, error.transient, error.__cause__.sqlstate or ""


def test_the_table_is_the_one_of_the_code() -> None:
    """Whatever the code tells apart stands there, and nothing else does."""
    known = {state.ljust(5, "0") for state in (*postgres_failures._BY_STATE, *TABLE, "0A000", "42601", "XX000")}
    for state in sorted(known):
        meaning = postgres_failures._by_state(state)
        assert (meaning.kind, meaning.transient) == _written(state), state


def test_a_server_that_raises_each_of_them(sessions: PostgresSessions) -> None:
    assert len(TABLE) > 20
    for code in TABLE:
        state = code.ljust(5, "0")
        with pytest.raises(CatalogError, match="with my own words") as caught:
            _run(sessions, f"DO $$ BEGIN RAISE EXCEPTION 'with my own words' USING ERRCODE = '{state}'; END $$")
        assert _told(caught.value) == (*_written(state), state)


@pytest.mark.parametrize(
    ("state", "statements"),
    [
        ("22003", ["SELECT CAST(9999999999 AS INTEGER)"]),
        ("23503", ["INSERT INTO messages (launch_id, topic, rank, body, at) VALUES (999, 't', 0, '{}', now())"]),
        ("25006", ["SET LOCAL transaction_read_only = on", "DELETE FROM messages"]),
        ("42703", ["SELECT nothing FROM runs"]),
        ("42883", ["SELECT nothing()"]),
        ("42P01", ["SELECT 1 FROM nowhere"]),
        ("57014", ["SET LOCAL statement_timeout = 1", "SELECT pg_sleep(60)"]),
        ("57P01", ["SELECT pg_terminate_backend(pg_backend_pid())"]),
    ],
)
def test_what_a_statement_may_meet(sessions: PostgresSessions, state: str, statements: list[str]) -> None:
    with pytest.raises(CatalogError) as caught:
        _run(sessions, *statements)
    assert _told(caught.value) == (*_written(state), state)


def test_a_process_that_stands_still_in_a_transaction(sessions: PostgresSessions, pg_raw: RawSql) -> None:

    def stand_still() -> None:
        with translated("the catalog"), sessions.write() as session:
            ((pid,),) = session.rows("SELECT pg_backend_pid()")
            session.execute("SET LOCAL idle_in_transaction_session_timeout = 1")
            until = time.monotonic() + 30
            while pg_raw("SELECT 1 FROM pg_stat_activity WHERE pid = :pid", {"pid": pid}):
                assert time.monotonic() < until
                time.sleep(0.02)
            session.execute("DELETE FROM messages")

    with pytest.raises(CatalogError) as caught:
        stand_still()
    # The reason is in what the server sent last, which is lost where writing to it fails first.
    assert _told(caught.value) in [(*_written("25P03"), "25P03"), (*_written("08"), "")]


@pytest.mark.slow
def test_a_deadlock(sessions: PostgresSessions, pg_make_catalog: MakeCatalog) -> None:
    """One of the two is undone and told so, the other one goes on."""
    catalog = pg_make_catalog()
    for name in ("a", "b"):
        catalog.ensure_run(name, name)
    met = threading.Barrier(2)

    def both(first: str, second: str) -> tuple[str, bool, str] | None:
        try:
            with translated("the catalog"), sessions.write() as session:
                session.execute(f"UPDATE runs SET retention_hold = TRUE WHERE name = '{first}'")
                met.wait(30)
                session.execute(f"UPDATE runs SET retention_hold = TRUE WHERE name = '{second}'")
        except CatalogError as error:
            return _told(error)
        return None

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(both, "ab", "ba"))
    assert sorted(answers, key=str) == [(*_written("40P01"), "40P01"), None]


def test_a_role_without_a_schema(postgres: PostgresServer) -> None:
    url = f"{postgres.url(postgres.new_database())}&options=-csearch_path%3Dnowhere"
    with pytest.raises(CatalogError, match="search_path") as caught:
        open_catalog(url, repository=REPOSITORY, display_url="/ckpts", mode="w", create=True)
    assert (caught.value.kind, caught.value.transient) == _written("3F000")
