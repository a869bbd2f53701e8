"""Small objects that claim much are refused in little memory and time, by a process with a limit (report FR-125)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bombs import BOMBS

NAMES = list(BOMBS)


@pytest.mark.slow
@pytest.mark.parametrize("names", [NAMES[::2], NAMES[1::2]], ids=["even", "odd"])
def test_fr125_no_bomb_goes_off(names: list[str]) -> None:
    command = [sys.executable, "-W", "error", str(Path(__file__).with_name("bombs.py")), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.stdout.split()[::2] == names, done.stderr[-3000:]
