"""Parts of many ranks are read several at a time, and each is compared with what its rank acknowledged."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.engine.protocol import read_parts
from ckptfmt.engine.transfer import IO_THREADS
from ckptfmt.errors import Corrupt, SaveFailed
from ckptfmt.format import layout
from ckptfmt.format.manifest import Writer, manifest_digest
from ckptfmt.format.part import Part, encode_part

KEY = "a" * 32
WORLD = 100
"""More than are held in memory at once, and no multiple of the threads."""


def part(rank: int) -> bytes:
    return encode_part(
        Part(
            key=KEY,
            step=1,
            launch=KEY,
            save_number=0,
            created_at="2025-01-02T03:04:05Z",
            writer=Writer(library="ckptfmt", version="test"),
            rank=rank,
            world_size=WORLD,
        )
    )


class SlowBackend(MemoryBackend):
    """Answers the first reads only once there are as many as threads."""

    def __init__(self, name: str) -> None:
        super().__init__(re.sub("[^a-zA-Z0-9]", "-", name))
        self._gate = threading.Barrier(IO_THREADS)
        self._met = threading.local()

    def read(self, key: str, *, limit: int) -> bytes:
        if not getattr(self._met, "done", False) and layout.part_name(IO_THREADS) > key.rpartition("/")[2]:
            self._met.done = True
            self._gate.wait(30)
        return super().read(key, limit=limit)


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Any:
    backend = SlowBackend(request.node.name)
    backend.make_folder(f"runs/r/{KEY}")
    for rank in range(WORLD):
        backend.create(f"runs/r/{KEY}/{layout.part_name(rank)}", part(rank))
    return SimpleNamespace(backend=backend)


def row() -> Any:
    return SimpleNamespace(id=7, key=KEY, run_key="r")


def reports() -> list[Any]:
    return [
        SimpleNamespace(rank=rank, part_name=layout.part_name(rank), part_digest=manifest_digest(part(rank)))
        for rank in range(WORLD)
    ]


def test_parts_come_in_the_order_of_ranks(site: Any) -> None:
    found = read_parts(site, row(), reports()[::-1])
    assert [one.rank for one in found] == list(range(WORLD))


def test_a_part_that_is_another_is_named(site: Any) -> None:
    ranks = reports()
    ranks[WORLD - 1].part_digest = "0" * 32
    with pytest.raises(Corrupt, match=layout.part_name(WORLD - 1)):
        read_parts(site, row(), ranks)


def test_a_rank_without_a_part_is_named(site: Any) -> None:
    ranks = reports()
    ranks[70].part_name = None
    with pytest.raises(SaveFailed, match="rank 70 has not acknowledged") as failed:
        read_parts(site, row(), ranks)
    assert failed.value.rank == 70
