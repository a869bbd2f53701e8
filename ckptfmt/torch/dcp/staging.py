"""Copies of a state in host memory for ``async_save``: the copies of a snapshot, in memory that is used again."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from ckptfmt import connect
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.collector import held_back
from ckptfmt.engine.transfer import copy_memory
from ckptfmt.ports.arrays import ArrayFamily
from ckptfmt.torch.dcp.staged import Slot, Staged
from ckptfmt.torch.distributed import is_distributed, local_tensor
from ckptfmt.torch.elements import EXACT_TYPES

_ALIGNMENT: Final = 64
_CONSTANTS: Final = frozenset({bool, int, float, str, bytes, type(None)})


class Staging:
    """Stages one state after another. An arena is used again once nobody has a tensor in it any more."""

    def __init__(self) -> None:
        self._idle: deque[Arena] = deque()
        """No lock: what gives an arena back is a collection of garbage, which may come at any line of this thread."""
        self._seen: list[Slot] = []
        """The tensors of the last state: comparing is cheaper than describing anew."""

    def stage(self, state: Mapping[str, Any]) -> Staged:
        """Return a copy of ``state`` on the CPU: tensors lie in one piece of memory, everything else is copied deep."""
        family = connect.live_families().named("tensor")
        if family is None:
            raise AssertionError("torch is imported, and its family is not there")
        with held_back():
            layout = _Layout(family, self._seen)
            outline = layout.outline(state)
            self._seen = layout.slots
            arena = self._take()
            nbytes = max(1, layout.nbytes)  # numpy refuses memory of no bytes
            arena.reserve(nbytes)
            memory = np.frombuffer(arena.view(0, nbytes), dtype=np.uint8)
            weakref.finalize(memory, self._idle.append, arena).atexit = False
            layout.copy(memory)
            arena.mark_touched(layout.nbytes)
            return Staged(outline, memory)

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
    """Where each tensor of a state goes: tensors over the same memory to one place."""

    def __init__(self, family: ArrayFamily, seen: Sequence[Slot]) -> None:
        self._family = family
        self._seen = iter(seen)
        self.slots: list[Slot] = []
        self.nbytes = 0
        self._known: dict[Hashable, int] = {}
        self._moves: list[tuple[int, int, int]] = []
        """What lies dense in host memory: where its copy begins, its address, and its bytes."""
        self._others: list[tuple[torch.Tensor, slice]] = []

    def outline(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state with a slot for each tensor, and a copy of everything else."""
        return {key: self._outline(item, str(key)) for key, item in state.items()}

    def _outline(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in EXACT_TYPES:
            return self._slot(value, path, None)
        if kind in _CONSTANTS:
            return value
        if isinstance(value, torch.Tensor):
            if is_distributed(value):
                return self._slot(local_tensor(value), path, (kind, cast(Any, value)._spec))
            return BlockingAsyncStager().stage({"value": value})["value"]  # ShardedTensor and the like
        if isinstance(value, Mapping):
            return {key: self._outline(item, f"{path}.{key}") for key, item in value.items()}
        if kind in (list, tuple):
            return kind([self._outline(item, f"{path}.{index}") for index, item in enumerate(value)])
        return copy.deepcopy(value)

    def _slot(self, value: torch.Tensor, path: str, layout: tuple[type, Any] | None) -> Slot:
        before = next(self._seen, None)
        spec = self._family.describe(value, path, None if before is None else before.spec)
        start = None if spec.alias is None else self._known.get(spec.alias)
        if start is None:
            start, nbytes = self.nbytes, spec.nbytes
            self.nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            if spec.address is not None:
                self._moves.append((start, spec.address, nbytes))
            elif nbytes:
                self._others.append((value, slice(start, start + nbytes)))
            if spec.alias is not None:
                self._known[spec.alias] = start
        if before is None or spec is not before.spec or start != before.start or layout is not before.layout:
            before = Slot(spec, start, layout)
        self.slots.append(before)
        return before

    def copy(self, memory: np.ndarray[Any, Any]) -> None:
        """Copy the tensors, and let go of them."""
        moves, others = self._moves, self._others
        self._moves, self._others = [], []
        if not moves and not others:
            return
        base, view = memory.ctypes.data, memoryview(memory)  # type: ignore[arg-type]
        capture = self._family.capture([(value, view[place]) for value, place in others])  # devices' are enqueued first
        try:
            copy_memory([(base + start, address, nbytes) for start, address, nbytes in moves])
        finally:
            capture.wait()
