"""Reading a slice of one stored tensor: only the chunks that it touches, each verified."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from ckptfmt.engine.load.gather import boxes_to_read, gathered, shares_of
from ckptfmt.engine.load.memory import read_boxes
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.stored import Stored
from ckptfmt.format.boxes import volume
from ckptfmt.format.dtypes import dtype
from ckptfmt.ports.arrays import ArrayFamily, LeafSpec


def read_slice(
    opened: Opened,
    entry: Stored,
    start: tuple[int, ...],
    size: tuple[int, ...],
    family: ArrayFamily,
    *,
    device: Any | None,
    verify: bool,
) -> Any:
    """Return the box (start, size) of a tensor as a new value."""
    width = dtype(entry.dtype).itemsize
    nbytes = volume(size) * width
    host = memoryview(bytearray())
    if nbytes:
        shares = shares_of(entry, (start, size))
        read = boxes_to_read((), shares)
        host = gathered(shares, size, width, read_boxes(opened, read, verify=verify))
        if sum(box.nbytes for box in read) > 2 * nbytes:
            host = memoryview(bytearray(host))  # who keeps a row does not keep the chunks around it
    spec = LeafSpec(entry.dtype, size, (0,) * len(size), size, nbytes, entry.kind)
    return family.build(spec, host, (), device)


def _no_mask(item: Any) -> Any:
    """``True`` is a mask to numpy and torch, not row 1."""
    if isinstance(item, bool):
        raise TypeError("a bool is no index")
    return item


def box_of(
    name: str, shape: tuple[int, ...], index: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...], frozenset[int]]:
    """(start, size, axes to drop) of a basic index of the tensor ``name``. ``IndexError`` for any other."""
    items = list(index)
    if any(item is Ellipsis for item in items):
        at = next(number for number, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    if len(items) > len(shape):
        raise IndexError(f"tensor {name!r} has {len(shape)} dimensions, the index has {len(items)}")
    items += [slice(None)] * (len(shape) - len(items))
    start, size, drop = [], [], set()
    for axis, (item, extent) in enumerate(zip(items, shape, strict=True)):
        if isinstance(item, slice):
            begin, stop, step = item.indices(extent)
            if step != 1:
                raise IndexError(
                    f"tensor {name!r}: only slices with step 1 can be read; read the range and index the result"
                )
            start.append(begin)
            size.append(max(0, stop - begin))
            continue
        try:
            number = operator.index(_no_mask(item))
        except TypeError:
            raise IndexError(f"tensor {name!r}: {item!r} is no index; use integers, slices and '...'") from None
        if not -extent <= number < extent:
            raise IndexError(f"tensor {name!r}: index {number} is out of range for axis {axis} of size {extent}")
        start.append(number % extent)
        size.append(1)
        drop.add(axis)
    return tuple(start), tuple(size), frozenset(drop)
