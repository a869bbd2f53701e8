"""The place of one test: storage in memory and a SQLite catalog that is made quickly."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lifecycle_rig import Place

from ckptfmt.catalog.sqlite import SqliteSessions


@pytest.fixture
def root(tmp_path: Path, empty_repository: Path) -> Path:
    """``tmp_path/r``: a copy of the empty repository, so that no child needs to migrate a catalog."""
    shutil.copytree(empty_repository, tmp_path / "r")
    return tmp_path / "r"


@pytest.fixture
def place(tmp_path: Path, empty_catalog: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Nothing here survives a power cut, so its transactions don't wait for the disk."""
    connect = SqliteSessions._connect

    def connect_quickly(self: SqliteSessions, *args: Any) -> sqlite3.Connection:
        connection = connect(self, *args)
        connection.execute("PRAGMA synchronous=OFF")
        return connection

    monkeypatch.setattr(SqliteSessions, "_connect", connect_quickly)
    made = Place(tmp_path)
    shutil.copy(empty_catalog, tmp_path / "catalog.sqlite")
    yield made
    made.forget()
