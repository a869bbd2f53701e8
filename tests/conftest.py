"""What tests of several folders start from: made once, then copied, since migrating a new catalog takes long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty_catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog with its schema and nothing else."""
    from ckptfmt.catalog.upgrade import create_schema

    path = tmp_path_factory.mktemp("catalog") / "empty.sqlite"
    create_schema(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def empty_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository on disk in which nothing was ever saved."""
    import ckptfmt

    root = tmp_path_factory.mktemp("repository") / "r"
    ckptfmt.open(root).close()
    return root


@pytest.fixture
def quick() -> Iterator[None]:
    """Nothing in this test survives a power cut, so its transactions don't wait for the disk."""
    from quick_catalogs import quick_catalogs

    with quick_catalogs():
        yield
