"""A whole machine that can be killed: user-mode Linux, with a disk of its own and the host's files as its root.

Killing its process is a power cut: what its kernel had not written to the disk's image is gone. Its kernel is also one
that has what the host's may lack, such as a server and a client of NFS.
"""

from __future__ import annotations

import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from rig_needs import lacking, need_tools
from rig_processes import die_with_parent

_INIT = """#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
export TMPDIR=/run
mount -t tmpfs tmpfs /mnt
mkdir -p /mnt/host /mnt/disk /mnt/modules/lib/modules
ln -s "/usr/lib/uml/modules/$(uname -r)" /mnt/modules/lib/modules/
export PATH="$PATH:/usr/sbin:/sbin"
mount -t hostfs -o {shared} none /mnt/host
ip link set lo up
hostname {host}
mount {device} /mnt/disk
{command} >/mnt/host/out 2>&1
echo $? >/mnt/host/ended
sleep 60
"""

# Kernels of the guest's age set the floating point registers of a process in a buffer of fixed size. A host processor
# with more of them (AMX) refuses that: the rest is taken from what the process has.
_PTRACE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

enum { GET = 0x4204, SET = 0x4205, XSTATE = 0x202 };

long ptrace(int request, ...) {
    static long (*real)(int, pid_t, void *, void *);
    static char whole[65536];
    va_list rest;
    va_start(rest, request);
    pid_t pid = va_arg(rest, pid_t);
    void *address = va_arg(rest, void *), *data = va_arg(rest, void *);
    va_end(rest);
    if (!real) real = dlsym(RTLD_NEXT, "ptrace");
    if (request == SET && (long)address == XSTATE) {
        struct iovec *given = data, all = {whole, sizeof whole};
        if (real(GET, pid, address, &all) == 0 && all.iov_len > given->iov_len) {
            memcpy(whole, given->iov_base, given->iov_len);
            return real(SET, pid, address, &all);
        }
    }
    return real(request, pid, address, data);
}
"""


class Machine:
    """Runs ``command`` with the disk ``image`` mounted on /mnt/disk; ``shared`` is a folder for both sides, /mnt/host
    inside. Its kernel's modules lie below /mnt/modules."""

    def __init__(self, work: Path, image: Path, command: list[str]) -> None:
        need_tools("linux.uml", "gcc", "unshare")
        self.shared = work / "shared"
        self.shared.mkdir()
        script = work / "init"
        line = f"cd {shlex.quote(os.getcwd())}; PYTHONDONTWRITEBYTECODE=1 {shlex.join(command)}"
        script.write_text(
            _INIT.format(shared=self.shared, host=platform.node() or "host", device="/dev/ubda", command=f"( {line} )")
        )
        script.chmod(0o755)
        arguments = ["mem=512M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={script}"]
        arguments += [f"ubd0={image}", "con=null", "con0=null,fd:1", "ssl=null", "quiet", "loglevel=3"]
        environment = {**os.environ, "LD_PRELOAD": str(_shim(work)), "TMPDIR": str(work)}
        self._console = work / "console"
        with self._console.open("wb") as console:
            self._process = subprocess.Popen(
                # All its processes end with the first: it has some that nobody else would end.
                ["unshare", "--pid", "--fork", "--kill-child", "linux.uml", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def wait_for_lines(self, name: str, count: int, seconds: float = 60) -> None:
        """Wait until the file ``name`` of the shared folder has so many lines."""
        until = time.monotonic() + seconds
        while len(self.lines(name)) < count:
            if self._process.poll() is not None:
                lacking(f"user-mode Linux does not run here: {self._console.read_text(errors='replace')[:500]}")
            assert not (self.shared / "ended").exists(), (self.shared / "out").read_text()[-3000:]
            assert time.monotonic() < until, self._console.read_text(errors="replace")[-2000:]
            time.sleep(0.01)

    def wait_for_end(self, seconds: float) -> int:
        """Wait until the command has ended by itself: its exit status. What it said is in the shared file ``out``."""
        ended, until = self.shared / "ended", time.monotonic() + seconds
        while not ended.exists() or not ended.read_text().endswith("\n"):
            if self._process.poll() is not None:
                lacking(f"user-mode Linux does not run here: {self._console.read_text(errors='replace')[:500]}")
            assert time.monotonic() < until, f"not ended in {seconds} s: {self.said()[-6000:]}"
            time.sleep(0.02)
        return int(ended.read_text())

    def said(self) -> str:
        """What the command has written so far."""
        out = self.shared / "out"
        return out.read_text(errors="replace") if out.exists() else self._console.read_text(errors="replace")

    def lines(self, name: str) -> list[str]:
        path = self.shared / name
        return path.read_text().splitlines() if path.exists() else []

    def kill(self) -> None:
        """The power goes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def release(self) -> None:
        if self._process.poll() is None:
            self.kill()


def _shim(work: Path) -> Path:
    source, library = work / "ptrace.c", work / "ptrace.so"
    source.write_text(_PTRACE)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def python(script: str, *arguments: object) -> list[str]:
    """The command that runs a script of this folder with this very interpreter."""
    return [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
