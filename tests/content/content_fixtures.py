"""What the content tests share: states told apart to the last bit, the objects of a generation, and damage."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

import ckptfmt


# -- states, to the last bit --------------------------------------------------------------------------
def exact(value: Any) -> Any:
    """A plain image of ``value`` that is equal for two values only if types, order and every bit are."""
    kind = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        return (kind, str(value.dtype), tuple(value.shape), value.requires_grad, tensor_image(value))
    if isinstance(value, np.ndarray):
        return (kind, value.dtype.str, value.shape, short(value.tobytes()))
    if isinstance(value, np.generic):
        return (kind, value.dtype.str, value.tobytes())
    if isinstance(value, float):
        return (kind, struct.pack("<d", value))
    if isinstance(value, complex):
        return (kind, struct.pack("<dd", value.real, value.imag))
    if isinstance(value, torch.Generator):
        return (kind, tensor_bytes(value.get_state()))
    if hasattr(value, "state_dict") and not isinstance(value, type):
        return (kind, exact(value.state_dict()))
    if isinstance(value, ckptfmt.PerRank):
        return (kind, exact(value.value))
    if isinstance(value, ckptfmt.Sharded):
        return (kind, exact(value.local), value.global_shape, value.offsets)
    if isinstance(value, Mapping):
        extra = exact(dict(vars(value))) if hasattr(value, "__dict__") and vars(value) else None
        return (kind, [(exact(key), exact(item)) for key, item in value.items()], extra)
    if isinstance(value, set | frozenset):
        return (kind, sorted(map(repr, map(exact, value))))
    if isinstance(value, list | tuple) or kind == "deque":
        return (kind, [exact(item) for item in value])
    return (kind, repr(value))


def short(data: bytes) -> bytes:
    """The bytes themselves, or the digest of many."""
    return data if len(data) <= 1 << 16 else xxhash.xxh3_128_digest(data)


def tensor_image(tensor: torch.Tensor) -> bytes:
    """``short(tensor_bytes(tensor))``; what lies in one piece is not copied for it."""
    plain = tensor.detach()
    nbytes = plain.numel() * plain.element_size()
    in_one_piece = plain.is_contiguous() and not plain.is_conj() and not plain.is_neg()
    if nbytes <= 1 << 16 or not in_one_piece:
        return short(tensor_bytes(tensor))
    return xxhash.xxh3_128_digest((ctypes.c_char * nbytes).from_address(plain.data_ptr()))


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in C order, without torch's conversions: straight from memory."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if not plain.numel():
        return b""
    width = plain.element_size()
    reach = sum(stride * (extent - 1) for stride, extent in zip(plain.stride(), plain.shape, strict=True)) + 1
    view = np.lib.stride_tricks.as_strided(
        np.frombuffer(ctypes.string_at(plain.data_ptr(), reach * width), dtype=np.uint8),
        shape=(*plain.shape, width),
        strides=(*(stride * width for stride in plain.stride()), 1),
    )
    return view.tobytes()


def patterned(nbytes: int, seed: int = 0) -> bytes:
    """Bytes of every pattern: NaN payloads, infinities, subnormals and impossible bools included."""
    return bytes((37 * i + 255 + 11 * seed) % 256 for i in range(nbytes))


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def trained(seed: int = 0, steps: int = 2) -> dict[str, Any]:
    """A model, its optimizer with state, and a scheduler, after a few steps."""
    model = small_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        train_step(model, optimizer)
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": seed}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.randn(5, 6)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


# -- the objects of a generation ----------------------------------------------------------------------
def folder(generation: ckptfmt.Generation) -> Path:
    return Path(generation.url.removeprefix("file://"))


def packs(generation: ckptfmt.Generation) -> list[Path]:
    return sorted(folder(generation).glob("*.safetensors"))


def manifest(generation: ckptfmt.Generation) -> Path:
    (found,) = folder(generation).glob("manifest-*.json.zst")
    return found


def data_start(pack: Path) -> int:
    return 8 + int.from_bytes(pack.read_bytes()[:8], "little")


def stored_bytes(generation: ckptfmt.Generation) -> int:
    return sum(pack.stat().st_size for pack in packs(generation))


# -- damage -------------------------------------------------------------------------------------------
def flip(path: Path, offset: int) -> None:
    """Turn one bit; a negative offset counts from the end."""
    with path.open("r+b") as file:
        at = file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def zero(path: Path, offset: int, nbytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        assert any(file.read(nbytes)), "zeros in place of zeros are no damage"
        file.seek(offset)
        file.write(bytes(nbytes))


Damage = Callable[[Path], None]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()
