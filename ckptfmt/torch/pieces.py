"""A part of a tensor, by its bytes in C order."""

from __future__ import annotations

import torch

from ckptfmt.torch.elements import bits, is_lazy_view


def piece_of(value: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the bytes ``start`` to ``stop`` of ``value``, multiples of its element size, as a tensor on its device.

    A view where the tensor is dense, else a copy no larger than the piece.
    """
    source = value.detach() if is_lazy_view(value) else bits(value)
    width = source.dtype.itemsize
    first, last = start // width, stop // width
    if source.is_contiguous():
        return source.view(-1)[first:last]
    # torch warns whenever it makes a complex32 tensor itself.
    plain = torch.int32 if source.dtype is torch.complex32 else source.dtype
    out = torch.empty(last - first, dtype=plain, device=source.device).view(source.dtype)
    _copy_elements(source, first, last, out)
    return out


def _copy_elements(source: torch.Tensor, first: int, last: int, out: torch.Tensor) -> None:
    """Copy the elements ``first`` to ``last``, counted in C order, of a tensor with any strides."""
    if source.dim() == 1:
        out.copy_(source[first:last])
        return
    row = source[0].numel()
    above, below = -(-first // row), last // row  # the whole rows
    if above > below:
        return _copy_elements(source[below], first - below * row, last - below * row, out)
    head, middle = above * row - first, (below - above) * row
    if head:
        _copy_elements(source[above - 1], row - head, row, out[:head])
    out[head : head + middle].view(below - above, *source.shape[1:]).copy_(source[above:below])
    if head + middle < last - first:
        _copy_elements(source[below], 0, last - below * row, out[head + middle :])
    return None
