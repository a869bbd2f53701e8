"""NFSv4.2 servers and mounts of theirs, inside of a machine of ``rig_machine``: there its kernel has both ends of NFS.

What they export lies on that machine's disk, so a test also sees it as the server does, with no client in between.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Final

EXPORT: Final = Path("/mnt/disk/export")
_STATE: Final = Path("/var/lib/nfs")
_IDENTITY: Final = Path("/sys/fs/nfs/net/nfs_client/identifier")
_SECONDS: Final = 60.0
# Clients come back within a lease. A much shorter one runs out on a busy machine, and a client whose lease is lost says
# EIO where nothing was killed.
_GANESHA: Final = f"""
NFS_CORE_PARAM {{ Protocols = 4; NFS_Port = 2049; Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }}
NFSv4 {{ Lease_Lifetime = 6; Grace_Period = 6; RecoveryBackend = fs; Delegations = false; }}
EXPORT {{
    Export_Id = 1; Path = {EXPORT}; Pseudo = /; Access_Type = RW; Squash = No_Root_Squash;
    SecType = sys; Protocols = 4; Transports = TCP; FSAL {{ Name = VFS; }}
}}
LOG {{ Default_Log_Level = WARN; }}
"""
_KEEPER: Final = """
while read word; do
    case $word in
    start)
        rm -f ganesha.pid
        ganesha.nfsd -F -f ganesha.conf -L ganesha.log -p ganesha.pid </dev/null >/dev/null 2>&1 &
        server=$!
        ;;
    kill)
        kill -KILL $server
        wait $server
        ;;
    esac
    echo $word
done
"""


def _run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=_SECONDS)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def prepare(*folders: str) -> None:
    """An empty folder to export, and empty ones for what servers remember of their clients."""
    EXPORT.mkdir(exist_ok=True)
    _run("mount", "-t", "tmpfs", "tmpfs", _STATE)
    for folder in folders:
        (_STATE / folder).mkdir()


class KernelServer:
    """The kernel's own server."""

    def __init__(self) -> None:
        prepare("v4recovery")
        for module in ("nfsv4", "nfsd"):
            _run("modprobe", "-d", "/mnt/modules", module)
        for table in ("etab", "rmtab"):
            (_STATE / table).touch()
        _run("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
        _run("exportfs", "-o", "rw,no_root_squash,sync,no_subtree_check,fsid=0,insecure", f"127.0.0.0/8:{EXPORT}")
        _run("rpc.mountd", "--no-nfs-version", 3)
        _run("rpc.nfsd", "--no-udp", "--no-nfs-version", 3, "-H", "127.0.0.1", "-H", "127.0.0.2", 2)


class UserServer:
    """A server in a process, which can be killed and started again.

    A process of its own starts it: a fork of one that has files open on its mounts would wait for the server when it
    closes them.
    """

    def __init__(self) -> None:
        prepare("ganesha")
        _run("modprobe", "-d", "/mnt/modules", "nfsv4")
        work = Path(os.environ.get("TMPDIR", "/tmp"))
        (work / "ganesha.conf").write_text(_GANESHA)
        pipe = subprocess.PIPE
        self._keeper = subprocess.Popen(["sh", "-c", _KEEPER], cwd=work, stdin=pipe, stdout=pipe, text=True)
        self.runs = False
        self.start()

    def start(self) -> None:
        """Begin to start; it answers about a second later, and takes writes when its clients have come back."""
        assert not self.runs
        self._tell("start")
        self.runs = True

    def kill(self) -> None:
        assert self.runs
        self._tell("kill")
        self.runs = False

    def restart(self) -> None:
        """Kill it and begin to start another."""
        self.kill()
        self.start()

    def end(self) -> None:
        with self._keeper:
            if self.runs:
                self.kill()

    def _tell(self, word: str) -> None:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.write(f"{word}\n")
        self._keeper.stdin.flush()
        assert self._keeper.stdout.readline() == f"{word}\n"


def mount(name: str, *options: str, server: str = "127.0.0.1") -> Path:
    """A client of its own: it shares no cache with the other mounts, and another ``server`` address makes it another
    client for the server, too. Waits for the server."""
    place = Path("/mnt") / name
    place.mkdir()
    _IDENTITY.write_text(name)
    told = ",".join(("vers=4.2", f"addr={server}", f"clientaddr={server}", "nosharecache", *options))
    until = time.monotonic() + _SECONDS
    while True:
        command = ["mount", "-i", "-t", "nfs4", "-o", told, f"{server}:/", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        if done.returncode == 0:
            return place
        assert time.monotonic() < until, done.stderr
        time.sleep(0.1)
