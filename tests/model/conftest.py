"""A place as the tests of the life cycle have it, and the model on the path."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for _folder in (Path(__file__).parent, Path(__file__).parent.parent / "lifecycle"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

from lifecycle_rig import Place  # noqa: E402


@pytest.fixture
def place(tmp_path: Path, empty_catalog: Path) -> Iterator[Place]:
    shutil.copy(empty_catalog, tmp_path / "catalog.sqlite")
    made = Place(tmp_path)
    yield made
    made.forget()
