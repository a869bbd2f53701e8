"""Which ranks save together, as DCP's plans tell, and the launch in which they do."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from ckptfmt.errors import CkptError, InvalidInput
from ckptfmt.repository import Repository, open_repository

if TYPE_CHECKING:
    from ckptfmt.generation import Generation

log = logging.getLogger("ckptfmt")

_used: Final[set[str]] = set()
"""Tokens of launches that this process has begun: each names one."""


@dataclass(frozen=True)
class Seat:
    """The ranks of the process group that save, in its order, and the token of the launch that they would begin."""

    ranks: tuple[int, ...]
    token: str


@dataclass(frozen=True)
class Place:
    """Where generations go, and how."""

    url: str
    run: str
    catalog: str | None
    storage_options: Mapping[str, Any] | None
    commit_timeout: float
    host_bytes_max: int | None


def rank_in_world() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def seat_of(told: Sequence[Any]) -> Seat | None:
    """The seat of all whose plans came together; ``told`` is what each rank left in its plan. None where a planner that
    caches plans sent none: then every rank finds the seat in the plan that it kept."""
    count = len(told)
    if all(isinstance(rank, int) for rank in told):
        ranks = tuple(told)
    elif count in (1, world_size()):
        ranks = (rank_in_world(),) if count == 1 else tuple(range(count))
    else:
        return None
    return Seat(ranks, secrets.token_hex(16))


class Launch:
    """One launch of the run, of the ranks of a seat. Opening it waits for the other ranks, a bounded time."""

    def __init__(self, place: Place, seat: Seat) -> None:
        self.ranks = seat.ranks
        mine = rank_in_world()
        if mine not in seat.ranks:
            raise InvalidInput(f"rank {mine} saves, but the plan is one of ranks {list(seat.ranks)}: use one planner")
        fresh = seat.token not in _used
        _used.add(seat.token)
        self._repository: Repository = open_repository(
            place.url,
            mode="w",
            run=place.run,
            at=None,
            catalog=place.catalog,
            storage_options=place.storage_options,
        )
        try:
            self._checkpointer = self._repository.checkpointer(
                rank=seat.ranks.index(mine),
                world_size=len(seat.ranks),
                launch=seat.token if fresh else None,
                commit_timeout=place.commit_timeout,
                host_bytes_max=place.host_bytes_max,
            )
        except BaseException:
            self._repository.close()
            raise

    def save(self, state: Any, *, step: int, metadata: Any, tags: Sequence[str]) -> Generation:
        """Save, and wait for the verdict, which is the same on all ranks."""
        pending = self._checkpointer.save(state, step=step, metadata=metadata, tags=tags)
        if pending is None:
            raise AssertionError("a save that waits was skipped")
        return pending.result()

    def close(self) -> None:
        try:
            self._checkpointer.close()
        except CkptError as error:  # it was told when it failed
            log.info("the launch ends after a failed save: %s", error)
        finally:
            self._repository.close()
