"""A PostgreSQL catalog among other processes, and a server that dies, stands still, or says no."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from forked import Forked, at_once
from port_calls import every_call
from postgres_rig import migrated_database
from tcp_proxy import tcp_proxy

from ckptfmt.catalog.location import display
from ckptfmt.catalog.open import open_catalog
from ckptfmt.errors import CatalogError, Conflict, InvalidInput, NotFound
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import DAMAGED, UNWRITABLE, Catalog
from ckptfmt.testing.catalogs import REPOSITORY, Job, MakeCatalog, RawSql, request

if TYPE_CHECKING:
    from postgres_rig import PostgresServer


def _open(url: str, mode: str = "w", *, create: bool = False, **given: Any) -> Catalog:
    return open_catalog(
        url, repository=REPOSITORY, display_url="/ckpts", mode="r" if mode == "r" else "w", create=create, **given
    )


@pytest.fixture
def mortal_url(mortal: PostgresServer) -> str:
    name = migrated_database(mortal)
    _open(mortal.url(name), create=True)
    return mortal.url(name)


# -- many processes -------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2, pytest.param(15, marks=pytest.mark.slow)])
def test_sixteen_processes_share_a_run(pg_url: str, pg_make_catalog: MakeCatalog, pg_raw: RawSql, rounds: int) -> None:
    """Ranks of one launch: each save is begun once, every report arrives, the order of commits has no gap."""
    import ckptfmt.catalog.sql  # noqa: F401  (imported once, forked sixteen times)

    catalog = pg_make_catalog()
    workers = 16
    job = Job.start(catalog, world_size=workers)

    def work(rank: int) -> int:
        mine = _open(pg_url)
        created = 0
        for n in range(rounds):
            ticket = mine.begin_save(
                job.launch.id,
                n=n,
                step=n,
                key=job.key(n),
                ranks=job.ranks,
                deadline_seconds=60,
                fence=job.fence,
                token=job.launch.token,
            )
            created += ticket.created
            mine.post(job.launch.id, f"save-{n}", rank, {"rank": rank})
            Job(mine, "llama", job.launch).report(ticket.generation.id, rank)
            while len(mine.posts(job.launch.id, f"save-{n}")) < workers:
                time.sleep(0.1)
            generation = ticket.generation
            while any(row.state != "durable" for row in mine.ranks(generation.id)):
                time.sleep(0.1)
            mine.mark_durable(generation.id, job.facts(generation), fence=job.fence)
            mine.commit(generation.id, fence=job.fence)
            mine.set_proven(generation.id)
        return created

    assert sum(at_once(work, workers)) == rounds
    found = catalog.generations()
    assert [generation.commit_seq for generation in found] == list(range(rounds, 0, -1))
    assert all(generation.proven_at is not None for generation in found)
    events = catalog.events(run="llama")
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.kind for event in events].count("commit") == rounds
    assert pg_raw("SELECT COUNT(*) FROM ranks WHERE state = 'durable'", {}) == [(workers * rounds,)]


def test_sixteen_processes_race_for_one_run(pg_url: str, pg_make_catalog: MakeCatalog) -> None:
    pg_make_catalog().ensure_run("llama", "llama-1")

    def work(number: int) -> str:
        try:
            _open(pg_url).acquire_launch("llama", request(pid=number), lease_seconds=60)
        except Conflict as error:
            return error.kind
        return "won"

    assert sorted(at_once(work, 16)) == ["launch_held"] * 15 + ["won"]
    assert pg_make_catalog().runs()[0].fence == 1


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_processes_that_start_on_an_empty_database(postgres: PostgresServer, isolation: str) -> None:
    """One makes the schema, the others wait for it and find it; the repository is there once."""
    name = postgres.new_database()
    postgres.run(f"ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'")
    url = postgres.url(name)

    def work(number: int) -> str:
        return _open(url, create=True).identity().uuid

    assert len(set(at_once(work, 4))) == 1
    assert len(_open(url).runs()) == 0


def test_a_fork_in_the_middle_of_a_transaction(pg_make_catalog: MakeCatalog, pg_raw: RawSql) -> None:
    """The child uses a connection of its own, and its end does not undo what the parent is writing."""
    catalog: Any = pg_make_catalog()
    with catalog._sessions.write() as session:
        session.execute("UPDATE repositories SET url = 'changed'")
        child = Forked(lambda: [run.name for run in catalog.runs()])
        assert child.result() == []
    assert pg_raw("SELECT DISTINCT url FROM repositories", {}) == [("changed",)]


def test_children_of_a_process_that_has_used_the_server(pg_make_catalog: MakeCatalog) -> None:
    """None of them uses, or closes, what the parent had: each has connections of its own."""
    catalog = pg_make_catalog()
    job = Job.start(catalog)

    def work(number: int) -> int:
        for n in range(12):
            catalog.note("llama", generation_id=None, kind="child", detail={"child": number, "n": n})
        return os.getpid()

    pids = at_once(work, 4)
    noted = [event for event in catalog.events() if event.kind == "child"]
    assert len({(event.detail["child"], event.detail["n"]) for event in noted}) == len(noted) == 48
    assert {event.actor.rpartition(":")[2] for event in noted} == {str(pid) for pid in pids}
    assert job.proven().commit_seq == 1


def test_a_session_is_left_as_it_was(pg_make_catalog: MakeCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a pooler the next transaction, perhaps somebody else's, gets the same one."""
    from ckptfmt.catalog.postgres_connecting import BoundedConnection

    kept: list[BoundedConnection] = []
    close = BoundedConnection.close
    monkeypatch.setattr(BoundedConnection, "close", lambda connection: kept.append(connection))
    catalog = pg_make_catalog()
    job = Job.start(catalog)
    job.proven()
    catalog.generations()
    monkeypatch.setattr(BoundedConnection, "close", close)
    names = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout", "synchronous_commit")
    assert len(kept) > 5
    for connection in kept:
        if connection.info.transaction_status.name != "IDLE":  # a reader's, whose transaction ends with it
            connection.execute("ROLLBACK")
        for name in names:
            ((value,),) = connection.execute(
                f"SELECT current_setting('{name}') = boot_val FROM pg_settings WHERE name = '{name}'"
            ).fetchall()
            assert value, name
        query = "SELECT COUNT(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'"
        assert connection.execute(query).fetchall() == [(0,)]
        assert connection.execute("SELECT COUNT(*) FROM pg_prepared_statements").fetchall() == [(0,)]
        connection.close()


