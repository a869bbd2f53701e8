"""Starts of a job with a process for each rank, all on this host: forked, killed, stopped and continued at will."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from forked import Forked, _result

import ckptfmt
from ckptfmt import connect
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.demo.processes import task_state
from ckptfmt.errors import Fenced, SaveFailed
from ckptfmt.repository import Repository
from ckptfmt.testing.catalog_faults import FaultyCatalog
from ckptfmt.testing.faults import Fault, FaultyBackend
from ckptfmt.tiering import NO_TIERS, TierOrder, with_tiers

WORLD: Final = 4
ROWS: Final = 24
LIMIT_SECONDS: Final = 150
GATHER_SECONDS: Final = 60
PLACES: Final = ("catalog", "c10d")


class Rank:
    """One process of a start of the job."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.backend: FaultyBackend
        self.catalog: FaultyCatalog
        self._gathered = False

    def join_group(self) -> None:
        """What a launcher's script does first."""
        if self.job.place == "c10d":
            import torch.distributed as dist

            host, port, world = "127.0.0.1", self.job.port, self.job.world
            patience = timedelta(seconds=self.job.group_seconds)
            if self.job.agent:
                store = dist.PrefixStore(self.job.token, dist.TCPStore(host, port, is_master=False))
                dist.init_process_group("gloo", store=store, rank=self.rank, world_size=world, timeout=patience)
            else:
                address = f"tcp://{host}:{port}"
                dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=world, timeout=patience)

    def repository(self, *faults: Fault, sql: Sequence[Fault] = ()) -> Repository:
        """The job's repository, through which calls of this rank can be broken."""
        connection = connect.open_site(self.job.root, mode="w", catalog=self.job.catalog, storage_options=None)
        connection = with_tiers(connection, self.job.tiers(self.rank))
        self.backend = FaultyBackend(connection.site.backend, *faults)
        self.catalog = FaultyCatalog(connection.site.sql(), *sql)
        site = dataclasses.replace(connection.site, backend=self.backend, catalog=self.catalog)
        return Repository(dataclasses.replace(connection, site=site), "w")

    @contextlib.contextmanager
    def checkpointer(self, *faults: Fault, sql: Sequence[Fault] = (), **options: Any) -> Iterator[Checkpointer]:
        """This rank's checkpointer of the run "run". No rank uses its first one before all have one."""
        with self.repository(*faults, sql=sql) as repository:
            named = {"rank": self.rank, "world_size": self.job.world, "coordination": self.job.place}
            if self.job.place == "catalog":
                named["launch"] = self.job.token
            with repository.checkpointer("run", **{**named, **options}) as checkpointer:
                self.gather()
                yield checkpointer

    def gather(self) -> None:
        """Once: this rank has begun, and waits until all have."""
        if not self._gathered:
            self.job.gathering.wait(GATHER_SECONDS)
            self._gathered = True

    def state(self, seed: int) -> dict[str, Any]:
        """This rank's view of a state that is made from ``seed`` alone."""
        return state_of(seed, self.rank, self.job.world)

    def die(self) -> BaseException:
        """End at once: ``error=rank.die``."""
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    def stop(self) -> BaseException:
        """Stand still until somebody continues this process: ``error=rank.stop``."""
        os.kill(os.getpid(), signal.SIGSTOP)
        return ckptfmt.CkptError("continued")


Body = Callable[[Rank], Any]


