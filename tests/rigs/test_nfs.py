"""The posix backend on real NFS: what two clients see of each other, and what a server's death leaves.

The tests themselves are in ``nfs/``; they run inside of user-mode Linux, whose kernel is client and server.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rig_nfs import INSIDE, run_inside

pytestmark = [pytest.mark.rig, pytest.mark.timeout(330)]


@pytest.mark.parametrize("path", sorted(INSIDE.glob("inside_*.py")), ids=lambda path: path.stem)
def test_inside_of_a_machine_with_nfs(path: Path, tmp_path: Path, tell: Callable[[str, str], None]) -> None:
    status, said = run_inside(tmp_path, str(path), seconds=300)
    assert status == 0, said[-20_000:]
    summary = said.splitlines()[-1].strip("= ")
    assert re.fullmatch(r"\d+ passed in .*", summary), said[-5_000:]  # and nothing was skipped
    tell("NFS", f"{path.stem}: {summary}")
