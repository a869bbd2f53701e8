"""Reading a slice of one stored tensor: only the chunks that it touches, each verified."""

from __future__ import annotations

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
