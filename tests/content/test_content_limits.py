"""Short writes, open files, memory: what is bounded, and what loops until it is done (FR-065, FR-113, FR-115)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from content_fixtures import exact

import ckptfmt
from ckptfmt import connect
from ckptfmt.backends.posix import PosixBackend
from ckptfmt.repository import Repository
from ckptfmt.testing.faults import Fault, FaultyBackend
from ckptfmt.testing.syscalls import WatchedSyscalls


def repository_over(place: Path, backend: Any) -> Repository:
    """A repository that reads and writes through ``backend``."""
    ckptfmt.open(place).close()
    connection = connect.open_site(place, mode="w", catalog=None, storage_options=None)
    return Repository(dataclasses.replace(connection, site=dataclasses.replace(connection.site, backend=backend)), "w")


def state() -> dict[str, Any]:
    return {"odd": torch.arange(1001, dtype=torch.float64), "b": np.arange(7, dtype=np.int8), "s": torch.tensor(1.0)}


@pytest.mark.parametrize("longest", [7, 4095, 4097])
def test_fr065_a_kernel_that_takes_few_bytes_a_call_gets_them_all(tmp_path: Path, longest: int) -> None:
    calls = WatchedSyscalls(longest=longest)
    with (
        repository_over(tmp_path, PosixBackend(tmp_path, syscalls=calls)) as repository,
        repository.checkpointer() as checkpointer,
    ):
        pending = checkpointer.save(state(), step=0)
        assert pending is not None
        generation = pending.result()
        assert exact(generation.load()) == exact(state())
        assert generation.verify().ok
    assert sum(call.name == "pwrite" for call in calls.calls) > 2
    assert calls.left_open == []
    assert exact(ckptfmt.load(tmp_path)) == exact(state())


@pytest.mark.slow
def test_fr065_a_torn_write_is_written_anew_or_reported_never_stored_as_zeros(tmp_path: Path) -> None:
    torn = Fault("write_at", error=lambda: ckptfmt.Unavailable("cut short"), timing="torn", times=1)
    with (
        repository_over(tmp_path, FaultyBackend(PosixBackend(tmp_path), torn)) as repository,
        repository.checkpointer() as checkpointer,
    ):
        pending = checkpointer.save(state(), step=0)
        assert pending is not None
        generation = pending.result()
        assert torn.fired == 1
        assert generation.verify().ok
        assert exact(generation.load()) == exact(state())
        torn.times, torn.fired = None, 0
        failing = checkpointer.save(state(), step=1)
        assert failing is not None
        with pytest.raises(ckptfmt.SaveFailed, match="cut short"):
            failing.result()
        assert repository.latest().step == 0


def run(code: str, *arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_fr115_open_files_stay_bounded(tmp_path: Path) -> None:
    run(
        """
import resource, sys, numpy as np
import ckptfmt
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
state = {f"t{n}": np.full(3, n) for n in range(5000)}
generation = ckptfmt.save(state, sys.argv[1])
kept = [generation[name] for name in generation]
assert len(kept) == 5000 and all(kept[n][1] == n for n in range(0, 5000, 25))
loaded = ckptfmt.load(sys.argv[1])
assert all(loaded[f"t{n}"].tolist() == [n] * 3 for n in range(5000))
for _ in range(30):
    ckptfmt.open(sys.argv[1], mode="r").latest()
""",
        tmp_path,
    )


@pytest.mark.slow
def test_fr113_a_restore_without_atomic_needs_no_second_copy(tmp_path: Path) -> None:
    """Peak memory above the live state: far less than the state, and the default never asks for a device."""
    run(
        """
import sys, numpy as np, ckptfmt
from pathlib import Path

def status(word):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if word in line)

def peak(**options):
    live["a"][:] = 0
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = status("VmRSS:")
    ckptfmt.restore(live, sys.argv[1], **options)
    assert live["a"].all()
    return status("VmHWM:") - before

nbytes = 128 << 20
live = {"a": np.ones(nbytes, np.uint8)}
ckptfmt.save(live, sys.argv[1])
assert peak() > nbytes // 2, "the default holds the state twice, else this measures nothing"
assert peak(atomic=False) < nbytes // 3
""",
        tmp_path,
    )
