"""Real ranks, a process each: what the simulation is held against.

    python -m benchmarks.ranks_anchor ROOT CATALOG RANKS TENSORS PLACE

Prints one JSON object. The ranks are forked and hold tiny tensors; rank 0 is watched at every step. With coordination
"c10d" they have torch.distributed's store, and a process group that communicates with nobody: a save needs none.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch.distributed as dist
from ml_dtypes import bfloat16
from torch.testing._internal.distributed import fake_pg  # noqa: F401

import ckptfmt
import ckptfmt.catalog.postgres
import ckptfmt.launching
import ckptfmt.torch.family
from benchmarks.ranks_timing import Steps, Timed
from benchmarks.ranks_world import OWN_BYTES, RUN, World
from ckptfmt import connect
from ckptfmt.engine import protocol
from ckptfmt.engine.save.messages import Messages
from ckptfmt.engine.save.rows import Rows
from ckptfmt.repository import Repository

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("tests", "tests/ranks")]

from forked import at_once
from meeting_rig import store_agent

LIMIT_SECONDS: Final = 200
SAVES: Final = 2
"""The first one maps memory; the second one is what counts."""


def main(root: str, catalog: str, world: World, place: str) -> dict[str, Any]:
    token = secrets.token_hex(16)
    with store_agent() as port:
        answers = at_once(partial(_rank, world, root, catalog, place, port, token), world.ranks)
    told: dict[str, Any] = answers[0]
    return told | {
        "seconds": max(answer["seconds"] for answer in answers),
        "stall": max(answer["stall"] for answer in answers),
        "cpu_a_rank": sum(answer["cpu"] for answer in answers[1:]) / max(1, len(answers) - 1),
    }


def _rank(world: World, root: str, catalog: str, place: str, port: int, token: str, rank: int) -> dict[str, Any]:
    faulthandler.dump_traceback_later(LIMIT_SECONDS - 5)  # a rank that hangs says where
    signal.alarm(LIMIT_SECONDS)
    if place == "c10d":
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("fake", store=store, rank=rank, world_size=world.ranks)
    connection = connect.open_site(root, mode="w", catalog=catalog, storage_options=None)
    database, storage = Timed(connection.site.sql()), Timed(connection.site.backend)
    site = dataclasses.replace(connection.site, backend=storage, catalog=database)  # type: ignore[arg-type]
    steps = Steps(database, storage)
    options: dict[str, Any] = {} if place == "c10d" else {"launch": token}
    with (
        Repository(dataclasses.replace(connection, site=site), "w") as repository,
        repository.checkpointer(
            RUN,
            rank=rank,
            world_size=world.ranks,
            coordination=place,
            **options,  # type: ignore[arg-type]
        ) as checkpointer,
    ):
        for n in range(SAVES):
            steps.found.clear()
            with _watched(steps) if rank == 0 else _unwatched():
                began = time.perf_counter(), time.process_time()
                pending = checkpointer.save(_state(rank, world, n), step=n)
                assert pending is not None
                pending.result(LIMIT_SECONDS)
                seconds, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        return {"steps": steps.found, "seconds": seconds, "cpu": cpu, "stall": pending.stall_seconds}


def _state(rank: int, world: World, n: int) -> dict[str, Any]:
    random = np.random.default_rng([rank, n])
    model = {}
    for name, shape in world.shapes:
        box = world.share(rank, shape)
        assert box is not None
        model[name] = ckptfmt.Sharded(random.integers(0, 9, box[1]).astype(bfloat16), shape, box[0])
    own = {"torch": random.integers(0, 255, OWN_BYTES, dtype=np.uint8), "position": rank}
    return {"model": model, "step": n, "own": ckptfmt.PerRank(own)}


@contextmanager
def _unwatched() -> Iterator[None]:
    yield


@contextmanager
def _watched(steps: Steps) -> Iterator[None]:
    """Time the coordinator's steps as they are taken."""
    watched: list[tuple[Any, str, str]] = [
        (protocol, "settle_lower", "C3"),
        (protocol, "parent_of", "C3"),
        (protocol, "merge", "C3"),
        (protocol, "commit", "C4"),
        (protocol, "prove", "C5"),
    ]
    for kind in (Messages, Rows):
        watched += [(kind, "begin", "C1"), (kind, "opened", "C1"), (kind, "gathered", "C2"), (kind, "announce", "C5")]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in watched]
    for (owner, name, found), (_, _, step) in zip(kept, watched, strict=True):
        setattr(owner, name, _timed(found, steps, step, latest=name == "gathered"))
    try:
        yield
    finally:
        for owner, name, found in kept:
            setattr(owner, name, found)


def _timed(found: Callable[..., Any], steps: Steps, step: str, *, latest: bool) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        if latest:  # it is asked again and again until all are there: only that answer counts
            steps.found.pop(step, None)
        with steps.step(step):
            return found(*arguments, **named)

    return call


if __name__ == "__main__":
    root, catalog, ranks, tensors, place = sys.argv[1:]
    print(json.dumps(main(root, catalog, World(int(ranks), int(tensors), "tiny"), place)))
