"""The limit of a stall: the same tensors copied into memory that is mapped, touched and used again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from ckptfmt.engine.arena import map_memory
from ckptfmt.engine.touch import populate
from ckptfmt.engine.transfer import thread_count
from ckptfmt.measure.states import named_tensors

_ALIGNMENT: Final = 64
_PIECE: Final = 16 << 20


class CopyLimit:
    """Three ways to copy a state into reused memory on huge pages. ``times(n)`` gives seconds of n copies by each."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._sources = [tensor for _, tensor in named_tensors(state) if tensor.nbytes]
        offsets, end = [], 0
        for tensor in self._sources:
            offsets.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._memory = map_memory(end)
        populate(self._memory)
        self._targets = [
            torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
            for tensor, offset in zip(self._sources, offsets, strict=True)
        ]
        self._pieces = list(self._cut())

    @property
    def memory(self) -> memoryview:
        """The reused memory, which holds a copy of the state once ``times`` has run."""
        return self._memory

    def times(self, count: int) -> dict[str, list[float]]:
        """Seconds, by way; one copy by each way beforehand is not counted."""
        ways: dict[str, Callable[[], None]] = {
            "copy_ per tensor": self._by_copy,
            "_foreach_copy_": self._by_foreach,
            "np.copyto, threads": self._by_threads,
        }
        with self.threads():
            for way in ways.values():
                way()
            found: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(count):
                for name, way in ways.items():
                    began = time.perf_counter()
                    way()
                    found[name].append(time.perf_counter() - began)
        return found

    @contextmanager
    def threads(self) -> Iterator[None]:
        """The threads of the third way, started beforehand as an engine's would be."""
        with ThreadPoolExecutor(thread_count()) as self._pool:
            yield

    def _by_copy(self) -> None:
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)

    def _by_foreach(self) -> None:
        torch._foreach_copy_(self._targets, self._sources)

    def _by_threads(self) -> None:
        copyto = np.copyto

        def copy(batch: list[tuple[Any, Any]]) -> None:
            for target, source in batch:
                copyto(target, source)

        done, _ = wait([self._pool.submit(copy, batch) for batch in self._pieces])
        for future in done:
            future.result()

    def _cut(self) -> list[list[tuple[Any, Any]]]:
        """Batches of (target, source) byte arrays of about ``_PIECE`` bytes each."""
        batches: list[list[tuple[Any, Any]]] = []
        room = 0
        for target, source in zip(self._targets, self._sources, strict=True):
            to, of = (one.reshape(-1).view(torch.uint8).numpy() for one in (target, source))
            for start in range(0, len(of), _PIECE):
                if room <= 0:
                    batches.append([])
                    room = _PIECE
                batches[-1].append((to[start : start + _PIECE], of[start : start + _PIECE]))
                room -= min(_PIECE, len(of) - start)
        return batches
