"""Tests that run inside of a machine of their own, since its kernel has NFS where the host's may not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from rig_machine import Machine
from rig_needs import need_root, need_tools

INSIDE: Final = Path(__file__).with_name("nfs")
_TOOLS: Final = ("mkfs.ext4", "modprobe", "mount.nfs4", "exportfs", "rpc.mountd", "rpc.nfsd", "ganesha.nfsd")


def run_inside(work: Path, *arguments: str, seconds: float) -> tuple[int, str]:
    """Run pytest with ``arguments`` in a machine with an empty disk: its exit status and what it said."""
    need_root("use the host's files as a machine's own")
    need_tools(*_TOOLS)
    image = work / "disk.image"
    with image.open("wb") as file:
        file.truncate(512 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
    pytest = [sys.executable, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", "-o", "timeout=120", *arguments]
    machine = Machine(work, image, ["env", f"CI={os.environ.get('CI', '')}", *pytest])
    try:
        return machine.wait_for_end(seconds), machine.said()
    finally:
        machine.release()
