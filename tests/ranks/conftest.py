"""A repository for jobs of several ranks, on disk, with a catalog that is made quickly."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from meeting_rig import PLACES, WORLD, Job, Rank, save_and_wait, store_agent
from quick_catalogs import quick_catalogs

import ckptfmt
from ckptfmt.engine.save import meeting


@pytest.fixture
def root(tmp_path: Path, empty_repository: Path, quick: None) -> Path:
    """``tmp_path/r``: a copy of the empty repository that knows its new place."""
    shutil.copytree(empty_repository, tmp_path / "r")
    ckptfmt.open(tmp_path / "r").close()
    return tmp_path / "r"


@pytest.fixture(scope="session")
def agent() -> Iterator[int]:
    """The port of a store for process groups."""
    with store_agent() as port:
        yield port


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    """Where the ranks meet."""
    return str(request.param)


@pytest.fixture
def start(root: Path, place: str, request: pytest.FixtureRequest) -> Callable[..., Job]:
    """``start()``: a new start of the job, in that place."""
    port = request.getfixturevalue("agent") if place == "c10d" else 0

    def make(world: int = WORLD) -> Job:
        return Job(root, place, world=world, agent=port)

    return make


@pytest.fixture
def nobody_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coordinators whose ranks are dead do not wait for them at the end."""
    monkeypatch.setattr(meeting, "LEAVE_SECONDS", 0.5)


@pytest.fixture(scope="session")
def three_generations(tmp_path_factory: pytest.TempPathFactory, empty_repository: Path) -> Path:
    """A repository in which four ranks have saved steps 1, 2 and 3 of the run "run"."""
    root = tmp_path_factory.mktemp("ranks") / "r"
    shutil.copytree(empty_repository, root)

    def body(rank: Rank) -> None:
        with rank.checkpointer() as checkpointer:
            for step in (1, 2, 3):
                save_and_wait(checkpointer, rank.state(step), step)

    with quick_catalogs():
        ckptfmt.open(root).close()
        Job(root, "catalog").run(body)
    return root
