"""A repository with a history, copied for each test from one that was made once."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rebuild_rig import Told, make_history, site_of, told

from ckptfmt.catalog.sqlite import SqliteSessions


@pytest.fixture(autouse=True)
def _no_power_cuts() -> Iterator[None]:
    """Nothing here survives one, so no transaction waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        connect = SqliteSessions._connect

        def connect_quickly(self: SqliteSessions, *args: Any) -> sqlite3.Connection:
            connection = connect(self, *args)
            with suppress(sqlite3.DatabaseError):  # of damaged ones the library itself is to tell
                connection.execute("PRAGMA synchronous=OFF")
            return connection

        patch.setattr(SqliteSessions, "_connect", connect_quickly)
        yield


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
