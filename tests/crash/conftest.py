"""Places for the crash tests, and the lines that say how much was counted and tried."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from crash_places import FolderPlaces, MemoryPlaces


@pytest.fixture
def tell(tell: Callable[[str, str], None]) -> Callable[[str], None]:
    return partial(tell, "crash points")


@pytest.fixture
def memory_places(tmp_path: Path, empty_catalog: Path, quick: None) -> MemoryPlaces:
    return MemoryPlaces(tmp_path, empty_catalog)


@pytest.fixture
def folder_places(tmp_path: Path, empty_repository: Path, quick: None) -> FolderPlaces:
    return FolderPlaces(tmp_path, empty_repository)
