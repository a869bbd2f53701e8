"""torch dtypes by format name, and tensors seen as raw bits.

Some dtypes have no copy kernel (``int4``), and a kernel for numbers need not keep every bit pattern
(``bool`` bytes other than 0 and 1). So bytes move as integers of the same width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
import torch

from ckptfmt.errors import InvalidInput, UnsupportedValue
from ckptfmt.format import dtypes

_BY_NAME: Final[dict[str, torch.dtype]] = {
    name: found for name in dtypes.DTYPES if isinstance(found := getattr(torch, name, None), torch.dtype)
}
NAMES: Final[dict[torch.dtype, str]] = {found: name for name, found in _BY_NAME.items()}
"""Format name of every torch dtype that the format stores."""

EXACT_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""Tensors that are nothing but their elements. A ``torch.nn.Buffer`` is a Tensor with two attributes."""

_NUMPY: Final[dict[torch.dtype, np.dtype[Any]]] = {
    getattr(torch, name): np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}
"""The dtypes that numpy has, too, bit for bit."""

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of element type ``name``. ``UnsupportedValue`` where this torch lacks it."""
    found = _BY_NAME.get(name)
    if found is None:
        raise UnsupportedValue(
            f'torch {torch.__version__} has no dtype for {name}; install a newer torch, or load with framework="numpy"'
        )
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``'s memory as integers, without a copy and without autograd.

    Same shape and strides; complex128 gets a last dimension of two int64. The tensor must have
    neither the conjugate nor the negative bit set.
    """
    plain = tensor.detach()
    if plain.dtype is torch.complex128:
        return torch.view_as_real(plain).view(torch.int64)
    return plain.view(_BITS[plain.dtype.itemsize])


def allocate(
    size: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """Return new host memory as a tensor, its values undefined."""
    # torch warns whenever it makes a complex32 tensor itself.
    plain = torch.int32 if dtype is torch.complex32 else dtype
    tensor = torch.empty(tuple(size), dtype=plain, device="cpu", memory_format=memory_format)
    return tensor if plain is dtype else tensor.view(dtype)


def is_lazy_view(tensor: torch.Tensor) -> bool:
    """Whether the memory holds something else than the values: ``x.conj()``, ``x.conj().imag``."""
    return tensor.is_conj() or tensor.is_neg()


def flags_of(tensor: torch.Tensor, is_parameter: bool) -> tuple[str, ...]:
    """Return what a tensor is to its module, and whether autograd follows it. See ``LeafSpec.flags``."""
    role = ""
    if is_parameter:
        role = "parameter"
    elif getattr(tensor, "_is_buffer", False):
        role = "buffer" if getattr(tensor, "persistent", True) else "non_persistent"
    found = (role,) if role else ()
    return (*found, "requires_grad") if tensor.requires_grad else found


def address_of(memory: memoryview) -> int:
    """Return the address of writable host memory of at least one byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def over_host(memory: memoryview, dtype: torch.dtype, size: Sequence[int]) -> torch.Tensor:
    """Return a tensor of ``size`` over ``memory`` (writable bytes of exactly that size), which it keeps alive.

    The memory may begin at any address: on the platforms torch runs on, unaligned elements are slow, not wrong.
    """
    count = prod(size)
    if memory.nbytes != count * dtype.itemsize:
        raise InvalidInput(
            f"host memory of {memory.nbytes} bytes for a tensor of shape {tuple(size)} and dtype {dtype}, "
            f"which has {count * dtype.itemsize}; this is a bug in the caller"
        )
    if not count:
        return allocate(size, dtype)
    if len(size) == 1:
        return torch.frombuffer(memory, dtype=dtype)
    twin = _NUMPY.get(dtype)
    if twin is not None:  # in the right shape at once: half the cost of a view, as every operation of torch has some
        return torch.from_numpy(np.ndarray(size, twin, memory))
    return torch.frombuffer(memory, dtype=dtype).view(tuple(size))
