"""What was acknowledged survives a power cut: an ext4 image is shut down without flushing, and mounted again."""

from __future__ import annotations

import fcntl
import os
import random
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfmt.backends.posix import PosixBackend
from ckptfmt.errors import NotFound

_FS_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32), as ext4 and XFS know it
_NO_LOG_FLUSH = 2


class Disk:
    """An ext4 file system in a file."""

    def __init__(self, folder: Path) -> None:
        self._image = folder / "image"
        self.place = folder / "disk"
        self.place.mkdir()
        with self._image.open("wb") as file:
            file.truncate(64 << 20)
        self._run("mkfs.ext4", "-q", str(self._image))
        self.mount()

    def _run(self, *command: str) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"{command[0]} is not installed")
        if done.returncode != 0:
            pytest.skip(f"{command[0]} is not possible here: {done.stderr.strip()}")

    def mount(self) -> None:
        self._run("mount", "-o", "loop", str(self._image), str(self.place))

    def unmount(self) -> None:
        subprocess.run(["umount", self.place], check=True)

    def cut_power(self) -> None:
        """Drop everything that has not reached the disk, then mount it again."""
        descriptor = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _FS_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(descriptor)
        self.unmount()
        self.mount()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.unmount()


def test_the_rig_loses_what_was_not_synced(disk: Disk) -> None:
    (disk.place / "unsynced").write_bytes(b"x" * 5000)
    disk.cut_power()
    assert not (disk.place / "unsynced").exists() or (disk.place / "unsynced").stat().st_size == 0


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
