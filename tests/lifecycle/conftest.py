"""The place of one test: storage in memory and a SQLite catalog that is made quickly."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lifecycle_rig import Place


@pytest.fixture
def root(tmp_path: Path, empty_repository: Path) -> Path:
    """``tmp_path/r``: a copy of the empty repository, so that no child needs to migrate a catalog."""
    shutil.copytree(empty_repository, tmp_path / "r")
    return tmp_path / "r"


@pytest.fixture
def place(tmp_path: Path, empty_catalog: Path, quick: None) -> Iterator[Place]:
    made = Place(tmp_path)
    shutil.copy(empty_catalog, tmp_path / "catalog.sqlite")
    yield made
    made.forget()
