"""States to measure with: random numbers in the shapes of a training job, the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch
import xxhash

from ckptfmt.engine.transfer import thread_count

SEED: Final = 20250
_BYTES_PER_PARAMETER: Final = 14
"""bfloat16 parameters, and float32 master copy, exp_avg and exp_avg_sq of AdamW."""
_LAYERS_MIN: Final = 8
_WIDTHS: Final = (4096, 2048, 1024, 512, 256, 128, 64)
_FILL_BYTES: Final = 32 << 20
_DIGEST_BATCH: Final = 16
_MANY: Final = 2000
_SMALL_MIN, _SMALL_MAX = 4 << 10, 64 << 10


def train_state(nbytes: int, *, fill: bool = True) -> dict[str, Any]:
    """A transformer and its AdamW of about ``nbytes`` bytes: ``model`` in bfloat16, ``master``, ``exp_avg`` and
    ``exp_avg_sq`` in float32, and plain values. Without ``fill`` the tensors are zeros (a target to restore into)."""
    shapes = _transformer(nbytes // _BYTES_PER_PARAMETER)
    state: dict[str, Any] = {
        group: {name: torch.zeros(shape, dtype=torch.float32) for name, shape in shapes.items()}
        for group in ("master", "exp_avg", "exp_avg_sq")
    }
    if fill:
        _fill([tensor for group in state.values() for tensor in group.values()])
    model = {
        name: tensor.to(torch.bfloat16) if fill else torch.zeros(tensor.shape, dtype=torch.bfloat16)
        for name, tensor in state["master"].items()
    }
    return {"model": model, **state, "step": 0, "lr": 3e-4}


def small_state(tensors: int, *, fill: bool = True) -> dict[str, Any]:
    """``tensors`` float32 tensors of 4 to 64 KiB, as a model of many small parts has them."""
    sizes = np.random.Generator(np.random.SFC64(SEED)).integers(_SMALL_MIN // 4, _SMALL_MAX // 4 + 1, tensors)
    parts = {f"part{number:05d}.weight": torch.zeros(int(size)) for number, size in enumerate(sizes)}
    if fill:
        _fill(list(parts.values()))
    return {"model": parts, "step": 0, "lr": 3e-4}


def named_tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under its dotted name, in order."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from named_tensors(value, f"{prefix}{name}.")


def state_bytes(state: Mapping[str, Any]) -> int:
    return sum(tensor.nbytes for _, tensor in named_tensors(state))


def state_digest(state: Mapping[str, Any]) -> str:
    """One digest of all tensors: names, element types, shapes and bytes, in the order of the names."""

    def digest(batch: list[tuple[str, torch.Tensor]]) -> bytes:
        lines = [
            f"{name} {tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_128_hexdigest(flat_bytes(tensor))}\n"
            for name, tensor in batch
        ]
        return "".join(lines).encode()

    named = sorted(named_tensors(state))
    many = len(named) > _MANY  # of small ones, on which threads would only take turns
    size = len(named) if many else _DIGEST_BATCH
    batches = [named[start : start + size] for start in range(0, len(named), size)]
    with ThreadPoolExecutor(1 if many else thread_count()) as pool:
        return xxhash.xxh3_128_hexdigest(b"".join(pool.map(digest, batches)))


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense host tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def step(state: dict[str, Any], number: int) -> None:
    """Change every tensor a little, as a training step would: nothing may be skipped as unchanged."""
    state["step"] = number
    for _, tensor in named_tensors(state):
        tensor.view(-1)[:1].fill_(number)


def clear(state: Mapping[str, Any]) -> None:
    """Zero every tensor, so that a restore that does nothing is found out."""
    torch._foreach_zero_([tensor for _, tensor in named_tensors(state)])


def _transformer(parameters: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of about ``parameters`` numbers: an embedding and as many layers as fit."""
    width = next((width for width in _WIDTHS if _layer_numbers(width) * _LAYERS_MIN <= parameters), _WIDTHS[-1])
    layers = max(1, parameters // _layer_numbers(width))
    rows = max(1, (parameters - layers * _layer_numbers(width)) // width)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (rows, width)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer(width).items()}
    return shapes


def _layer(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "attention.qkv.weight": (3 * width, width),
        "attention.out.weight": (width, width),
        "feed.up.weight": (4 * width, width),
        "feed.down.weight": (width, 4 * width),
        "norm1.weight": (width,),
        "norm2.weight": (width,),
    }


def _layer_numbers(width: int) -> int:
    return 12 * width * width + 2 * width


def _fill(tensors: list[torch.Tensor]) -> None:
    """Random numbers in [0, 1): stretches of one pool, from another place each time. Threads share the work."""
    pool_of_numbers = np.random.Generator(np.random.SFC64(SEED)).random(2 * _FILL_BYTES // 4, dtype=np.float32)
    pieces = [
        flat[start : start + _FILL_BYTES // 4]
        for tensor in tensors
        for flat in [tensor.view(-1).numpy()]
        for start in range(0, len(flat), _FILL_BYTES // 4)
    ]

    def fill(numbered: tuple[int, np.ndarray[Any, np.dtype[np.float32]]]) -> None:
        number, piece = numbered
        start = number * 997 % (_FILL_BYTES // 4)
        piece[:] = pool_of_numbers[start : start + len(piece)]

    with ThreadPoolExecutor(thread_count()) as pool:
        for _ in pool.map(fill, enumerate(pieces)):
            pass
