"""What a rig needs of the machine: without it a rig is skipped with the reason, and in CI it fails."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def lacking(reason: str) -> NoReturn:
    """Skip the test for ``reason``; where ``CI=true`` nothing may be left out, so it fails."""
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"this rig must run in CI: {reason}", pytrace=False)
    pytest.skip(reason)


def need_root(why: str) -> None:
    if os.geteuid() != 0:
        lacking(f"only root may {why}")


def need_tools(*tools: str) -> None:
    """``tools`` are commands; the Debian packages that hold them are listed in ``.ci/run``."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        lacking(f"not installed: {', '.join(missing)}")
