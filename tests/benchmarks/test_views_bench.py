"""``python -m benchmarks.views`` runs through, with small figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import views


def test_every_figure_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    figures = tmp_path / "views.json"
    options = ["--folder", str(tmp_path), "--bytes", str(1 << 20), "--arrays", "20", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["views", *options, "--json", str(figures)])
    views.main()
    text = capsys.readouterr().out
    assert "open a group of 20" in text
    assert "OCDBT over packs" in text
    found = json.loads(figures.read_text())
    assert all(len(seconds) == 1 for group in found.values() for seconds in group.values())
    assert list(tmp_path.iterdir()) == [figures]  # what was saved is gone
