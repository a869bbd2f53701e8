"""A whole machine loses its power while it saves again and again: what it had reported by then is there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rig_children import in_child
from rig_disks import Disk, Kind
from rig_jobs import Facts, Place, examine
from rig_machine import Machine, python

pytestmark = [pytest.mark.rig, pytest.mark.timeout(240)]


@pytest.fixture
def lose_power(new_disk: Callable[..., Disk], tmp_path: Path) -> Iterator[Callable[..., tuple[list[str], int]]]:
    machines: list[Machine] = []

    def lose(kind: Kind, seconds: float, mutant: str = "none") -> tuple[list[str], int]:
        """Problems found afterwards, and how many commits had been reported."""
        disk = new_disk(kind, mebibytes=64)
        disk.unmount()
        machine = Machine(tmp_path, disk, python("rig_machine_writer.py", "/mnt/disk/r", "/mnt/host/said", mutant))
        machines.append(machine)
        machine.wait_for_lines("said", 2)
        time.sleep(seconds)
        machine.kill()
        reported = {int(line) for line in machine.lines("said")}
        disk.mount()
        facts = Facts(must={"run": reported})
        return in_child(lambda: examine(Place(disk.place / "r"), facts)), len(reported)

    yield lose
    for machine in machines:
        machine.release()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_what_was_reported_is_there(lose_power: Callable[..., tuple[list[str], int]], kind: str, seed: int) -> None:
    problems, reported = lose_power(kind, random.Random(seed).uniform(0, 1.5))
    assert problems == []
    assert reported >= 2


def test_the_rig_finds_a_catalog_that_does_not_sync(lose_power: Callable[..., tuple[list[str], int]]) -> None:
    try:
        problems, _ = lose_power("ext4", 0.5, "sqlite")
    except AssertionError as error:  # not even the repository can be opened
        problems = [str(error)]
    assert problems != []
