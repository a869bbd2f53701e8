"""Checkpoints that other tools write, made by those tools."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_ranks = Path(__file__).parents[1] / "ranks"
if str(_ranks) not in sys.path:
    sys.path.append(str(_ranks))
_cli = Path(__file__).parents[1] / "cli"
if str(_cli) not in sys.path:
    sys.path.append(str(_cli))


@pytest.fixture(autouse=True)
def _quick(quick: None) -> None:
    """Catalogs of these tests don't wait for the disk."""
