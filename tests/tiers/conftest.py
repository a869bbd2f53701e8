"""The place of one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiers_rig import TieredPlace


@pytest.fixture
def place(tmp_path: Path, empty_catalog: Path, quick: None) -> Iterator[TieredPlace]:
    made = TieredPlace(tmp_path, empty_catalog)
    yield made
    made.forget()
