"""A save while the server of its catalog is killed and started again: at every step it is committed, once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psycopg
import pytest
from postgres_rig import migrated_database

import ckptfmt
from ckptfmt.catalog.postgres import PostgresSessions
from ckptfmt.catalog.sql import SqlCatalog
from ckptfmt.engine import protocol

if TYPE_CHECKING:
    from postgres_rig import PostgresServer

STEPS = ("begin_save", "report_rank", "mark_durable", "commit", "set_proven")


class _Death:
    """Kills the server when the chosen change is about to be committed, or has been; it comes back after a while."""

    def __init__(self, server: PostgresServer, step: str, when: Literal["before", "after"]) -> None:
        self._server, self._step, self._when = server, step, when
        self._due = False
        self._commit = PostgresSessions._commit
        self.returning: threading.Thread | None = None

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        method = getattr(SqlCatalog, self._step)

        def called(catalog: SqlCatalog, *arguments: Any, **named: Any) -> Any:
            self._due = self.returning is None
            return method(catalog, *arguments, **named)

        def commit(sessions: PostgresSessions, connection: Any) -> None:
            if not self._due:
                self._commit(sessions, connection)
                return
            self._due = False
            if self._when == "after":
                self._commit(sessions, connection)
            self._server.kill()
            self.returning = threading.Timer(0.3, self._server.start)
            self.returning.start()
            if self._when == "after":
                raise psycopg.OperationalError("server closed the connection unexpectedly")
            self._commit(sessions, connection)

        monkeypatch.setattr(SqlCatalog, self._step, called)
        monkeypatch.setattr(PostgresSessions, "_commit", commit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "when"),
    [
        ("begin_save", "after"),
        ("commit", "before"),
        ("commit", "after"),
        *(
            pytest.param(step, when, marks=pytest.mark.slow)
            for step in STEPS
            for when in ("before", "after")
            if (step, when) not in {("begin_save", "after"), ("commit", "before"), ("commit", "after")}
        ),
    ],
)
def test_a_save_outlives_the_server(
    mortal: PostgresServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    when: Literal["before", "after"],
) -> None:
    monkeypatch.setattr(protocol, "_PROOF_SECONDS", 60.0)  # else a server that comes back slowly leaves that to recover
    url = mortal.url(migrated_database(mortal))
    root = tmp_path / "ckpts"
    death = _Death(mortal, step, when)
    with ckptfmt.open(root, catalog=url) as repository, repository.checkpointer("run") as checkpointer:
        checkpointer.save({"w": np.arange(9.0)}, step=1).result()
        death.watch(monkeypatch)
        generation = checkpointer.save({"w": np.arange(9.0) + 1}, step=2).result()
        assert death.returning is not None
        death.returning.join()
        assert checkpointer.save({"w": np.arange(9.0) + 2}, step=3).result().id > generation.id
        assert [info.step for info in repository.generations(run="run")] == [3, 2, 1]
    monkeypatch.undo()
    assert ckptfmt.load(root, at="step:2", catalog=url)["w"].tolist() == (np.arange(9.0) + 1).tolist()
    kinds = [
        kind
        for (kind,) in mortal.run(
            "SELECT kind FROM events WHERE generation_id = %(id)s ORDER BY seq", database=_name(url), id=generation.id
        )
    ]
    assert kinds == ["begin", "durable", "commit", "prove"]


def _name(url: str) -> str:
    return url.rpartition("/")[2].partition("?")[0]
