"""A catalog database per test, copied from one that was migrated once."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ckptfmt.catalog.clock import to_text
from ckptfmt.catalog.open import open_catalog
from ckptfmt.ports.catalog import Catalog
from ckptfmt.testing.catalogs import OTHER_REPOSITORY, REPOSITORY, MakeCatalog, RawSql


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new catalog that knows both repositories. Not to be changed."""
    path = tmp_path_factory.mktemp("catalog") / "catalog.sqlite"
    for uuid in (REPOSITORY, OTHER_REPOSITORY):
        open_catalog(f"sqlite:///{path}", repository=uuid, display_url="/ckpts", mode="w", create=True).close()
    return path


@pytest.fixture
def database(migrated: Path, tmp_path: Path) -> Path:
    """This test's own database."""
    return Path(shutil.copy(migrated, tmp_path / "catalog.sqlite"))


@pytest.fixture
def url(database: Path) -> str:
    return f"sqlite:///{database}"


@pytest.fixture
def make_catalog(url: str) -> Iterator[MakeCatalog]:
    opened: list[Catalog] = []

    def make(*, repository: str = REPOSITORY, mode: str = "w") -> Catalog:
        catalog = open_catalog(
            url, repository=repository, display_url="/ckpts", mode="r" if mode == "r" else "w", create=False
        )
        opened.append(catalog)
        return catalog

    yield make
    for catalog in opened:
        catalog.close()


@pytest.fixture
def raw(database: Path) -> RawSql:
    def run(sql: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        values = {key: to_text(v) if isinstance(v, datetime) else v for key, v in parameters.items()}
        with closing(sqlite3.connect(database)) as connection, connection:
            return connection.execute(sql, values).fetchall()

    return run
