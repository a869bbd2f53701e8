"""Putting boxes together: from stored boxes to one contiguous range in C order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptfmt.engine.arena import map_memory
from ckptfmt.format import boxes
from ckptfmt.format.dtypes import dtype


def assemble(
    target: memoryview,
    shape: tuple[int, ...],
    dtype_name: str,
    parts: Sequence[tuple[tuple[int, ...], tuple[int, ...], memoryview]],
    *,
    origin: tuple[int, ...] | None = None,
) -> None:
    """Copy what the ``parts`` (start, size, bytes) share with the box of ``shape`` at ``origin`` into ``target``."""
    width = dtype(dtype_name).itemsize
    element = np.dtype(f"V{width}")
    whole = np.frombuffer(target, dtype=element).reshape(shape)
    corner = origin if origin is not None else (0,) * len(shape)
    for start, size, data in parts:
        common = boxes.intersect((corner, shape), (start, size))
        if common is None:
            continue
        at, extent = common
        into = tuple(slice(a - c, a - c + n) for a, c, n in zip(at, corner, extent, strict=True))
        out = tuple(slice(a - s, a - s + n) for a, s, n in zip(at, start, extent, strict=True))
        whole[into] = np.frombuffer(data, dtype=element).reshape(size)[out]


def cut(
    data: memoryview, shape: tuple[int, ...], dtype_name: str, start: tuple[int, ...], size: tuple[int, ...]
) -> memoryview:
    """The bytes of the box (start, size) out of those of a whole tensor; no copy where the box is the whole."""
    if (start, size) == boxes.whole(shape):
        return data
    nbytes = boxes.volume(size) * dtype(dtype_name).itemsize
    target = map_memory(nbytes)[:nbytes]
    assemble(target, size, dtype_name, [((0,) * len(shape), shape, data)], origin=start)
    return target
