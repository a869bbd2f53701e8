"""Killed at ten random moments of a save, the training goes on as if nothing had happened."""

import json
import multiprocessing
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from json_contract import check_report

from ckptfmt.demo.main import run_demo
from ckptfmt.demo.train import main

FORKS = multiprocessing.get_context("forkserver")
# Importing torch takes longer than a small training: the server imports it once for all processes.
FORKS.set_forkserver_preload(["ckptfmt.demo.train", "torch._dynamo"])


class Forked:
    """A process of the fork server that looks like a ``subprocess.Popen``."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def start_forked(arguments: Sequence[str], output: Path) -> Forked:
    output.write_text("its words are among those of the test")
    process = FORKS.Process(target=main, args=(list(arguments),))
    process.start()
    return Forked(process)


@pytest.mark.slow
def test_training_resumes_identically_after_ten_random_kills(tmp_path: Path) -> None:
    said: list[str] = []
    report = run_demo(
        tmp_path / "demo",
        kills=10,
        steps=90,
        every=2,
        size="small",
        commands=False,
        start=start_forked,
        echo=said.append,
    )
    text = "\n".join(said)
    assert report.kills == 10, text
    assert report.exact_resumes == report.resumes, text
    assert all(life.exact for life in report.lives), text
    # The state is read after the death: a save that was written through between the last look and
    # the signal counts as a kill, but not as one while writing.
    assert report.kills_while_writing >= 5, text
    assert report.values["model"] > 10
    assert report.values["optimizer"] > 3 * 10
    assert report.values["rng"] > 1
    document = json.loads(json.dumps(report.as_json()))
    check_report(document)
    assert document["kills"] == 10
