"""Messages between ranks as keys of torch.distributed's store.

A clone of the default store, never the store itself: a client answers one call after the other, and a call of ours
under way would hold up a rendezvous or a collective of the training. No call of ours waits for a key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch.distributed as dist

from ckptfmt.errors import CatalogError
from ckptfmt.ports.coordination import STORE_GONE

T = TypeVar("T")

_PAUSE_SECONDS: Final = 0.02
_RANKS_AT_FULL_PACE: Final = 16


class StoreBoard:
    """Implements ``ckptfmt.ports.coordination.Board``. For one thread at a time."""

    def __init__(self, store: Any, prefix: str, *, world_size: int) -> None:
        self.pause = _PAUSE_SECONDS * max(1.0, world_size / _RANKS_AT_FULL_PACE)
        self._store = store
        self._prefix = prefix
        self._lost: CatalogError | None = None

    def post(self, topic: str, slot: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        text = json.dumps(body)
        # Sets where there is nothing; answers with what stands there.
        stands = self._asked(lambda: self._store.compare_set(self._key(topic, slot), "", text))
        return _decoded(stands)

    def peek(self, topic: str, slots: Sequence[int]) -> dict[int, Mapping[str, Any]]:
        found = self.complete(topic, slots)
        if found is not None:
            return found
        if len(slots) == 1:
            return {}
        return self.complete(topic, [slot for slot in slots if self._has([self._key(topic, slot)])]) or {}

    def complete(self, topic: str, slots: Sequence[int]) -> dict[int, Mapping[str, Any]] | None:
        keys = [self._key(topic, slot) for slot in slots]
        if not self._has(keys):
            return None
        bodies = self._asked(lambda: self._store.multi_get(keys)) if keys else []
        return {slot: _decoded(body) for slot, body in zip(slots, bodies, strict=True)}

    def forget(self, topic: str, slots: Sequence[int]) -> None:
        for slot in slots:
            self._asked(lambda slot=slot: self._store.delete_key(self._key(topic, slot)))  # type: ignore[misc]

    def _has(self, keys: list[str]) -> bool:
        return not keys or self._asked(lambda: bool(self._store.check(keys)))

    def _key(self, topic: str, slot: int) -> str:
        return f"{self._prefix}/{topic}/{slot}"

    def _asked(self, call: Callable[[], T]) -> T:
        if self._lost is not None:
            raise self._lost
        try:
            return call()
        except dist.DistNetworkError as error:
            # The server went with the process that held it, and a client does not connect again.
            self._lost = CatalogError(
                f"torch.distributed's store is gone, and with it perhaps the rank that held it: {_first_line(error)}",
                kind=STORE_GONE,
            )
            raise self._lost from error
        except RuntimeError as error:  # all other errors of stores are such
            raise CatalogError(
                f"torch.distributed's store does not answer: {_first_line(error)}", kind="board_silent", transient=True
            ) from error


def _first_line(error: Exception) -> str:
    """Without the stack of the C++ library."""
    return str(error).partition("\n")[0]


def _decoded(text: bytes | str) -> Mapping[str, Any]:
    body: Mapping[str, Any] = json.loads(text)
    return body


def default_board(prefix: str, *, world_size: int) -> StoreBoard | None:
    """A board in a clone of the default store. None if torch.distributed is not initialised, or has another world."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != world_size:
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    return StoreBoard(store.clone(), f"ckptfmt/{_start()}/{prefix}", world_size=world_size)


def _start() -> str:
    """Which start of its processes this is for a launcher that keeps one store for all of them: what an earlier start
    left there is not for this one. torchrun counts them from 0, but not those at which ranks only come or go."""
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{dist.get_world_size()}"
