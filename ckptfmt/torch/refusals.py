"""Why a tensor cannot be stored, in words that name the tensor and the way out."""

from __future__ import annotations

from typing import Any

import torch

from ckptfmt.errors import UnsupportedValue
from ckptfmt.format import dtypes
from ckptfmt.torch.elements import EXACT_TYPES, NAMES


def refusal(value: Any, path: str) -> UnsupportedValue:
    """Return the error for a tensor that ``describe`` does not accept."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return UnsupportedValue(f"{path}: {_reason(value, kind, name)}")


def _reason(value: Any, kind: type, name: str) -> str:
    if kind is torch.nn.UninitializedParameter or kind is torch.nn.UninitializedBuffer:
        return f"{name} has no shape yet; run the module's first forward pass before saving or restoring"
    if kind.__name__ == "DTensor":
        return "a DTensor has a share on every rank and is no plain tensor here; save it by itself, or its to_local()"
    if kind.__name__ == "FakeTensor":
        return f"{name} holds no data; leave the fake tensor mode and save real tensors"
    if getattr(value, "is_nested", False):
        return "a nested tensor; save value.unbind() (a list of tensors), or value.to_padded_tensor(...)"
    if kind not in EXACT_TYPES:
        return (
            f"{name} is a Tensor subclass with a meaning of its own; save the plain tensors that it is made of, "
            "or teach ckptfmt the type with ckptfmt.register_type"
        )
    return _plain_reason(value)


def _plain_reason(value: torch.Tensor) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    if value.dtype not in NAMES:
        why = dtypes.REFUSED.get(dtype, "the format has no such element type")
        return f"a tensor of dtype {dtype} cannot be stored: {why}; save value.int_repr() or value.dequantize()"
    if value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        return f"a tensor of layout {layout}; save its parts (indices, values), or value.to_dense()"
    if value.is_meta:
        return "a tensor on the meta device holds no data; materialise it (module.to_empty(device=...)) and fill it"
    if torch._is_functional_tensor(value):
        return "a functional tensor of a transform; save outside of torch.func and torch.compile tracing"
    return (
        "a tensor without memory of its own: its storage was freed (resized to 0), or it belongs to a running "
        "transform such as torch.func.vmap; save it where it is whole"
    )