class Job:
    """One start of a job of ``world`` ranks that save to ``root`` and meet in ``place``.

    With ``agent``, its port, another process holds the process group's store, as the agent of a launcher does; else
    rank 0 does. ``group_seconds`` is how long the process group waits for anything. No rank does anything before
    all have a checkpointer: how long they wait for each other then has nothing to do with how busy the machine is.
    """

    def __init__(
        self,
        root: Path,
        place: str,
        *,
        world: int = WORLD,
        catalog: str | None = None,
        agent: int = 0,
        group_seconds: float = 60.0,
        tiers: Callable[[int], TierOrder] = lambda rank: NO_TIERS,
    ) -> None:
        self.root = root
        self.place = place
        self.world = world
        self.catalog = catalog
        self.token = secrets.token_hex(16)
        self.agent = agent
        self.port = agent or free_port()
        self.group_seconds = group_seconds
        self.tiers = tiers
        """What each rank opens beside the durable tier."""
        self.gathering = multiprocessing.get_context("fork").Barrier(world)
        if place == "c10d":
            import torch.distributed  # noqa: F401  # once for all forks

    def start(self, body: Body) -> list[Forked]:
        """Every rank runs ``body``."""
        return [Forked(partial(self._run, body, rank)) for rank in range(self.world)]

    def _run(self, body: Body, number: int) -> Any:
        return self.guarded(body, Rank(self, number))

    def guarded(self, body: Body, rank: Rank) -> Any:
        """What ``rank`` does in its process, for a limited time."""
        os.environ["OMP_NUM_THREADS"] = "1"
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, chain=True)  # a rank that hangs says where
        signal.alarm(LIMIT_SECONDS)
        rank.join_group()
        return body(rank)

    def run(self, body: Body) -> list[Any]:
        """What every rank returned, once all have; ``AssertionError`` with the traceback of one that raised."""
        return [_result(*end) for end in [rank.end() for rank in self.start(body)]]

    def run_some(self, body: Body) -> list[Any]:
        """As ``run``, with None for a rank that was killed."""
        ends = [rank.end() for rank in self.start(body)]
        return [None if status == -signal.SIGKILL else _result(answer, status) for answer, status in ends]


AGENT: Final = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
"""Holds a store until its input ends. No fork: a process with the threads of a store cannot be forked."""


@contextlib.contextmanager
def store_process() -> Iterator[subprocess.Popen[str]]:
    """A process that holds a store and tells its port."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", AGENT], stdin=pipe, stdout=pipe, text=True) as agent:
        try:
            yield agent
        finally:
            agent.kill()


@contextlib.contextmanager
def store_agent() -> Iterator[int]:
    """The port of a store that outlives the ranks."""
    with store_process() as agent:
        assert agent.stdout is not None
        yield int(agent.stdout.readline())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def state_of(seed: int, rank: int, world: int) -> dict[str, Any]:
    whole = whole_of(seed)
    share = ROWS // world
    mine = whole["w"][rank * share : (rank + 1) * share].copy()
    return {
        "w": ckptfmt.Sharded(mine, whole["w"].shape, (rank * share, 0)),
        "b": whole["b"],
        "own": ckptfmt.PerRank({"position": seed * 100 + rank}),
        "step": seed,
    }


def whole_of(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal((ROWS, 5)), "b": rng.integers(-9, 9, size=1000, dtype=np.int64)}


def assert_saved(root: Path, seed: int, world: int, *, catalog: str | None = None) -> None:
    """The latest generation of the run holds that state, of every rank."""
    with ckptfmt.open(root, mode="r", catalog=catalog) as repository:
        generation = repository.latest("run")
        assert generation.step == seed
        assert generation.world_size == world
        for rank in range(world):
            found = generation.load(rank=rank)
            assert found["w"].tobytes() == whole_of(seed)["w"].tobytes()
            assert found["b"].tobytes() == whole_of(seed)["b"].tobytes()
            assert found["own"] == {"position": seed * 100 + rank}
            assert found["step"] == seed


def outcome_of(call: Callable[[], Any]) -> dict[str, Any]:
    """What a save came to, on this rank: the id of its generation, or who failed and in which words; and how long it
    took."""
    began = time.monotonic()
    try:
        generation = call()
    except Fenced as error:
        return {"id": None, "seconds": time.monotonic() - began, "rank": None, "text": str(error), "kind": error.kind}
    except SaveFailed as error:
        told = {"rank": error.rank, "stage": error.stage, "text": str(error), "kind": error.kind}
        return {"id": None, "seconds": time.monotonic() - began, **told}
    return {"id": generation.id, "step": generation.step, "seconds": time.monotonic() - began}


def save_and_wait(checkpointer: Checkpointer, state: Any, step: int, **options: Any) -> dict[str, Any]:
    def save() -> Any:
        pending = checkpointer.save(state, step=step, **options)
        assert pending is not None
        return pending.result(60)

    return outcome_of(save)


def rows_of(root: Path, catalog: str | None = None) -> list[dict[str, Any]]:
    """All generations of the run, oldest first."""
    with ckptfmt.open(root, mode="r", catalog=catalog) as repository:
        infos = repository.generations(run="run", state=None)
    return [info.as_json() for info in sorted(infos, key=lambda info: info.id)]


def is_stopped(pid: int) -> bool:
    return task_state(f"/proc/{pid}/stat") == "T"


def wait_until(reached: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.02)
