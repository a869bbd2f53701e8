"""The chunks of a tensor for readers who go to the packs by themselves: where each lies, or that it must be copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptfmt.format.boxes import Extent
from ckptfmt.views.chunks import Chunk
from ckptfmt.views.grid import Grid
from ckptfmt.views.zarr_nodes import ArrayNode


class PackRange(NamedTuple):
    """Bytes of a pack. ``pack`` is its object key."""

    pack: str
    offset: int
    nbytes: int


def grid_of_references(node: ArrayNode) -> Grid:
    """The grid that ``references`` goes by."""
    return node.free_grid if node.presented is None else node.presented.grid


def references(node: ArrayNode) -> Iterator[tuple[Extent, PackRange | Chunk]]:
    """Every chunk, in C order: its range, or the chunk itself where it is none of any pack.

    All have the same length. That of a chunk which reaches past the tensor may end in what follows its box, and readers
    discard that; it never passes the end of the pack.
    """
    presented = node.presented
    for index in grid_of_references(node).indices():
        if presented is not None:
            place = presented.place(index)
            box = node.stored.boxes[place.box]
            offset = box.offset + place.first
            if offset + presented.chunk_bytes <= box.pack_bytes:
                yield index, PackRange(box.pack, offset, presented.chunk_bytes)
                continue
        yield index, Chunk(node, index, presented)
