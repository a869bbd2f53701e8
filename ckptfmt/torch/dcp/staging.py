"""Copies of a state in host memory for ``async_save``: the copies of a snapshot, in memory that is used again."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from ckptfmt import connect
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.collector import held_back
from ckptfmt.engine.transfer import copy_memory
from ckptfmt.ports.arrays import ArrayFamily, LeafSpec
from ckptfmt.torch.distributed import is_distributed, local_tensor
from ckptfmt.torch.elements import EXACT_TYPES, allocate, over_host

_ALIGNMENT: Final = 64
_CONSTANTS: Final = frozenset({bool, int, float, str, bytes, type(None)})


class Staging:
    """Stages one state after another. An arena is used again once nobody has a tensor in it any more."""

    def __init__(self) -> None:
        self._idle: deque[Arena] = deque()
        """No lock: what gives an arena back is a collection of garbage, which may come at any line of this thread."""
        self._seen: list[LeafSpec] = []
        """The tensors of the last state: comparing is cheaper than describing anew."""

    def stage(self, state: Any) -> Any:
        """Return a copy of ``state`` on the CPU: tensors lie in one piece of memory, everything else is copied deep."""
        family = connect.live_families().named("tensor")
        if family is None:
            raise AssertionError("torch is imported, and its family is not there")
        with held_back():
            layout = _Layout(family, self._seen)
            layout.add(state, "")
            self._seen = layout.specs
            arena = self._take()
            nbytes = max(1, layout.nbytes)  # numpy refuses memory of no bytes
            arena.reserve(nbytes)
            memory = np.frombuffer(arena.view(0, nbytes), dtype=np.uint8)
            weakref.finalize(memory, self._idle.append, arena).atexit = False
            layout.copy(memory)
            arena.mark_touched(layout.nbytes)
            return layout.staged(state, memory)

    def _take(self) -> Arena:
        try:
            return self._idle.pop()
        except IndexError:
            return Arena(connect.live_families().pin)

    def drop(self) -> None:
        """Give idle memory back to the system."""
        while self._idle:
            self._idle.pop().drop()


class _Layout:
    """Where each tensor of a state goes: tensors over the same memory to one place.

    ``add`` and ``staged`` walk over the state in the same order.
    """

    def __init__(self, family: ArrayFamily, seen: Sequence[LeafSpec]) -> None:
        self._family = family
        self._seen = iter(seen)
        self.specs: list[LeafSpec] = []
        self.nbytes = 0
        self._known: dict[Hashable, slice] = {}
        self._places: list[slice] = []
        self._values: list[tuple[torch.Tensor, slice, int | None]] = []
        """What is copied: tensor, place, and where its bytes lie dense in host memory."""

    def add(self, value: Any, path: str) -> None:
        kind = type(value)
        if kind in EXACT_TYPES:
            self._add(value, path)
        elif kind in _CONSTANTS:
            pass
        elif isinstance(value, torch.Tensor):
            if is_distributed(value):
                self._add(local_tensor(value), path)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.add(item, f"{path}.{key}" if path else str(key))
        elif kind in (list, tuple):
            for index, item in enumerate(value):
                self.add(item, f"{path}.{index}")

    def _add(self, value: torch.Tensor, path: str) -> None:
        spec = self._family.describe(value, path, next(self._seen, None))
        self.specs.append(spec)
        place = None if spec.alias is None else self._known.get(spec.alias)
        if place is None:
            place = slice(self.nbytes, self.nbytes + spec.nbytes)
            self.nbytes += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
            if spec.nbytes:
                self._values.append((value, place, spec.address))
            if spec.alias is not None:
                self._known[spec.alias] = place
        self._places.append(place)

    def copy(self, memory: np.ndarray[Any, Any]) -> None:
        if not self._values:
            return
        base, view = memory.ctypes.data, memoryview(memory)  # type: ignore[arg-type]
        others = [(value, view[place]) for value, place, address in self._values if address is None]
        capture = self._family.capture(others)  # device copies are enqueued first
        try:
            copy_memory(
                [
                    (base + place.start, address, place.stop - place.start)
                    for _, place, address in self._values
                    if address is not None
                ]
            )
        finally:
            capture.wait()

    def staged(self, state: Any, memory: np.ndarray[Any, Any]) -> Any:
        """The state again, over ``memory``."""
        return self._staged(state, memoryview(memory), iter(self._places))  # type: ignore[arg-type]

    def _staged(self, value: Any, memory: memoryview, places: Iterator[slice]) -> Any:
        kind = type(value)
        if kind in EXACT_TYPES:
            return _over(value, memory[next(places)])
        if kind in _CONSTANTS:
            return value
        if isinstance(value, torch.Tensor):
            if not is_distributed(value):  # ShardedTensor and the like
                return BlockingAsyncStager().stage({"value": value})["value"]
            local = _over(local_tensor(value), memory[next(places)])
            make: Any = type(value)
            return make(local, cast(Any, value)._spec, requires_grad=False)
        if isinstance(value, Mapping):
            return {key: self._staged(item, memory, places) for key, item in value.items()}
        if kind in (list, tuple):
            return kind([self._staged(item, memory, places) for item in value])
        return copy.deepcopy(value)


def _over(value: torch.Tensor, memory: memoryview) -> torch.Tensor:
    """A tensor like ``value`` over ``memory``, with a storage of its own: torch (2.13) crashes when it sends DTensors
    that share one to a process."""
    return over_host(memory, value.dtype, value.shape) if memory.nbytes else allocate(value.shape, value.dtype)
