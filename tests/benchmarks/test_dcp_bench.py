"""``python -m benchmarks.dcp`` runs through, with small figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import dcp


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_figure_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    figures = tmp_path / "dcp.json"
    options = ["--folder", str(tmp_path), "--tensors", "20", "--rounds", "1", "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["dcp", *options])
    dcp.main()
    text = capsys.readouterr().out
    assert "load, cold:" in text
    assert "stall of async_save, GenerationWriter:" in text
    found = json.loads(figures.read_text())
    assert all(len(seconds) == 1 for group in found.values() for seconds in group.values())
    assert list(tmp_path.iterdir()) == [figures]  # what was saved is gone
