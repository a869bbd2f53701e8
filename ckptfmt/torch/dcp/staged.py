"""A state that has been staged: the bytes are copied, the tensors over them are made when the save asks for them."""

from __future__ import annotations

import threading
import time
from collections.abc import ItemsView, Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import torch

from ckptfmt.engine.collector import held_back
from ckptfmt.ports.arrays import LeafSpec
from ckptfmt.torch.elements import allocate, over_host, torch_dtype

_PAUSE: Final = 0.01
"""Seconds for which the save lets the caller of ``async_save`` go first, who has less than a millisecond left to do."""


class Slot(msgspec.Struct, frozen=True, gc=False):
    """Stands where a tensor stood: what it was, and from which byte of the memory its copy lies.

    ``layout`` is that of a DTensor: its class and its spec. A Struct for the reasons of ``LeafSpec``.
    """

    spec: LeafSpec
    start: int
    layout: tuple[type, Any] | None = None


class Staged(Mapping[str, Any]):
    """A copy of a state, read as any mapping; sent to another process it is a dict.

    Making a tensor costs as much as copying a small one, so it is left to the thread that saves. That one pauses first:
    a thread that runs Python has the interpreter for 5 milliseconds at a time, and the caller would wait for it.
    """

    def __init__(self, outline: dict[str, Any], memory: np.ndarray[Any, Any]) -> None:
        """``outline`` is nobody else's: exact dicts, lists and tuples that hold slots, and values as they are."""
        self._outline = outline
        self._memory: np.ndarray[Any, Any] | None = memory
        self._caller = threading.get_ident()
        self._lock = threading.Lock()

    def _made(self) -> dict[str, Any]:
        with self._lock:
            if self._memory is not None:
                if threading.get_ident() != self._caller:
                    time.sleep(_PAUSE)
                with held_back():
                    self._outline = _filled(self._outline, memoryview(self._memory))  # type: ignore[arg-type]
                self._memory = None  # the tensors keep it
            return self._outline

    def __getitem__(self, key: str) -> Any:
        return self._made()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made())

    def __len__(self) -> int:
        return len(self._outline)

    def items(self) -> ItemsView[str, Any]:
        return self._made().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._made(),)


def _filled(value: Any, memory: memoryview) -> Any:
    kind = type(value)
    if kind is Slot:
        return _tensor(value, memory)
    if kind is dict:
        return {key: _filled(item, memory) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind([_filled(item, memory) for item in value])
    return value


def _tensor(slot: Slot, memory: memoryview) -> Any:
    """With a storage of its own: torch (2.13) crashes when it sends DTensors that share one to a process."""
    spec = slot.spec
    dtype, part = torch_dtype(spec.dtype), memory[slot.start : slot.start + spec.nbytes]
    plain = over_host(part, dtype, spec.size) if part.nbytes else allocate(spec.size, dtype)
    if slot.layout is None:
        return plain
    kind, layout = slot.layout
    made: torch.Tensor = kind(plain, layout, requires_grad=False)
    return made
