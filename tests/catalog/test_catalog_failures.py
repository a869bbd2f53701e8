"""No exception of the driver leaves the catalog; a lost answer can be asked for again."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ckptfmt.catalog.snapshot import SqliteSession
from ckptfmt.errors import CatalogError, CkptError
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import CatalogIdentity, RankReport
from ckptfmt.ports.restoration import Restoration
from ckptfmt.testing.catalogs import Job, MakeCatalog, RawSql, request


def _calls(catalog: Any, job: Job) -> dict[str, Callable[[], object]]:
    """One plausible call of every method of the port that touches the database."""
    generation = job.committed()
    id, fence, launch = generation.id, job.fence, job.launch.id
    facts = job.facts(generation)
    identity = catalog.identity()
    plan = Restoration(identity, CatalogIdentity(identity.uuid, identity.epoch + 1), "merge", "/ckpts", (), 0)
    return {
        "identity": lambda: catalog.identity(),
        "root_url": lambda: catalog.root_url(),
        "moved_to": lambda: catalog.moved_to("/new"),
        "set_retention_hold": lambda: catalog.set_retention_hold("llama", True),
        "restore": lambda: catalog.restore(plan),
        "states": lambda: catalog.states(),
        "ensure_run": lambda: catalog.ensure_run("new", "new-1"),
        "runs": lambda: catalog.runs(),
        "live_launch": lambda: catalog.live_launch("llama"),
        "launches": lambda: catalog.launches("llama"),
        "launch": lambda: catalog.launch(launch),
        "last_committed_of": lambda: catalog.last_committed_of(launch),
        "unproven": lambda: catalog.unproven("llama"),
        "note": lambda: catalog.note("llama", generation_id=id, kind="noted", detail={}),
        "acquire_launch": lambda: catalog.acquire_launch("llama", request(), lease_seconds=1, displace=launch),
        "renew_lease": lambda: catalog.renew_lease(launch, lease_seconds=1),
        "close_launch": lambda: catalog.close_launch(launch),
        "set_restored_from": lambda: catalog.set_restored_from(launch, generation.key),
        "begin_save": lambda: catalog.begin_save(
            launch, n=50, step=1, key="k", ranks=[0], deadline_seconds=None, fence=fence, token=job.launch.token
        ),
        "skip_save": lambda: catalog.skip_save(launch, n=51, step=1, fence=fence, token=job.launch.token),
        "report_rank": lambda: catalog.report_rank(id, 0, state="staged"),
        "report_ranks": lambda: catalog.report_ranks(id, [RankReport(0, "staged")]),
        "join_launch": lambda: catalog.join_launch("llama", request(token=job.launch.token), rank=0),
        "post": lambda: catalog.post(launch, "hello", 0, {}),
        "posts": lambda: catalog.posts(launch, "hello"),
        "forget_posts": lambda: catalog.forget_posts(launch, "hello"),
        "ranks": lambda: catalog.ranks(id),
        "mark_durable": lambda: catalog.mark_durable(id, facts, fence=fence),
        "commit": lambda: catalog.commit(id, fence=fence),
        "set_proven": lambda: catalog.set_proven(id),
        "abort": lambda: catalog.abort(id, stage="s", rank=None, reason="r", fence=fence),
        "adopt": lambda: catalog.adopt(id, job.verdict(generation), fence=fence),
        "retire": lambda: catalog.retire(id),
        "mark_swept": lambda: catalog.mark_swept(id),
        "packs": lambda: catalog.packs(id),
        "pack_users": lambda: catalog.pack_users(generation.key, "p"),
        "database_now": lambda: catalog.database_now(),
        "tag": lambda: catalog.tag(id, "best"),
        "untag": lambda: catalog.untag(id, "best"),
        "pin": lambda: catalog.pin(id, reason="r"),
        "unpin": lambda: catalog.unpin(id),
        "quarantine": lambda: catalog.quarantine(id, reason="r"),
        "generation": lambda: catalog.generation(id),
        "generation_by_key": lambda: catalog.generation_by_key(generation.key),
        "generations": lambda: catalog.generations(),
        "latest": lambda: catalog.latest("llama"),
        "committed_at_step": lambda: catalog.committed_at_step("llama", 1),
        "tagged": lambda: catalog.tagged("llama", "best"),
        "open_reader": lambda: catalog.open_reader(id, host="h", pid=1, ttl_seconds=1),
        "close_reader": lambda: catalog.close_reader(1),
        "events": lambda: catalog.events(),
        "view": lambda: catalog.view("stalls"),
    }


def test_the_calls_are_all_methods_of_the_port(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog()
    port = {name for name in vars(Catalog) if not name.startswith("_")} - {"url", "read_only", "close"}
    assert set(_calls(catalog, Job.start(catalog))) == port


@pytest.mark.parametrize("damage", ["not a database", "gone", "tables gone", "disk error"])
def test_no_foreign_exception_escapes(
    make_catalog: MakeCatalog, database: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    catalog = make_catalog()
    calls = _calls(catalog, Job.start(catalog))
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
