"""A process is killed at any SQL statement: in the middle of a migration, or of a transaction of the protocol.

What SQLite's journal then rolls back is not simulated: SIGKILL ends a child that holds the lock.
"""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_places import FolderPlaces
from forked import Forked

from ckptfmt.catalog import upgrade
from ckptfmt.catalog.revision import HEAD
from ckptfmt.catalog.sqlite import SqliteSessions
from ckptfmt.testing.crash_checks import Examination
from ckptfmt.testing.crash_life import Life
from ckptfmt.testing.crash_points import CrashPoints
from ckptfmt.testing.crash_scenarios import saving


class Statements:
    """Counts the SQL statements of this process, and kills it before the chosen one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.kill_at: int | None = None
        connect = SqliteSessions._connect

        def connect_watched(sessions: SqliteSessions, *args: Any) -> sqlite3.Connection:
            connection = connect(sessions, *args)
            connection.set_trace_callback(self._see)
            return connection

        monkeypatch.setattr(SqliteSessions, "_connect", connect_watched)

    def _see(self, statement: str) -> None:
        self.seen.append(statement)
        if self.kill_at is not None and len(self.seen) >= self.kill_at:  # of two threads, either
            os.kill(os.getpid(), signal.SIGKILL)

    def count(self, work: Callable[[], object]) -> int:
        self.seen.clear()
        work()
        return len(self.seen)

    def killed(self, k: int, work: Callable[[], object]) -> bool:
        """Whether a child met the end at its ``k``-th statement."""

        def body() -> None:
            self.seen.clear()
            self.kill_at = k
            work()

        answer, status = Forked(body).end()
        if status > 0:
            print(answer)
        return status == -signal.SIGKILL


@pytest.fixture
def statements(quick: None, monkeypatch: pytest.MonkeyPatch) -> Statements:
    return Statements(monkeypatch)


@pytest.mark.parametrize("every", [23, pytest.param(2, marks=pytest.mark.slow)])
def test_an_upgrade_killed_at_any_statement_is_done_again(
    tmp_path: Path, statements: Statements, every: int, tell: Callable[[str], None]
) -> None:
    def place(k: int) -> str:
        path = tmp_path / f"{k}.sqlite"
        path.touch()
        return f"sqlite:///{path}"

    first = place(0)
    count = statements.count(lambda: upgrade.upgrade(first))
    assert count >= 50, count
    for k in range(1, count + 1, every):
        url = place(k)
        assert statements.killed(k, lambda url=url: upgrade.upgrade(url)), (k, statements.seen)  # type: ignore[misc]
        assert upgrade.current(url) in (None, HEAD)
        assert upgrade.upgrade(url) == HEAD
        assert upgrade.check(url).problems == (), k
    tell(f"db upgrade: {count} statements, a kill at {len(range(1, count + 1, every))} of them")


@pytest.mark.parametrize("every", [97, pytest.param(11, marks=pytest.mark.slow)])
def test_a_save_killed_at_any_statement_harms_nothing(
    folder_places: FolderPlaces, statements: Statements, every: int, tell: Callable[[str], None]
) -> None:
    points = CrashPoints(folder_places, saving("save", 2))

    def work() -> None:
        life = Life(points.place)
        points.scenario.work(life, points.begin_told())
        life.end()

    points.begin()
    count = statements.count(work)
    assert count >= 220, count
    for k in range(1, count + 1, every):
        told = points.begin()
        assert statements.killed(k, work), k
        assert Examination(points.place, points.scenario, told, command_line=False).run() == [], k
        catalog = f"sqlite:///{points.place.url}/catalog.sqlite"
        assert upgrade.check(catalog).problems == (), k
    tell(f"save: {count} SQL statements, a kill at {len(range(1, count + 1, every))} of them")
    points.close()
