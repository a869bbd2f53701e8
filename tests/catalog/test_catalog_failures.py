"""No exception of the driver leaves the catalog; a lost answer can be asked for again."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from port_calls import every_call

from ckptfmt.catalog.snapshot import SqliteSession
from ckptfmt.errors import CatalogError, CkptError
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.testing.catalogs import Job, MakeCatalog, RawSql, request


def test_the_calls_are_all_methods_of_the_port(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog()
    port = {name for name in vars(Catalog) if not name.startswith("_")} - {"url", "read_only", "close"}
    assert set(every_call(catalog, Job.start(catalog))) == port


@pytest.mark.parametrize("damage", ["not a database", "gone", "tables gone", "disk error"])
def test_no_foreign_exception_escapes(
    make_catalog: MakeCatalog, database: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    catalog = make_catalog()
    calls = every_call(catalog, Job.start(catalog))
    if damage == "not a database":
        database.write_bytes(b"no database" * 1000)
    elif damage == "gone":
        database.unlink()
    elif damage == "tables gone":
        database.unlink()
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("CREATE TABLE other (x)")
    else:
        _fail_every_statement(monkeypatch)
    for name, call in calls.items():
        if damage == "tables gone" and name == "database_now":
            continue
        with pytest.raises(CatalogError) as caught:
            call()
        assert str(database) in str(caught.value), name
        assert ":" in str(caught.value).rpartition(")")[2], "the next step is named"
        assert isinstance(caught.value.__cause__, Exception)
    if damage == "gone":
        assert not database.exists()


def _fail_every_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(SqliteSession, "rows", fail)
    monkeypatch.setattr(SqliteSession, "execute", fail)


def test_a_refused_rule_is_told_as_such(make_catalog: MakeCatalog, raw: RawSql) -> None:
    """A trigger that fires under the library means a bug or a foreign hand: the message is the trigger's."""
    catalog = make_catalog()
    job = Job.start(catalog)
    generation = job.durable()
    raw(
        "CREATE TRIGGER foreign_hand BEFORE UPDATE ON runs BEGIN SELECT RAISE(ABORT, 'not on my watch'); END",
        {},
    )
    with pytest.raises(CatalogError, match="not on my watch") as caught:
        catalog.commit(generation.id, fence=job.fence)
    assert (caught.value.kind, caught.value.transient) == ("catalog_rule", False)
    assert catalog.generation(generation.id) == generation


class _LostAnswer:
    """Makes every COMMIT succeed in the database and fail for the caller, ``times`` times."""

    def __init__(self, catalog: Any, times: int) -> None:
        self.left = times
        catalog.runs()
        sessions = catalog._sessions
        write = sessions.write
        lost = self

        class Wrapped:
            def __enter__(self) -> Any:
                self.inner = write()
                return self.inner.__enter__()

            def __exit__(self, *exc: Any) -> Any:
                result = self.inner.__exit__(*exc)
                if exc[0] is None and lost.left:
                    lost.left -= 1
                    error = sqlite3.OperationalError("disk I/O error")
                    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
                    raise error
                return result

        sessions.write = Wrapped


def _retried(call: Callable[[], Any], lost: _LostAnswer) -> Any:
    lost.left = 1
    with pytest.raises(CatalogError) as caught:
        call()
    assert caught.value.transient
    return call()


def test_a_save_whose_every_answer_is_lost_once(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog()
    catalog.ensure_run("llama", "llama-key")
    lost = _LostAnswer(catalog, 0)
    wanted = request()
    launch = _retried(lambda: catalog.acquire_launch("llama", wanted, lease_seconds=60), lost)
    job = Job(catalog, "llama", launch)
    assert launch.fence == 1
    ticket = _retried(
        lambda: catalog.begin_save(
            launch.id, n=0, step=3, key="k", ranks=[0], deadline_seconds=60, fence=1, token=launch.token, tags=["best"]
        ),
        lost,
    )
    assert not ticket.created
    generation = ticket.generation
    _retried(lambda: job.report(generation.id, 0), lost)
    _retried(lambda: catalog.mark_durable(generation.id, job.facts(generation), fence=1), lost)
    done = _retried(lambda: catalog.commit(generation.id, fence=1), lost)
    assert (done.state, done.commit_seq, done.tags) == (State.COMMITTED, 1, ("best",))
    assert _retried(lambda: catalog.set_proven(generation.id), lost).proven_at is not None
    _retried(lambda: catalog.pin(generation.id, reason="r"), lost)
    _retried(lambda: catalog.unpin(generation.id), lost)
    _retried(lambda: catalog.close_launch(launch.id), lost)
    kinds = [entry.kind for entry in catalog.events()]
    assert kinds == ["run", "launch", "begin", "durable", "commit", "tag", "prove", "pin", "unpin", "close"]


def test_an_abort_whose_answer_is_lost(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog()
    job = Job.start(catalog)
    generation = job.begin()
    lost = _LostAnswer(catalog, 0)
    call: Callable[[], object] = lambda: catalog.abort(  # noqa: E731
        generation.id, stage="persist", rank=0, reason="full", fence=job.fence
    )
    _retried(call, lost)
    assert catalog.events()[-1].kind == "abort"
    with pytest.raises(CkptError):
        catalog.commit(generation.id, fence=job.fence)
