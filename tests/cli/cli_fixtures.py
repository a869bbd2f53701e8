"""Repositories for the command line, and ways to run it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ckptfmt
from ckptfmt import connect
from ckptfmt.cli.main import main
from ckptfmt.engine import process
from ckptfmt.engine.site import Site
from ckptfmt.ports.records import LaunchRecord, LaunchRequest

GOLDEN = Path(__file__).parents[1] / "golden"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document


def run(*arguments: object) -> Result:
    """``ckptfmt ARGUMENTS`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: object = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
    assert isinstance(code, int)
    return Result(code, out.getvalue(), err.getvalue())


def ok(*arguments: object) -> str:
    result = run(*arguments)
    assert result.code == 0, result.err
    assert result.err == ""
    return result.out


def ok_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.code == 0, result.err
    return result.json()


def state(step: int) -> dict[str, Any]:
    """A small state: two arrays that change with the step, one that does not, tied ones, and plain values."""
    shared = np.full((4, 5), step, np.float32)
    return {
        "model": {"w": np.arange(600, dtype=np.float32).reshape(20, 30) + step, "b": np.zeros(30, np.float16)},
        "tied": [shared, shared],
        "frozen": np.arange(7, dtype=np.int64),
        "epoch": step // 10,
        "schedule": {"lr": 0.1 / step, "names": ("a", "b")},
    }


def save_steps(url: Path | str, *steps: int, run: str = "train", **options: Any) -> list[int]:
    """Save a generation for each step, in one launch; return the ids."""
    ids = []
    with ckptfmt.open(url) as repository, repository.checkpointer(run) as checkpointer:
        for step in steps:
            pending = checkpointer.save(state(step), step=step, metadata={"loss": 1 / step}, **options)
            assert pending is not None
            ids.append(pending.result().id)
    return ids


@contextlib.contextmanager
def site_of(url: Path | str) -> Iterator[Site]:
    """The parts of a repository, open for writing."""
    connection = connect.open_site(url, mode="w", catalog=None, storage_options=None)
    try:
        yield connection.site
    finally:
        connection.close()


def launch(site: Site, run: str = "train", *, seconds: float = 60.0) -> LaunchRecord:
    """A live launch of this process."""
    request = LaunchRequest(
        token=uuid.uuid4().hex,
        host=process.host_name(),
        pid=os.getpid(),
        boot_id=process.boot_id(),
        pid_started=process.pid_started(os.getpid()),
    )
    return site.sql().acquire_launch(run, request, lease_seconds=seconds)


def begin(site: Site, held: LaunchRecord, step: int, n: int = 0) -> int:
    """Begin a save that stays ``writing``; return the generation's id."""
    ticket = site.sql().begin_save(
        held.id,
        n=n,
        step=step,
        key=uuid.uuid4().hex,
        ranks=[0],
        deadline_seconds=600.0,
        fence=held.fence,
        token=held.token,
    )
    return ticket.generation.id


def folder_of(url: Path, generation_id: int) -> Path:
    """A generation's folder."""
    with site_of(url) as site:
        row = site.sql().generation(generation_id)
    assert row is not None
    return url / "runs" / row.run_key / row.key


def flip(pack: Path, offset: int) -> None:
    """Change one byte of a file."""
    data = bytearray(pack.read_bytes())
    data[offset] ^= 0x01
    pack.write_bytes(data)


def python() -> list[str]:
    return [sys.executable, "-m", "ckptfmt.cli.main"]


def read_terminal(leader: int) -> str:
    """What is written to a pseudo terminal until its last writer has closed it; ``leader`` is closed then, too."""
    seen = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:  # the last writer has closed it
            break
        if not block:
            break
        seen += block
    os.close(leader)
    return seen.decode()
