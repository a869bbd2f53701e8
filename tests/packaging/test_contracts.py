"""The floors of the house hold: which room imports which."""

import subprocess
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]


def test_import_contracts_are_kept() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_contracts_see_the_linked_rooms() -> None:
    """A tool that does not follow the links would call an unread room clean."""
    graph = grimp.build_graph("ckptfmt", cache_dir=None)
    for room in ("catalog", "backends", "migrations"):
        assert graph.find_descendants(f"ckptfmt.{room}"), f"ckptfmt.{room} is not in the import graph"


def test_every_room_has_a_floor() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors = next(contract for contract in contracts if contract["id"] == "floors")
    assert floors["exhaustive"] is True
    placed = {room.strip("() ") for layer in floors["layers"] for room in layer.split("|")}
    present = {name.partition(".")[2] for name in grimp.build_graph("ckptfmt", cache_dir=None).find_children("ckptfmt")}
    assert present == placed
