"""What a backend acknowledged survives a power cut, object by object."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from rig_disks import Disk

from ckptfmt.backends.posix import PosixBackend
from ckptfmt.errors import NotFound


@pytest.fixture(params=["ext4", "ext4-writeback", "xfs"])
def disk(request: pytest.FixtureRequest, new_disk: Callable[..., Disk]) -> Disk:
    return new_disk(request.param)


def test_acknowledged_objects_folders_and_deletes_survive(disk: Disk) -> None:
    data = random.Random(0).randbytes(3_000_001)
    backend = PosixBackend(disk.place / "new" / "root")
    backend.create_root()
    backend.make_folder("runs/a")
    backend.create("runs/a/gone", b"x")
    disk.cut_power()
    backend.delete("runs/a/gone")
    backend.create("runs/a/part", b"part")
    writer = backend.open_writer("runs/a/pack", len(data))
    for at in range(0, len(data), 65_536):
        writer.write_at(at, data[at : at + 65_536])
    writer.finish()
    disk.cut_power()
    assert {info.key: info.nbytes for info in backend.list("")} == {"runs/a/pack": len(data), "runs/a/part": 4}
    assert backend.read("runs/a/pack", limit=len(data)) == data
    assert backend.read("runs/a/part", limit=4) == b"part"


def test_an_unfinished_object_is_never_of_the_right_length(disk: Disk) -> None:
    backend = PosixBackend(disk.place)
    for nbytes in (8192, 10_000):
        writer = backend.open_writer(f"x{nbytes}", nbytes)
        writer.write_at(0, bytes(nbytes))
        os.sync()
        disk_length = backend.head(f"x{nbytes}").nbytes
        assert disk_length != nbytes
        del writer
    disk.cut_power()
    for nbytes in (8192, 10_000):
        assert backend.head(f"x{nbytes}").nbytes != nbytes


def test_a_create_cut_off_before_its_name_is_absent(disk: Disk) -> None:
    backend = PosixBackend(disk.place)
    (disk.place / ".ckptfmt-tmp-1-00ff").write_bytes(b"half")
    os.sync()
    disk.cut_power()
    with pytest.raises(NotFound):
        backend.head("x")
    assert [info.key for info in backend.sweep_debris("", dry_run=False)] == [".ckptfmt-tmp-1-00ff"]
