"""Places for the crash tests, and the lines that say how much was counted and tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crash_places import FolderPlaces, MemoryPlaces

LINES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LINES] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(LINES, [])
    if lines:
        terminalreporter.section("crash points")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def tell(pytestconfig: pytest.Config) -> Any:
    """Adds a line to the summary of the test session."""
    return pytestconfig.stash[LINES].append


@pytest.fixture
def memory_places(tmp_path: Path, empty_catalog: Path, quick: None) -> MemoryPlaces:
    return MemoryPlaces(tmp_path, empty_catalog)


@pytest.fixture
def folder_places(tmp_path: Path, empty_repository: Path, quick: None) -> FolderPlaces:
    return FolderPlaces(tmp_path, empty_repository)
