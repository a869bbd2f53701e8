"""A repository with a history, copied for each test from one that was made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rebuild_rig import Told, make_history, site_of, told


@pytest.fixture(autouse=True)
def _no_power_cuts(quick: None) -> None:
    pass


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("rebuild") / "ckpts"
    make_history(root)
    root.rename(root.with_name("moved"))  # so that what is copied from it has no original in sight
    home = root.with_name("elsewhere") / "deep"
    home.mkdir(parents=True)
    root.with_name("moved").rename(home / "ckpts")
    return home / "ckpts"


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "ckpts"))


@pytest.fixture
def before(root: Path) -> dict[str, list[Told]]:
    with site_of(root) as site:
        return told(site)
