"""One start of the training under torchrun: its ranks, to their end or until one of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptfmt.connect import CATALOG_VARIABLE
from ckptfmt.demo.journal import rank_journal, read_journal
from ckptfmt.demo.place import Place
from ckptfmt.demo.processes import alive, send
from ckptfmt.errors import DrillFailed

Events = list[dict[str, Any]]

JOB_SECONDS = 900
"""A job that takes so long hangs."""

_TEAR_DOWN_SECONDS = 60
"""After SIGTERM, torchrun itself waits half a minute before it kills its ranks."""


@dataclass(frozen=True, kw_only=True)
class Setup(Place):
    """What all jobs of one demo have in common."""

    catalog: str
    steps: int


class Job:
    """torchrun with ``ranks`` training processes on this machine, as one job of a cluster would be.

    ``saved_by`` is the number of ranks that saved what it restores, where that is not ``ranks``.
    """

    def __init__(
        self, setup: Setup, name: str, *, ranks: int, saving: bool = True, saved_by: int | None = None
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.journal = setup.folder / f"{name}.jsonl"
        self._output = setup.folder / f"{name}.output"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["--module", "ckptfmt.demo.ranks.train"]
        command += setup.arguments(self.journal, steps=setup.steps, saving=saving)
        command += [] if saved_by is None else ["--saved-by", str(saved_by)]
        # In the environment, where the password of the catalog is seen by nobody else.
        here = {CATALOG_VARIABLE: setup.catalog, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with self._output.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=os.environ | here
            )

    @property
    def words(self) -> str:
        """What it has printed."""
        return self._output.read_text(errors="replace")

    def events(self, rank: int) -> Events:
        return read_journal(rank_journal(self.journal, rank))

    def pid(self, rank: int) -> int:
        """The process of a rank. Waits for it to begin; ``DrillFailed`` if the job ends before."""
        self._wait(lambda: bool(self.events(rank)) or self.ended(), f"rank {rank} does not begin", seconds=300)
        return int(self._began(rank)["pid"])

    def _began(self, rank: int) -> dict[str, Any]:
        events = self.events(rank)
        if not events:
            raise DrillFailed(f"{self.name}: rank {rank} did not begin; the job said:\n{self.words[-4000:]}")
        return events[0]

    def ended(self) -> bool:
        """Whether it has come to its end. ``DrillFailed`` if it failed."""
        code = self._process.poll()
        if code:
            raise DrillFailed(f"the job {self.name} ended with code {code}; it said:\n{self.words[-6000:]}")
        return code == 0

    def wait(self) -> list[Events]:
        """Wait for its end; the events of each rank. ``DrillFailed`` if it failed, or hangs."""
        self._wait(self.ended, "it does not come to its end", seconds=JOB_SECONDS)
        return [self.events(rank) for rank in range(self.ranks)]

    def wait_torn_down(self) -> float:
        """After a rank was killed: wait until torchrun has ended all others and has failed itself. Seconds it took."""
        began = time.monotonic()
        self._wait(lambda: self._process.poll() is not None, "torchrun does not tear the job down")
        if self._process.returncode == 0:
            raise DrillFailed(f"{self.name}: torchrun reports success, although a rank was killed")
        pids = [int(self._began(rank)["pid"]) for rank in range(self.ranks)]
        self._wait(lambda: not any(map(alive, pids)), f"ranks survive torchrun: {[pid for pid in pids if alive(pid)]}")
        return time.monotonic() - began

    def discard(self) -> None:
        """End it in whatever state it is; for the way out of an error."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_TEAR_DOWN_SECONDS)
        except subprocess.TimeoutExpired:
            for rank in range(self.ranks):
                for event in self.events(rank)[:1]:
                    send(int(event["pid"]), signal.SIGKILL)
            self._process.kill()
            self._process.wait()

    def _wait(self, over: Callable[[], bool], problem: str, seconds: float = _TEAR_DOWN_SECONDS) -> None:
        until = time.monotonic() + seconds
        while not over():
            if time.monotonic() > until:
                raise DrillFailed(f"{self.name}: {problem} within {seconds:g} s; the job said:\n{self.words[-4000:]}")
            time.sleep(0.01)
