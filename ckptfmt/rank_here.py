"""Which rank this process is, as far as its surroundings tell."""

from __future__ import annotations

import os
import sys

from ckptfmt.errors import InvalidInput


def rank_here() -> tuple[int, int]:
    """(rank, world size): of torch.distributed where it is initialised, else of $RANK and $WORLD_SIZE, else (0, 1).

    ``InvalidInput`` if the environment contradicts itself.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    world_size = _number("WORLD_SIZE", 1)
    rank = _number("RANK", 0)
    if not 0 <= rank < world_size:
        raise InvalidInput(f"$RANK={rank} does not fit $WORLD_SIZE={world_size}: ranks count from 0")
    return rank, world_size


def _number(name: str, absent: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else absent
    except ValueError:
        raise InvalidInput(f"${name}={text!r} is no number") from None
