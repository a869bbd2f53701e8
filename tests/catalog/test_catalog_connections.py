"""A connection serves one transaction after the other, as long as the file is the one that it was opened on."""

from __future__ import annotations

import gc
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from forked import in_child

from ckptfmt.catalog.sqlite import SqliteSessions
from ckptfmt.errors import CatalogError
from ckptfmt.testing.catalogs import Job, MakeCatalog


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """The connections that were made, oldest first."""
    made: list[sqlite3.Connection] = []
    connect = SqliteSessions._connect

    def noted(self: SqliteSessions, *args: Any) -> sqlite3.Connection:
        made.append(connect(self, *args))
        return made[-1]

    monkeypatch.setattr(SqliteSessions, "_connect", noted)
    return made


def _descriptors(database: Path) -> int:
    """How many descriptors of this process are open on the file, removed or not."""
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(link.startswith(str(database)) for link in links)


def test_many_transactions_are_one_connection(make_catalog: MakeCatalog, opened: list[sqlite3.Connection]) -> None:
    job = Job.start(make_catalog())
    opened.clear()
    for step in range(3):
        job.proven(step)
    assert len(job.catalog.generations()) == 3
    assert opened == []


def test_a_failed_transaction_ends_its_connection(make_catalog: MakeCatalog, opened: list[sqlite3.Connection]) -> None:
    catalog = make_catalog()
    job = Job.start(catalog)
    opened.clear()
    with pytest.raises(Exception, match="no launch"):
        catalog.close_launch(job.launch.id + 1)
    assert catalog.live_launch("llama") is not None
    assert len(opened) == 1


def _removed(database: Path, other: Path) -> None:
    database.unlink()
    shutil.copy(other, database)


def _moved_over(database: Path, other: Path) -> None:
    os.replace(other, database)


def _overwritten(database: Path, other: Path) -> None:
    database.write_bytes(other.read_bytes())


@pytest.mark.parametrize("change", [_removed, _moved_over, _overwritten])
def test_another_file_in_its_place_is_noticed(
    make_catalog: MakeCatalog, database: Path, tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    catalog = make_catalog()
    shutil.copy(database, tmp_path / "other")
    catalog.ensure_run("llama", "llama-1")
    change(database, tmp_path / "other")
    assert catalog.runs() == []
    catalog.ensure_run("mistral", "mistral-1")
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT name FROM runs").fetchall() == [("mistral",)]


def test_a_file_that_is_gone_is_an_error(make_catalog: MakeCatalog, database: Path) -> None:
    catalog = make_catalog()
    assert catalog.runs() == []
    database.unlink()
    with pytest.raises(CatalogError, match="cannot be opened"):
        catalog.runs()
    assert not database.exists()


def test_what_others_write_is_seen(make_catalog: MakeCatalog) -> None:
    one, other = make_catalog(), make_catalog()
    for number in range(5):
        one.ensure_run(f"one-{number}", f"one-{number}")
        other.ensure_run(f"other-{number}", f"other-{number}")
        assert len(one.runs()) == len(other.runs()) == 2 * number + 2


def test_threads_never_share_one(make_catalog: MakeCatalog, opened: list[sqlite3.Connection]) -> None:
    catalog: Any = make_catalog()
    with catalog._sessions.read() as snapshot, catalog._sessions.read() as another:
        assert snapshot._connection is not another._connection
    used = []

    def ask() -> None:
        with catalog._sessions.read() as snapshot:
            used.append(snapshot._connection)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert used[0] in opened


def test_no_lock_stays_between_calls(make_catalog: MakeCatalog, database: Path) -> None:
    catalog = make_catalog()
    Job.start(catalog).proven()
    catalog.view("latest_committed")
    assert _descriptors(database) == 1
    with closing(sqlite3.connect(database, timeout=0, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")


@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_no_descriptor_stays(database: Path, end: str) -> None:
    sessions = SqliteSessions(database, mode="rw")
    with sessions.read():
        pass
    assert _descriptors(database) == 1
    if end == "closed":
        sessions.close()
    else:
        del sessions
        gc.collect()
    assert _descriptors(database) == 0


def test_nothing_is_open_across_a_fork(make_catalog: MakeCatalog, database: Path) -> None:
    catalog = make_catalog()
    job = Job.start(catalog)

    def work() -> int:
        inherited = _descriptors(database)
        catalog.ensure_run("child", "child-1")
        catalog.close()
        return inherited

    assert in_child(work) == 0
    assert {run.name for run in catalog.runs()} == {"child", "llama"}
    assert job.proven(1).proven_at is not None
