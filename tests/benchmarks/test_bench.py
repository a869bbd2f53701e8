"""``ckptfmt bench``: it measures, compares, refuses where there is no room, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ckptfmt
from ckptfmt.cli.bench import size
from ckptfmt.errors import Corrupt, OutOfSpace
from ckptfmt.measure import bench
from ckptfmt.measure.bench import Order, run_bench


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ckptfmt.cli.main", "bench", *map(str, arguments)]


def silent(text: str) -> None:
    """Nobody looks."""


@pytest.mark.slow
def test_it_measures_and_leaves_a_repository_as_it_was(tmp_path: Path) -> None:
    ckptfmt.save({"epoch": 3}, tmp_path, run="mine")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    done = subprocess.run(command(tmp_path, "--bytes", "3M", "--json"), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert 2e6 < report["nbytes"] < 4e6
    assert [one["name"] for one in report["contenders"]] == ["ckptfmt", "torch.save"]
    for one in (report["limits"], *report["contenders"]):
        assert len(one["stalls"]) == len(one["commits"]) == 3
        assert len(one["restores_cold"]) == len(one["restores_warm"]) == 2
        assert all(0 < stall <= commit for stall, commit in zip(one["stalls"], one["commits"], strict=True))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_text_puts_the_limits_first_and_tells_of_leftovers(tmp_path: Path) -> None:
    (tmp_path / "ckptfmt-bench-old").mkdir()
    done = subprocess.run(
        command(tmp_path / "new", "--bytes", "1M", "--saves", "2"), capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert [line.split("  ")[1] for line in lines[2:5]] == ["raw limits", "ckptfmt", "torch.save"]
    assert "times our stall" in done.stdout
    assert "ckptfmt-bench-old" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["ckptfmt-bench-old"]


def test_no_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfSpace, match="nothing was written; give fewer --bytes"):
        run_bench(Order("u", tmp_path, 1 << 50, 3), echo=silent)
    monkeypatch.setattr(bench, "available_memory", lambda: 1 << 30)
    with pytest.raises(OutOfSpace, match=r"three times the state.*--bytes 268435456") as caught:
        run_bench(Order("u", tmp_path, 1 << 29, 3), echo=silent)
    assert caught.value.kind == "host_memory"
    assert list(tmp_path.iterdir()) == []


def test_a_restore_of_other_bytes_is_an_error_and_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.ckptfmt, "restore", lambda *arguments, **named: None)
    with pytest.raises(Corrupt, match="ckptfmt restored other bytes"):
        run_bench(Order("u", tmp_path, 1_000_000, 2), echo=silent)
    assert list(tmp_path.iterdir()) == []


def test_where_sqlite_cannot_be_trusted_the_catalog_lies_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "filesystem_type", lambda path: "nfs4")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    seen: list[Any] = []
    plain = ckptfmt.open

    def watched(url: Any, **named: Any) -> Any:
        seen.append(named["catalog"])
        return plain(url, **named)

    monkeypatch.setattr(bench.ckptfmt, "open", watched)
    report = run_bench(Order("u", tmp_path, 1_000_000, 2), echo=silent)
    assert report.file_system == "nfs4"
    assert "repository" not in seen[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_terminated_bench_cleans_up(tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path, "--bytes", "20M", "--saves", "100"), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("ckptfmt-bench-*/repository/runs")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert list(tmp_path.iterdir()) == []


def test_without_torch_it_says_so(tmp_path: Path) -> None:
    code = (
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        "from ckptfmt.cli.main import main\n"
        f"main(['bench', {str(tmp_path)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'ckptfmt[torch]'" in done.stderr


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8G", 8 * 10**9), ("500m", 5 * 10**8), ("1.5GiB", 3 << 29), ("4096", 4096), ("2kb", 2000)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert size(text) == nbytes
