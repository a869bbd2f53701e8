"""Digests of every value of a training state, by hashlib: a witness that shares no code with what it judges."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def digests(state: Mapping[str, Any]) -> dict[str, str]:
    """Map the path of every leaf of ``state`` to a digest of its type, shape and bytes.

    ``state`` is made of nested mappings, lists and tuples.
    """
    return {path: _digest(value) for path, value in _leaves("", state)}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}/{key}", item)
    elif isinstance(value, list | tuple) and not all(isinstance(item, int) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}/{index}", item)
    else:
        yield path, value


def _digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        head = f"{value.dtype} {tuple(value.shape)} "
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif isinstance(value, np.ndarray):
        head = f"{value.dtype} {value.shape} "
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    else:
        # repr of a float is exact, and so is that of the ints and strings which fill these states.
        head, data = f"{type(value).__name__} {value!r}", np.empty(0, np.uint8)
    digest = hashlib.blake2b(head.encode(), digest_size=16)
    digest.update(data.tobytes())
    return digest.hexdigest()
