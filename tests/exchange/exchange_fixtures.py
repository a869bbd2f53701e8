"""Tensors of many kinds, and ways to save them with the tools of others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import at_once
from safetensors import safe_open

from ckptfmt import connect
from ckptfmt.engine.load.resolve import Wanted, open_wanted
from ckptfmt.engine.opened import Opened

SAFETENSORS_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of any element type whose bits are random: numbers, infinities and NaNs with all their payloads."""
    width = dtype.itemsize
    count = torch.Size(shape).numel() * width
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator).to(torch.uint8)
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def many_tensors() -> dict[str, torch.Tensor]:
    """Every element type that safetensors has, and the shapes that are easily lost."""
    named = {
        f"of.{dtype}".replace("torch.", ""): random_bits((5, 3), dtype, n) for n, dtype in enumerate(SAFETENSORS_DTYPES)
    }
    return named | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "large": random_bits((700, 1100), torch.float32, 99),
        "with/slash and ünïcode": torch.arange(3),
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the last bit, in type and shape."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not same(one[name], other[name])] == []


def opened_at(url: Path | str, run: str) -> Opened:
    """The latest generation of a run, by what storage proves."""
    connection = connect.open_site(url, mode="r", catalog="none", storage_options=None)
    return open_wanted(connection.site, run, Wanted())


def read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of all files, by safetensors' own reader."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            here = {name: file.get_tensor(name) for name in sorted(file.keys())}
        assert not here.keys() & found.keys()
        found |= here
    return found


def save_dcp(state: dict[str, Any], folder: Path) -> Path:
    """By one process, without a group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)
    return folder


def as_ranks(world_size: int, store: Path, work: Callable[[int], Any]) -> list[Any]:
    """Run ``work(rank)`` in forks that have a gloo group."""
    return at_once(partial(_ranked, world_size, store, work), world_size)


def _ranked(world_size: int, store: Path, work: Callable[[int], Any], rank: int) -> Any:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        return work(rank)
    finally:
        dist.destroy_process_group()
