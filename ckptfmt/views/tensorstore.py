"""A tensor in TensorStore, if that is installed: chunks are read when it asks for them."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ckptfmt.engine.opened import Opened
from ckptfmt.engine.stored import Stored
from ckptfmt.engine.transfer import DROPPED
from ckptfmt.errors import InvalidInput
from ckptfmt.views.chunks import Chunk
from ckptfmt.views.opening import Reading, held
from ckptfmt.views.zarr_nodes import TENSORSTORE, ArrayNode, array_node

if TYPE_CHECKING:
    import tensorstore


def open_tensorstore(
    opened: Opened, stored: Stored, guard: AbstractContextManager[None], reading: Reading
) -> tensorstore.TensorStore:
    """``stored`` as a virtual, chunked array, which keeps ``guard`` entered until it is forgotten.

    Element types that TensorStore lacks are shown as ``uint8``, with the bytes of an element as one more dimension.
    ``InvalidInput`` without tensorstore.
    """
    if importlib.util.find_spec("tensorstore") is None:
        raise InvalidInput("tensorstore is not installed; install it with pip install 'ckptfmt[tensorstore]'")
    import tensorstore

    reading.require_possible(opened)
    node = array_node(stored.name, stored, TENSORSTORE)
    reader = _Reader(opened, node, reading)
    held(reader, guard)
    function = _Function(reader)
    DROPPED.keep(function, reader)
    return tensorstore.virtual_chunked(
        function,
        dtype=tensorstore.dtype(node.dtype),
        shape=node.shape,
        chunk_layout=tensorstore.ChunkLayout(read_chunk_shape=node.grid.chunk),
    )


class _Function:
    """What TensorStore calls, from several threads at a time; and drops on one of them, with a lock held."""

    __slots__ = ("__weakref__", "_reader")

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def __call__(self, domain: tensorstore.IndexDomain, array: Any, parameters: Any) -> None:
        self._reader.fill(domain, array)


class _Reader:
    """Reads chunks; closed when it is forgotten."""

    def __init__(self, opened: Opened, node: ArrayNode, reading: Reading) -> None:
        self._node = node
        self._bytes = reading.of(opened)

    def fill(self, domain: tensorstore.IndexDomain, array: Any) -> None:
        """Fill ``array`` with what lies in ``domain``, some or all of one chunk."""
        import numpy as np

        node, edges = self._node, self._node.grid.chunk
        index = tuple(at // edge for at, edge in zip(domain.origin, edges, strict=True))
        inner = (at - i * edge for at, i, edge in zip(domain.origin, index, edges, strict=True))
        chunk = Chunk(node, index, node.shown)
        whole = np.frombuffer(chunk.read(self._bytes, 0, chunk.nbytes), array.dtype).reshape(edges)
        array[...] = whole[tuple(slice(at, at + count) for at, count in zip(inner, domain.shape, strict=True))]
