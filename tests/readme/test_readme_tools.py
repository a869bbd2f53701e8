"""The README's examples for other tools run, each beside what ckptfmt itself reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_readme import blocks

import ckptfmt


@pytest.fixture
def saved(tmp_path: Path) -> torch.Tensor:
    """The weight that the examples read, in ``tmp_path/ckpts``."""
    weight = torch.randn(32, 4)
    ckptfmt.save({"model": {"embed": {"weight": weight}}}, tmp_path / "ckpts", run="llama")
    return weight


def example(beginning: str) -> str:
    (found,) = [block for block in blocks("python") if beginning in block]
    return found


def test_zarr(tmp_path: Path, saved: torch.Tensor) -> None:
    names: dict[str, Any] = {}
    exec(example("zarr_group()").replace("/ckpts", str(tmp_path / "ckpts")), names)
    assert np.array_equal(names["column"], saved[:, 0].numpy())


def test_references(tmp_path: Path, saved: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        sys.executable,
        "-m",
        "ckptfmt.cli.main",
        "export",
        f"{tmp_path / 'ckpts'}#llama",
        "--kerchunk",
        "refs.json",
    ]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example("reference://"), names)
    assert np.array_equal(names["rows"], saved[:16].numpy())
