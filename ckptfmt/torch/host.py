"""Copies between tensors and host memory that are final when they return."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ckptfmt.errors import InvalidInput
from ckptfmt.torch.elements import address_of, bits, is_lazy_view, over_host


def dense_address(value: torch.Tensor) -> int | None:
    """Return the address of ``value``'s bytes if they lie on the CPU, dense and in C order, else None."""
    if value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg():
        return value.data_ptr() or None
    return None


def copy_out(value: torch.Tensor, host: memoryview) -> None:
    """Copy ``value`` (any strided tensor on any device) into ``host``, bit by bit."""
    _check_length(value, host)
    if not host.nbytes:
        return
    source = dense_address(value)
    if source is not None:
        ctypes.memmove(address_of(host), source, host.nbytes)
    elif is_lazy_view(value):
        over_host(host, value.dtype, value.shape).copy_(value.detach())
    else:
        integers = bits(value)
        over_host(host, integers.dtype, integers.shape).copy_(integers)


def copy_in(value: torch.Tensor, host: memoryview) -> None:
    """Copy ``host`` into ``value`` (any fillable tensor on any device), bit by bit and without autograd."""
    _check_length(value, host)
    if not host.nbytes:
        return
    # Inference tensors can only be written in inference mode; for others it would skip the version counter.
    with torch.inference_mode(value.is_inference()):
        target = dense_address(value)
        if target is not None:
            ctypes.memmove(target, address_of(host), host.nbytes)
            wrote_to([value])
        elif is_lazy_view(value):
            value.detach().copy_(over_host(host, value.dtype, value.shape))
        else:
            integers = bits(value)
            integers.copy_(over_host(host, integers.dtype, integers.shape))


def wrote_to(values: Sequence[torch.Tensor]) -> None:
    """Count a change of each value's memory that torch did not see. Inference tensors keep no count."""
    counting = [value for value in values if not value.is_inference()]
    if counting:
        torch.autograd.graph.increment_version(counting)


def cast_in(value: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy ``saved`` into ``value`` with torch's ordinary conversion."""
    with torch.inference_mode(value.is_inference()):
        value.detach().copy_(saved)


def overlaps(value: torch.Tensor) -> bool:
    """Whether two elements of ``value`` may share memory (``expand``, overlapping ``as_strided``)."""
    reach = 0  # largest offset that the dimensions looked at so far can reach
    for step, extent in sorted(zip(value.stride(), value.shape, strict=True)):
        if extent == 0:
            return False
        if extent > 1:
            if step <= reach:
                return True
            reach += step * (extent - 1)
    return False


def _check_length(value: torch.Tensor, host: memoryview) -> None:
    if host.nbytes != value.nbytes:
        raise InvalidInput(
            f"host memory of {host.nbytes} bytes for a tensor of shape {tuple(value.shape)} and dtype {value.dtype}, "
            f"which has {value.nbytes}; this is a bug in the caller"
        )
