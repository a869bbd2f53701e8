"""Places for the crash tests, and the lines that say how much was counted and tried."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crash_places import FolderPlaces, MemoryPlaces, PostgresPlaces

if TYPE_CHECKING:
    from postgres_rig import PostgresServer


@pytest.fixture
def tell(tell: Callable[[str, str], None]) -> Callable[[str], None]:
    return partial(tell, "crash points")


@pytest.fixture
def memory_places(tmp_path: Path, empty_catalog: Path, quick: None) -> MemoryPlaces:
    return MemoryPlaces(tmp_path, empty_catalog)


@pytest.fixture
def folder_places(tmp_path: Path, empty_repository: Path, quick: None) -> FolderPlaces:
    return FolderPlaces(tmp_path, empty_repository)


@pytest.fixture
def postgres_places(tmp_path: Path, postgres: PostgresServer, postgres_template: str) -> PostgresPlaces:
    return PostgresPlaces(tmp_path, postgres, postgres_template)
