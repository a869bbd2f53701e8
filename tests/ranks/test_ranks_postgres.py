"""Many ranks with a catalog on a PostgreSQL server, which may be killed at any moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from meeting_rig import WORLD, Job, Rank, assert_saved, rows_of, save_and_wait, wait_until
from postgres_rig import PostgresServer, migrated_database, postgres_server

import ckptfmt
from ckptfmt.engine.save import meeting
from ckptfmt.testing.faults import Call, Fault


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server of this module's own, which it kills; it loses nothing that it has acknowledged."""
    with postgres_server(fsync=True) as server:
        yield server


@pytest.fixture
def catalog(server: PostgresServer) -> str:
    return server.url(migrated_database(server))


@pytest.fixture
def start(tmp_path: Path, catalog: str, place: str, request: pytest.FixtureRequest) -> Callable[[], Job]:
    port = request.getfixturevalue("agent") if place == "c10d" else 0
    ckptfmt.open(tmp_path / "r", catalog=catalog).close()
    return lambda: Job(tmp_path / "r", place, catalog=catalog, agent=port)


@pytest.mark.slow
def test_four_ranks_save_and_restore(start: Callable[[], Job], tmp_path: Path, catalog: str) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer() as checkpointer:
            saved = [save_and_wait(checkpointer, rank.state(step), step)["id"] for step in (1, 2)]
            live = rank.state(9)
            report = checkpointer.restore(live)
            assert report is not None
            return saved, report.generation_id, live["step"]

    results = start().run(body)
    assert results == [results[0]] * WORLD
    saved, restored, step = results[0]
    assert (restored, step) == (saved[-1], 2)
    assert_saved(tmp_path / "r", 2, WORLD, catalog=catalog)


MOMENTS: Final[dict[str, tuple[int, str, dict[str, Any]]]] = {
    "before C1": (0, "sql", {"op": "begin_save"}),
    "while a rank writes": (2, "backend", {"op": "write_at"}),
    "before an acknowledgement": (2, "backend", {"op": "create", "timing": "after"}),
    "before C3": (0, "backend", {"op": "create", "when": lambda call: "manifest-" in call.key}),
    "before C4": (0, "sql", {"op": "commit"}),
    "before C5": (0, "backend", {"op": "create", "when": lambda call: call.key.endswith("COMMIT.json")}),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_server_is_killed_and_comes_back(
    start: Callable[[], Job],
    server: PostgresServer,
    tmp_path: Path,
    catalog: str,
    moment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "LEAVE_SECONDS", 3.0)
    reached, back = tmp_path / "reached", tmp_path / "back"
    who, where, named = MOMENTS[moment]

    def held(call: Call) -> bool:
        wanted = named.get("when", lambda call: True)(call)
        if wanted and not reached.exists():
            reached.touch()
            wait_until(back.exists)
        return False

    def body(rank: Rank) -> Any:
        fault = Fault(named["op"], when=held)
        faults, sql = ([fault], []) if where == "backend" else ([], [fault])
        named_faults = {"sql": sql} if rank.rank == who else {}
        with rank.checkpointer(
            *(faults if rank.rank == who else []), commit_timeout=40, **named_faults
        ) as checkpointer:
            return save_and_wait(checkpointer, rank.state(1), 1)

    ranks = start().start(body)
    wait_until(reached.exists)
    server.kill()
    back.touch()
    time.sleep(0.7)
    server.start()
    outcomes = [rank.result() for rank in ranks]
    assert len({outcome["id"] for outcome in outcomes}) == 1, outcomes
    assert outcomes[0]["id"] is not None, outcomes
    assert [row["state"] for row in rows_of(tmp_path / "r", catalog)] == ["committed"]
    assert_saved(tmp_path / "r", 1, WORLD, catalog=catalog)
