"""Process groups of torch.distributed in which one process is any rank, and nobody ever answers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def fake_groups() -> Iterator[Callable[[int, int], None]]:
    """``become(rank, world_size)`` makes this process one of a new group; the last one is left at the end."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def become(rank: int, world_size: int) -> None:
        leave()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield become
        finally:
            leave()
