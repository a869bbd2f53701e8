"""A whole machine loses its power while it saves again and again: what it had reported by then is there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import in_child
from rig_disks import Disk, Kind
from rig_jobs import Facts, Place, examine
from rig_machine import Machine, python

from ckptfmt.errors import CkptError

pytestmark = [pytest.mark.rig, pytest.mark.timeout(240)]


@pytest.fixture
def lose_power(new_disk: Callable[..., Disk], tmp_path: Path) -> Iterator[Callable[..., tuple[Path, set[int]]]]:
    machines: list[Machine] = []

    def lose(kind: Kind, seconds: float, mutant: str = "none") -> tuple[Path, set[int]]:
        """Where the repository lies afterwards, and the steps whose commits had been reported."""
        disk = new_disk(kind, mebibytes=64)
        disk.unmount()
        machine = Machine(
            tmp_path, disk.image, python("rig_machine_writer.py", "/mnt/disk/r", "/mnt/host/said", mutant)
        )
        machines.append(machine)
        machine.wait_for_lines("said", 2)
        time.sleep(seconds)
        machine.kill()
        disk.mount()
        return disk.place / "r", {int(line) for line in machine.lines("said")}

    yield lose
    for machine in machines:
        machine.release()


def problems_of(root: Path, reported: set[int]) -> list[str]:
    """What is wrong with the repository; that it cannot even be opened is one problem."""

    def look() -> list[str]:
        try:
            return examine(Place(root), Facts(must={"run": reported}))
        except CkptError as error:
            return [f"{type(error).__name__}: {error}"]

    found: list[str] = in_child(look)
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_what_was_reported_is_there(lose_power: Callable[..., tuple[Path, set[int]]], kind: str, seed: int) -> None:
    root, reported = lose_power(kind, random.Random(seed).uniform(0, 1.5))
    assert problems_of(root, reported) == []
    assert len(reported) >= 2


def test_the_rig_finds_a_catalog_that_does_not_sync(lose_power: Callable[..., tuple[Path, set[int]]]) -> None:
    root, reported = lose_power("ext4", 0.5, "sqlite")
    assert problems_of(root, reported) != []
