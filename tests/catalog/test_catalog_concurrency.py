"""Many processes, one database: no lock error, no lost row, no shared connection."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from forked import at_once

from ckptfmt.catalog.open import open_catalog
from ckptfmt.catalog.sqlite import lock_holders
from ckptfmt.errors import CatalogError
from ckptfmt.testing.catalogs import REPOSITORY, Job, MakeCatalog, RawSql

# Imported once, forked eight times. Nothing here survives a power cut, so commits do not wait for the disk: that
# leaves the locks more to do.
_WORKERS = """
import sys
import ckptfmt.catalog.sql
from ckptfmt.catalog.open import open_catalog
from ckptfmt.testing.catalog_job import REPOSITORY, Job
from forked import at_once
from quick_catalogs import quick_catalogs
url, workers, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def work(number):
    catalog = open_catalog(url, repository=REPOSITORY, display_url="/ckpts", mode="w", create=False)
    job = Job.start(catalog, f"run-{number}", pid=number)
    for step in range(rounds):
        generation = job.begin(step)
        catalog.abort(generation.id, stage="persist", rank=0, reason="test", fence=job.fence)

with quick_catalogs():
    at_once(work, workers)
"""


def _spawn(code: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def _finish(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


@pytest.mark.parametrize("rounds", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_eight_processes_of_many_state_changes(url: str, raw: RawSql, make_catalog: MakeCatalog, rounds: int) -> None:
    _finish([_spawn(_WORKERS, url, 8, rounds)])
    saves = 8 * rounds
    assert raw("SELECT COUNT(*), COUNT(DISTINCT id), MIN(state) FROM generations", {}) == [(saves, saves, "aborted")]
    assert raw("SELECT COUNT(*) FROM events WHERE to_state IS NOT NULL", {}) == [(2 * saves,)]
    for run in range(8):
        seqs = [event.seq for event in make_catalog().events(run=f"run-{run}")]
        assert seqs == list(range(1, 2 * rounds + 3))


def test_two_processes_race_for_one_run(url: str, make_catalog: MakeCatalog) -> None:
    """One wins the lease, the other is told who holds it; there is never a second live launch."""
    make_catalog().ensure_run("llama", "llama-1")
    code = """
import sys, os
from ckptfmt.catalog.open import open_catalog
from ckptfmt.errors import Conflict
from ckptfmt.testing.catalog_job import REPOSITORY, request
catalog = open_catalog(sys.argv[1], repository=REPOSITORY, display_url="/ckpts", mode="w", create=False)
try:
    catalog.acquire_launch("llama", request(pid=os.getpid()), lease_seconds=60)
    print("won")
except Conflict as error:
    assert error.kind == "launch_held", error
    print("lost")
"""
    processes = [_spawn(code, url) for _ in range(4)]
    results = sorted(process.communicate(timeout=60)[0].strip() for process in processes)
    assert results == ["lost", "lost", "lost", "won"]
    assert make_catalog().runs()[0].fence == 1


def test_a_lock_that_is_never_given_back(url: str, database: Path) -> None:
    """The wait is bounded, the error is transient and names the process that holds the lock."""
    code = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(database)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        catalog = open_catalog(
            url, repository=REPOSITORY, display_url="/ckpts", mode="w", create=False, busy_seconds=0.2
        )
        with pytest.raises(CatalogError, match="nothing was changed") as caught:
            catalog.ensure_run("llama", "llama-1")
        assert caught.value.transient
        assert "database is locked" not in str(caught.value)
        if lock_holders(database):
            assert f"process {holder.pid}" in str(caught.value)
        assert catalog.runs() == []
        holder.communicate()
    assert catalog.ensure_run("llama", "llama-1").name == "llama"


def test_forked_children_have_connections_of_their_own(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog()
    catalog.ensure_run("parent", "parent-1")

    def work(number: int) -> int:
        for step in range(5):
            Job.start(catalog, f"run-{number}-{step}", pid=os.getpid()).aborted(step)
        return os.getpid()

    children = at_once(work, 4)
    assert len(catalog.generations()) == 20
    actors = {event.actor.rpartition(":")[2] for event in catalog.events() if event.kind == "abort"}
    assert actors == {str(pid) for pid in children}
    catalog.ensure_run("parent", "parent-1")


_FORK_MIDWAY = """
import os, sys, threading
from ckptfmt.catalog.open import open_catalog
from ckptfmt.errors import CatalogError
from ckptfmt.testing.catalog_job import REPOSITORY
catalog = open_catalog(sys.argv[1], repository=REPOSITORY, display_url="/ckpts", mode="w", create=False)
inside, forked = threading.Event(), threading.Event()

def transaction():
    with catalog._sessions.write() as session:
        session.execute("UPDATE repositories SET url = 'changed'")
        inside.set()
        forked.wait()

thread = threading.Thread(target=transaction)
thread.start()
inside.wait()
pid = os.fork()
if pid == 0:
    try:
        catalog.runs()
        sys.exit(1)
    except CatalogError as error:
        sys.exit(0 if error.kind == "fork_unsafe" and "spawn" in str(error) else 2)
_, status = os.waitpid(pid, 0)
forked.set()
thread.join()
assert status == 0, status
catalog.runs()
"""


def test_a_fork_in_the_middle_of_a_transaction_is_refused_and_harmless(url: str, raw: RawSql) -> None:
    """The child must neither use SQLite nor, at its exit, roll back what the parent is writing."""
    _finish([_spawn(_FORK_MIDWAY, url)])
    assert raw("SELECT DISTINCT url FROM repositories", {}) == [("changed",)]


def test_a_reader_heals_what_a_killed_writer_left(database: Path, tmp_path: Path, make_catalog: MakeCatalog) -> None:
    """A hot journal: the half-written transaction is undone, also when the first to come opens read-only."""
    Job.start(make_catalog()).proven()
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size=1")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE filler (x)")
        connection.executemany("INSERT INTO filler VALUES (?)", [("x" * 4000,)] * 200)
        copy = tmp_path / "copy.sqlite"
        for suffix in ("", "-journal"):
            Path(f"{copy}{suffix}").write_bytes(Path(f"{database}{suffix}").read_bytes())
        connection.execute("ROLLBACK")
    reader = open_catalog(f"sqlite:///{copy}", repository=REPOSITORY, display_url="/ckpts", mode="r", create=False)
    assert len(reader.generations()) == 1
    assert not Path(f"{copy}-journal").exists()
