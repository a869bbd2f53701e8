"""Trainings of real frameworks in forks, killed while they save; what each step's loss was is in a file."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  # with the next two, what a first save or step loads: once for all forks
from forked import Forked

import ckptfmt.catalog.upgrade
import ckptfmt.checkpointer  # noqa: F401
from ckptfmt.backends.posix import PosixBackend

LIMIT_SECONDS = 150

Training = Callable[["Life"], Any]


def framework(name: str) -> ModuleType:
    """The module of a framework; where it is absent the tests of its adapter are skipped, and fail in CI."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if os.environ.get("CI"):
            return importlib.import_module(name)
        return pytest.importorskip(name, reason=f"{name} is not installed: pip install 'ckptfmt[{name}]'")


class Life:
    """One start of a training: where it saves, and where it writes what it sees."""

    def __init__(self, folder: Path, name: str, *, rank: int = 0, world: int = 1, port: int = 0) -> None:
        self.folder = folder
        self.place = f"{folder / 'ckpts'}#run"
        self.rank = rank
        self.world = world
        self.port = port
        self._losses = folder / f"{name}-{rank}"

    def note(self, step: int, loss: float) -> None:
        """The loss of ``step``, in a file at once: a killed process tells nothing afterwards."""
        with open(self._losses, "a") as file:
            file.write(f"{step} {float(loss).hex()}\n")

    def begin(self, kill_at: int | None) -> None:
        """What a launcher tells a rank. ``kill_at``: the save whose packs are written, but not acknowledged."""
        warnings.simplefilter("ignore")
        os.environ["OMP_NUM_THREADS"] = "1"
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_SECONDS)
        if self.world > 1:
            told = {"RANK": self.rank, "LOCAL_RANK": self.rank, "WORLD_SIZE": self.world, "GROUP_RANK": 0}
            told |= {"LOCAL_WORLD_SIZE": self.world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
            told |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0}
            os.environ.update({key: str(value) for key, value in told.items()})
        if kill_at is not None:
            _die_at(kill_at)


def _die_at(save: int) -> None:
    """SIGKILL to this process when it is about to acknowledge its save number ``save``, counted from 1."""
    create = PosixBackend.create
    seen: list[str] = []

    def watched(self: PosixBackend, key: str, data: Any) -> None:
        if key.endswith(".part.json"):
            seen.append(key)
            if len(seen) == save:
                os.kill(os.getpid(), signal.SIGKILL)
        create(self, key, data)

    PosixBackend.create = watched  # type: ignore[method-assign]


def live(
    training: Training, folder: Path, name: str, *, world: int = 1, kill: tuple[int, int] | None = None
) -> list[int]:
    """Run ``training`` on ``world`` ranks; ``kill=(rank, save)`` kills one in that save, and then the others, as
    launchers do. The exit statuses."""
    port = _free_port()

    def body(rank: int) -> Any:
        life = Life(folder, name, rank=rank, world=world, port=port)
        life.begin(kill[1] if kill is not None and kill[0] == rank else None)
        training(life)

    ranks = [Forked(partial(body, rank)) for rank in range(world)]
    if kill is None:
        for rank in ranks:
            rank.result()
        return [0] * world
    ends = {kill[0]: ranks[kill[0]].end()}
    assert ends[kill[0]][1] == -signal.SIGKILL, ends
    for number, rank in enumerate(ranks):
        if number != kill[0]:
            os.kill(rank.pid, signal.SIGKILL)
            ends[number] = rank.end()
    return [ends[number][1] for number in range(world)]


def losses(folder: Path, name: str, rank: int = 0) -> list[tuple[int, str]]:
    """(step, loss to the last bit), in the order in which they were seen."""
    lines = (folder / f"{name}-{rank}").read_text().splitlines()
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


def assert_resumes_identically(training: Training, tmp_path: Path, *, world: int = 1, kill: tuple[int, int]) -> None:
    """Never killed, and killed in a save: every loss is the same, and the second life goes on from a commit."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    live(training, tmp_path / "whole", "only", world=world)
    live(training, tmp_path / "killed", "first", world=world, kill=kill)
    live(training, tmp_path / "killed", "second", world=world)
    for rank in range(world):
        whole = losses(tmp_path / "whole", "only", rank)
        first = losses(tmp_path / "killed", "first", rank)
        second = losses(tmp_path / "killed", "second", rank)
        assert 0 < second[0][0] <= first[-1][0] + 1, "it resumed from the start, or beyond what was seen"
        assert first == whole[: len(first)]
        assert second == [entry for entry in whole if entry[0] >= second[0][0]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
