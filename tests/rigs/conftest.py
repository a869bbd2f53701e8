"""Fixtures of the rigs: real file systems that are taken down again whatever happened to the test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig_disks import Disk, Kind, MemoryFolder, RigError, hide_mounts
from rig_needs import lacking, need_root, need_tools


@pytest.fixture(autouse=True)
def _system_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a user's PATH often lacks the tools that make file systems."""
    monkeypatch.setenv("PATH", os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin")))


@pytest.fixture(scope="session")
def own_mounts() -> None:
    """What the rigs mount goes with this process, even if it is killed."""
    need_root("mount file systems")
    try:
        hide_mounts()
    except RigError as error:
        lacking(str(error))


@pytest.fixture
def memory_folder(own_mounts: None, tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, for images."""
    try:
        folder = MemoryFolder(tmp_path / "memory")
    except RigError as error:
        lacking(str(error))
    yield folder.path
    folder.release()


@pytest.fixture
def new_disk(memory_folder: Path) -> Iterator[Callable[..., Disk]]:
    """Makes and mounts a ``Disk``."""
    disks: list[Disk] = []

    def make(kind: Kind = "ext4", **options: Any) -> Disk:
        need_tools("mkfs.xfs" if kind == "xfs" else "mkfs.ext4", "mount")
        try:
            disks.append(Disk(memory_folder, kind, **options))
            disks[-1].mount()
        except RigError as error:
            lacking(str(error))
        return disks[-1]

    yield make
    for disk in disks:
        disk.release()
