"""Copies of a state in host memory for ``async_save``: the copies of a snapshot, in memory that is used again."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Final, cast

import numpy as np
import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from ckptfmt import connect
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.transfer import copy_memory
from ckptfmt.ports.arrays import ArrayFamily
from ckptfmt.torch.distributed import is_distributed, local_tensor
from ckptfmt.torch.elements import EXACT_TYPES

_ALIGNMENT: Final = 64


class Staging:
    """Stages one state after another. An arena is used again once nobody has a tensor in it any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Arena] = []

    def stage(self, state: Any) -> Any:
        """Return a copy of ``state`` on the CPU: tensors share one piece of memory, everything else is copied deep."""
        family = connect.live_families().named("tensor")
        if family is None:
            raise AssertionError("torch is imported, and its family is not there")
        layout = _Layout(family)
        layout.add(state)
        arena = self._take()
        arena.reserve(layout.nbytes)
        memory = np.frombuffer(arena.view(0, layout.nbytes), dtype=np.uint8)
        weakref.finalize(memory, self._give_back, arena)
        layout.copy(memory)
        arena.mark_touched(layout.nbytes)
        return layout.staged(state, torch.from_numpy(memory))

    def _take(self) -> Arena:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Arena(connect.live_families().pin)

    def _give_back(self, arena: Arena) -> None:
        with self._lock:
            self._idle.append(arena)

    def drop(self) -> None:
        """Give idle memory back to the system."""
        with self._lock:
            idle, self._idle = self._idle, []
        for arena in idle:
            arena.drop()


class _Layout:
    """Where each tensor of a state goes: tensors over the same memory to one place."""

    def __init__(self, family: ArrayFamily) -> None:
        self._family = family
        self.nbytes = 0
        self._places: dict[Any, int] = {}
        self._values: list[tuple[torch.Tensor, int]] = []

    def add(self, value: Any) -> None:
        kind = type(value)
        if kind in EXACT_TYPES:
            self._add(value)
        elif isinstance(value, torch.Tensor):
            if is_distributed(value):
                self._add(local_tensor(value))
        elif isinstance(value, Mapping):
            for item in value.values():
                self.add(item)
        elif isinstance(value, list | tuple):
            for item in value:
                self.add(item)

    def _add(self, value: torch.Tensor) -> None:
        if value.nbytes and _key(value) not in self._places:
            self._family.describe(value, "a tensor of the state")  # sparse ones, say, are refused
            self._places[_key(value)] = self.nbytes
            self._values.append((value, self.nbytes))
            self.nbytes += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT

    def copy(self, memory: np.ndarray[Any, Any]) -> None:
        base = memory.ctypes.data
        moves, others = [], []
        view = memoryview(memory)  # type: ignore[arg-type]
        for value, place in self._values:
            address = self._family.host_address(value)
            if address is None:
                others.append((value, view[place : place + value.nbytes]))
            else:
                moves.append((base + place, address, value.nbytes))
        capture = self._family.capture(others)  # device copies are enqueued first
        copy_memory(moves)
        capture.wait()

    def staged(self, value: Any, memory: torch.Tensor) -> Any:
        kind = type(value)
        if kind in EXACT_TYPES:
            return self._staged(value, memory)
        if isinstance(value, torch.Tensor):
            if not is_distributed(value):  # ShardedTensor and the like
                return BlockingAsyncStager().stage({"value": value})["value"]
            local = self._staged(local_tensor(value), memory)
            make: Any = type(value)
            return make(local, cast(Any, value)._spec, requires_grad=False)
        if isinstance(value, Mapping):
            return {key: self.staged(item, memory) for key, item in value.items()}
        if kind in (list, tuple):
            return kind([self.staged(item, memory) for item in value])
        return copy.deepcopy(value)

    def _staged(self, value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        if not value.nbytes:
            return torch.empty(value.shape, dtype=value.dtype)
        place = self._places[_key(value)]
        return memory[place : place + value.nbytes].view(value.dtype).view(value.shape)


def _key(value: torch.Tensor) -> Any:
    lazy = (value.is_conj(), value.is_neg())
    return value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), lazy