def test_who_only_compares_a_schema_may_take_longer_over_it(pg_url: str, pg_make_catalog: MakeCatalog) -> None:
    """On a busy machine the process stood still for more than the ten seconds that a writer may."""
    from ckptfmt.catalog.postgres import PostgresSessions

    pg_make_catalog()
    sessions = PostgresSessions(pg_url, mode="w")
    shown = []
    for write in (False, True):
        with sessions.alembic(write=write) as connection:
            shown.append(connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar())
    assert shown == ["1min", "10s"]


def test_no_connection_stays_between_calls(pg_make_catalog: MakeCatalog, pg_raw: RawSql, pg_database: str) -> None:
    catalog = pg_make_catalog()
    Job.start(catalog).proven()
    catalog.view("latest_committed")
    until = time.monotonic() + 10
    query = "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = :name AND application_name = 'ckptfmt'"
    while pg_raw(query, {"name": pg_database}) != [(0,)]:  # a server process takes a moment to end
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_lock_that_is_not_given_back(
    postgres: PostgresServer, pg_database: str, pg_make_catalog: MakeCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    from ckptfmt.catalog import postgres as sessions

    monkeypatch.setattr(sessions, "_WRITE", sessions._WRITE.replace("lock_timeout = '5s'", "lock_timeout = '200ms'"))
    catalog = pg_make_catalog()
    job = Job.start(catalog)
    generation = job.durable()
    with psycopg.connect(postgres.url(pg_database)) as holder:
        holder.execute("SELECT * FROM runs FOR UPDATE")
        with pytest.raises(CatalogError, match="kept a row locked") as caught:
            catalog.commit(generation.id, fence=job.fence)
        assert (caught.value.kind, caught.value.transient) == ("catalog_busy", True)
        assert catalog.generation(generation.id) == generation
    assert catalog.commit(generation.id, fence=job.fence).commit_seq == 1


# -- a server that dies ---------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_server_that_is_killed_between_calls_is_waited_for(mortal: PostgresServer, mortal_url: str) -> None:
    catalog = _open(mortal_url)
    job = Job.start(catalog)
    done = job.proven(1)
    mortal.kill()
    starting = threading.Timer(0.5, mortal.start)
    starting.start()
    try:
        generation = job.durable(2)
    finally:
        starting.join()
    assert catalog.commit(generation.id, fence=job.fence).commit_seq == 2
    assert catalog.generation(done.id) == done


@pytest.mark.parametrize("step", ["begin", "written", "durable", "committed"])
def test_a_server_killed_in_the_middle_of_a_transaction(
    mortal: PostgresServer, mortal_url: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was acknowledged is there, what was not is done by the repeated call, once."""
    catalog: Any = _open(mortal_url)
    job = Job.start(catalog)
    first = job.proven(1)
    generation = getattr(job, step)(2)
    calls = {
        "begin": lambda: job.report(generation.id, 0),
        "written": lambda: catalog.mark_durable(generation.id, job.facts(generation), fence=job.fence),
        "durable": lambda: catalog.commit(generation.id, fence=job.fence),
        "committed": lambda: catalog.set_proven(generation.id),
    }
    sessions = catalog._sessions
    commit = sessions._commit

    def killed(connection: Any) -> None:
        monkeypatch.setattr(sessions, "_commit", commit)
        mortal.kill()
        commit(connection)

    monkeypatch.setattr(sessions, "_commit", killed)
    with pytest.raises(CatalogError) as caught:
        calls[step]()
    assert (caught.value.kind, caught.value.transient) == ("catalog_unreachable", True)
    mortal.start()
    calls[step]()
    for other in list(calls)[list(calls).index(step) + 1 :]:
        calls[other]()
    found = catalog.generation(generation.id)
    assert (found.state, found.commit_seq, found.proven_at is not None) == (State.COMMITTED, 2, True)
    assert catalog.generation(first.id) == first
    assert [event.kind for event in catalog.events(generation_id=generation.id)] == [
        "begin",
        "durable",
        "commit",
        "prove",
    ]


def test_a_server_that_is_not_there(mortal_url: str, mortal: PostgresServer) -> None:
    catalog = _open(mortal_url, busy_seconds=0.3)
    mortal.kill()
    try:
        begun = time.monotonic()
        with pytest.raises(CatalogError, match="nothing is established") as caught:
            catalog.runs()
        assert time.monotonic() - begun < 10
        assert (caught.value.kind, caught.value.transient) == ("catalog_unreachable", True)
        with pytest.raises(CatalogError) as caught:
            _open(mortal_url, busy_seconds=0.3)
        assert caught.value.transient
    finally:
        mortal.start()
    assert catalog.runs() == []


def test_a_server_that_stands_still(mortal: PostgresServer, mortal_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel keeps its connections alive; the wait ends nevertheless."""
    from ckptfmt.catalog import postgres_connecting

    monkeypatch.setattr(postgres_connecting, "ANSWER_SECONDS", 0.5)
    catalog: Any = _open(mortal_url)
    asked = catalog._sessions._commit

    def paused(connection: Any) -> None:
        mortal.pause()
        asked(connection)

    monkeypatch.setattr(catalog._sessions, "_commit", paused)
    with pytest.raises(CatalogError, match="has not answered") as caught:
        catalog.ensure_run("llama", "llama-1")
    monkeypatch.setattr(catalog._sessions, "_commit", asked)
    mortal.go_on()
    assert caught.value.transient
    assert catalog.ensure_run("llama", "llama-1").name == "llama"
    assert len(catalog.runs()) == 1


def test_no_foreign_exception_escapes(pg_url: str, pg_make_catalog: MakeCatalog, postgres: PostgresServer) -> None:
    """The network goes for good, after the catalog was opened."""
    past = pg_make_catalog()
    with tcp_proxy(postgres.port) as proxy:
        catalog = _open(pg_url.replace(f":{postgres.port}/", f":{proxy.port}/"), busy_seconds=0.01)
        proxy.refusing = True
        calls = every_call_of(catalog, past)
        for name, call in calls.items():
            with pytest.raises(CatalogError) as caught:
                call()
            assert (caught.value.kind, caught.value.transient) == ("catalog_unreachable", True), name


def every_call_of(catalog: Catalog, past: Catalog) -> dict[str, Any]:
    """The calls of ``catalog``, prepared past it."""

    class Apart:
        def __getattr__(self, name: str) -> Any:
            return getattr(catalog, name)

        def identity(self) -> Any:
            return past.identity() if preparing else catalog.identity()

    preparing = True
    calls = every_call(Apart(), Job.start(past, "other"))
    preparing = False
    return calls


# -- a server that says no ------------------------------------------------------------------------------
def test_a_standby_is_read_and_not_written(mortal: PostgresServer, tmp_path: Path) -> None:
    """A server that starts from a copy of the files, with a signal that it is to follow another one."""
    name = migrated_database(mortal)
    url = mortal.url(name)
    job = Job.start(_open(url, create=True))
    job.proven()
    mortal.stop()
    signal_file = mortal.data / "standby.signal"
    signal_file.touch()
    try:
        mortal.start()
        reading = _open(url, "r")
        assert [generation.step for generation in reading.generations()] == [0]
        with pytest.raises(CatalogError, match="standby") as caught:
            _open(url).ensure_run("new", "new-1")
        assert (caught.value.kind in UNWRITABLE, caught.value.transient) == (True, True)
    finally:
        mortal.stop()
        signal_file.unlink()
        mortal.start()


def test_what_a_role_may_not_write(postgres: PostgresServer, pg_database: str, pg_make_catalog: MakeCatalog) -> None:
    Job.start(pg_make_catalog()).proven()
    postgres.run("CREATE ROLE watcher LOGIN")
    try:
        postgres.run("GRANT SELECT ON ALL TABLES IN SCHEMA public TO watcher", database=pg_database)
        url = postgres.url(pg_database).replace("postgres@", "watcher@")
        assert len(_open(url, "r").generations()) == 1
        with pytest.raises(CatalogError, match="permission denied") as caught:
            _open(url).ensure_run("new", "new-1")
        assert (caught.value.kind in UNWRITABLE, caught.value.transient) == (True, False)
    finally:
        postgres.run("REASSIGN OWNED BY watcher TO postgres; DROP OWNED BY watcher", database=pg_database)
        postgres.run("DROP ROLE watcher")


def test_a_refused_rule_is_told_as_such(pg_make_catalog: MakeCatalog, pg_raw: RawSql) -> None:
    catalog = pg_make_catalog()
    job = Job.start(catalog)
    generation = job.durable()
    pg_raw(
        "CREATE FUNCTION foreign_hand() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not on my watch' "
        "USING ERRCODE = 'integrity_constraint_violation'; END $$",
        {},
    )
    pg_raw("CREATE TRIGGER foreign_hand BEFORE UPDATE ON runs FOR EACH ROW EXECUTE FUNCTION foreign_hand()", {})
    with pytest.raises(CatalogError, match="not on my watch") as caught:
        catalog.commit(generation.id, fence=job.fence)
    assert (caught.value.kind, caught.value.transient) == ("catalog_rule", False)
    assert catalog.generation(generation.id) == generation


def test_a_table_that_is_gone(pg_make_catalog: MakeCatalog, pg_raw: RawSql) -> None:
    catalog = pg_make_catalog()
    pg_raw("DROP TABLE messages", {})
    with pytest.raises(CatalogError, match="db check") as caught:
        catalog.posts(1, "a")
    assert (caught.value.kind, caught.value.transient) == (DAMAGED, False)


def test_databases_and_roles_that_are_not_there(postgres: PostgresServer) -> None:
    for url, kind in (
        (postgres.url("nowhere"), "catalog_missing"),
        (postgres.url().replace("postgres@", "nobody@"), "catalog_access"),
    ):
        begun = time.monotonic()
        with pytest.raises(CatalogError) as caught:
            _open(url, create=True)
        assert (caught.value.kind, caught.value.transient) == (kind, False)
        assert time.monotonic() - begun < 5, "no use to try again"


def test_another_repository_and_another_database(postgres: PostgresServer, pg_url: str) -> None:
    with pytest.raises(NotFound, match="does not know the repository"):
        open_catalog(pg_url, repository="stranger", display_url="/c", mode="w", create=False)
    name = postgres.new_database()
    postgres.run("CREATE TABLE alembic_version (version_num TEXT)", database=name)
    with pytest.raises(CatalogError, match=r"something else \(alembic_version") as caught:
        _open(postgres.url(name), create=True)
    assert caught.value.kind == "catalog_foreign"
    empty = postgres.url(postgres.new_database())
    with pytest.raises(CatalogError, match="db upgrade"):
        _open(empty)


def test_passwords_are_not_told(postgres: PostgresServer, caplog: pytest.LogCaptureFixture) -> None:
    url = postgres.url("nowhere").replace("postgres@", "postgres:s3cr3t@")
    with caplog.at_level(logging.DEBUG), pytest.raises(CatalogError) as caught:
        _open(url)
    assert "s3cr3t" not in f"{caught.value}{caplog.text}"
    assert "postgres:***@127.0.0.1" in str(caught.value)
    for bad in (
        "postgresql://u:s3cr%ZZt@h/db",
        "postgresql://h/db?password=s3cr&x=y",
        "postgresql:u:s3cr@h/db",
        "mysql://u:s3cr@h:port/db",
        "postgresql://u:s3cr\udc80@h/db",
    ):
        with pytest.raises(InvalidInput, match="not a catalog URL") as invalid:
            _open(bad)
        assert "s3cr" not in str(invalid.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://alice:secret@db.example/ckpts", "postgresql://alice:***@db.example/ckpts"),
        ("postgresql+psycopg://alice:se@cret@db/c", "postgresql+psycopg://alice:***@db/c"),
        ("postgresql://alice@db:5433/c", "postgresql://alice@db:5433/c"),
        ("postgresql:///c?host=/run&password=secret&user=a", "postgresql:///c?host=/run&password=***&user=a"),
        ("postgresql://a:b@h1:1,h2:2/c", "postgresql://a:***@h1:1,h2:2/c"),
        ("postgresql://db.example/ckpts?user=t&password=se@cret", "postgresql://db.example/ckpts?user=t&password=***"),
        ("postgresql://db:5432/ckpts?password=se@cret", "postgresql://db:5432/ckpts?password=***"),
        ("postgresql://a:b@h/c?sslpassword=se:c@ret", "postgresql://a:***@h/c?sslpassword=***"),
        ("postgresql://h/c?oauth_client_secret=secret", "postgresql://h/c?oauth_client_secret=***"),
        ("mysql://alice:secret@h/c?password=se@cret", "mysql://alice:***@h/c?password=***"),
    ],
)
def test_how_a_url_is_shown(url: str, shown: str) -> None:
    assert display(url) == shown


def test_who_may_log_in(
    mortal: PostgresServer, mortal_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The password may stand in the URL, in the environment, or in a file."""
    rules = mortal.data / "pg_hba.conf"
    rules.write_text(f"host all alice 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
    mortal.run("CREATE ROLE alice LOGIN SUPERUSER PASSWORD 'w0nder' CONNECTION LIMIT 5")
    mortal.run("SELECT pg_reload_conf()")
    url = mortal_url.replace("postgres@", "alice@")
    passwords = tmp_path / "pgpass"
    passwords.write_text(f"127.0.0.1:{mortal.port}:*:alice:w0nder\n")
    passwords.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))
    for wrong in (url, url.replace("alice@", "alice:wrong@")):
        begun = time.monotonic()
        with pytest.raises(CatalogError, match="PGPASSWORD") as caught:
            _open(wrong)
        assert (caught.value.kind, caught.value.transient) == ("catalog_access", False)
        assert time.monotonic() - begun < 5, "no use to try again"
    assert _open(url.replace("alice@", "alice:w0nder@")).runs() == []
    assert _open(url.replace("alice@", "alice:w0nder@").replace("postgresql:", "postgresql+psycopg:")).runs() == []
    with monkeypatch.context() as environment:
        environment.setenv("PGPASSWORD", "w0nder")
        assert _open(url).runs() == []
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    assert _open(url).runs() == []
    mortal.run("ALTER ROLE alice NOSUPERUSER CONNECTION LIMIT 0")
    with pytest.raises(CatalogError, match="max_connections") as caught:
        _open(url, busy_seconds=0.2)
    assert (caught.value.kind, caught.value.transient) == ("catalog_busy", True)


def test_without_psycopg_the_extra_is_named(pg_url: str) -> None:
    code = f"""
import sys
sys.modules["psycopg"] = None
from ckptfmt.catalog.open import open_catalog
from ckptfmt.errors import InvalidInput
try:
    open_catalog({pg_url!r}, repository="r", display_url="/c", mode="r", create=False)
except InvalidInput as error:
    assert "pip install 'ckptfmt[postgres]'" in str(error), error
else:
    raise SystemExit("opened")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr


def test_reading_imports_neither_alembic_nor_sqlalchemy(pg_url: str) -> None:
    code = f"""
import sys
from ckptfmt.catalog.open import open_catalog
for mode, create in (("r", False), ("w", False), ("w", True)):
    open_catalog({pg_url!r}, repository={REPOSITORY!r}, display_url="/ckpts", mode=mode, create=create).runs()
heavy = [name for name in ("alembic", "sqlalchemy", "numpy", "torch") if name in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr


def test_a_server_that_forgets_is_warned_about(pg_make_catalog: MakeCatalog, caplog: pytest.LogCaptureFixture) -> None:
    catalog = pg_make_catalog()
    with caplog.at_level(logging.WARNING, logger="ckptfmt"):
        catalog.ensure_run("a", "a-1")
        catalog.ensure_run("b", "b-1")
    assert caplog.text.count("fsync=off") == 1


def test_settings_of_a_role_change_nothing(
    postgres: PostgresServer, pg_database: str, pg_make_catalog: MakeCatalog
) -> None:
    settings = {
        "datestyle": "SQL, DMY",
        "timezone": "Asia/Kathmandu",
        "extra_float_digits": "-10",
        "default_transaction_isolation": "serializable",
        "synchronous_commit": "off",
        "intervalstyle": "iso_8601",
        "bytea_output": "escape",
    }
    for name, value in settings.items():
        postgres.run(f"ALTER DATABASE {pg_database} SET {name} = '{value}'")
    catalog: Any = pg_make_catalog()
    job = Job.start(catalog)
    done = job.proven(1)
    assert abs((catalog.database_now() - done.created_at).total_seconds()) < 60
    assert done.stall_seconds == 0.25
    assert catalog.view("stalls")[0]["created_at"] == done.created_at
    with catalog._sessions.write() as session:
        assert session.rows("SELECT current_setting('synchronous_commit')") == [("on",)]
        assert session.rows("SELECT current_setting('transaction_isolation')") == [("read committed",)]
