"""Imports and exports tell a person at a terminal how far they are, and nobody else."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_fixtures import read_terminal
from safetensors.torch import save_file

import ckptfmt

BAR = re.compile(r"\r\x1b\[2K([^\r\x1b]+?) \[([#.]{24})\] +(\d+)%  ([^\r\x1b]*)")


def with_stderr_in_terminal(*arguments: object) -> tuple[str, str]:
    """What the command prints into a pipe, and to its standard error, a pseudo terminal."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "ckptfmt.cli.main", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "200"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, env=environment, text=True) as process:
        os.close(follower)
        seen = read_terminal(leader)
        assert process.stdout is not None
        printed = process.stdout.read()
        assert process.wait(timeout=60) == 0, seen
    return printed, seen


def phases(seen: str) -> list[tuple[str, int, str]]:
    """The last that was drawn of each phase: label, percent, and the bytes."""
    last: dict[str, tuple[int, str]] = {}
    for label, _, percent, rest in BAR.findall(seen):
        last[label] = int(percent), rest.split("  ")[0]
    return [(label, *told) for label, told in last.items()]


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(3 << 20, dtype=torch.float32), "b": torch.arange(7)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["w.safetensors", "w.pt"])
def test_an_import_tells_of_its_phases(kind: str, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    source = tmp_path / kind
    if source.suffix == ".pt":
        torch.save(state, source)
    else:
        save_file(state, source)
    printed, seen = with_stderr_in_terminal("import", source, f"{tmp_path / 'r'}#base")
    assert "committed and verified" in printed
    assert "\x1b" not in printed
    whole = "12.6 MB of 12.6 MB"
    assert phases(seen) == [
        (f"reading {kind}", 100, whole),
        (f"saving {kind}", 100, whole),
        ("verifying #1", 100, whole),
    ]
    assert seen.endswith("\r\x1b[2K")


@pytest.mark.parametrize("face", [["--safetensors", "out"], ["--kerchunk", "out.json"], ["--ocdbt"]], ids=str)
def test_an_export_tells_how_far_it_is(face: list[str], tmp_path: Path) -> None:
    ckptfmt.save({"w": torch.arange(3 << 20, dtype=torch.float32).reshape(3, -1), "b": torch.arange(7)}, tmp_path / "r")
    face = [face[0], *(str(tmp_path / name) for name in face[1:])]
    printed, seen = with_stderr_in_terminal("export", tmp_path / "r", *face)
    assert "\x1b" not in printed
    ((label, percent, nbytes),) = phases(seen)
    assert (label, percent) == ("exporting #1", 100)
    if face != ["--ocdbt"]:  # which tells of what it has to copy
        assert nbytes == "12.6 MB of 12.6 MB"
    assert seen.endswith("\r\x1b[2K")


def test_nobody_else_sees_it(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(state, tmp_path / "w.safetensors")
    printed, seen = with_stderr_in_terminal("import", tmp_path / "w.safetensors", tmp_path / "r", "--json")
    assert json.loads(printed)["report"] == "import"
    assert seen == ""
    command = [sys.executable, "-m", "ckptfmt.cli.main", "import", tmp_path / "w.safetensors", tmp_path / "r"]
    done = subprocess.run([*command, "--step", "1"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    for told, *command in (
        ("export.safetensors", "export", tmp_path / "r", "--safetensors", tmp_path / "out"),
        ("verify", "verify", tmp_path / "r"),
        ("replicate", "replicate", tmp_path / "r", "--repair", "--yes"),
        ("replicate", "replicate", tmp_path / "r", "--replica", tmp_path / "copy", "--yes"),
    ):
        printed, seen = with_stderr_in_terminal(*command, "--json")
        assert json.loads(printed)["report"] == told
        assert seen == ""
