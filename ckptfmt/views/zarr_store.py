"""A committed generation as a read-only store of zarr-python."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Self

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from ckptfmt.engine.opened import Opened
from ckptfmt.errors import InvalidInput
from ckptfmt.format.boxes import Extent
from ckptfmt.views.box_bytes import BoxBytes
from ckptfmt.views.chunks import Chunk
from ckptfmt.views.opening import Reading, held, places_of, reopened
from ckptfmt.views.zarr_dtypes import register
from ckptfmt.views.zarr_nodes import CHUNKS, DOCUMENT, Nodes, chunk_key


class GenerationStore(Store):
    """A generation's tensors as a flat Zarr v3 group. Made by ``Generation.zarr``; nothing can be written through it.

    It is a registered reader of the generation until it is closed or forgotten, for an hour at most.

    A pickled one opens the generation again, by what storage proves at the URL of the durable tier, and reads from the
    other tiers as far as they are there: a stage on its own host only. It carries no secrets: of ``storage_options``
    neither keys nor tokens, and for a URL of fsspec only those that are ckptfmt's own. So a worker takes credentials
    from its environment, profile or role, and options of fsspec from the configuration of fsspec
    (``FSSPEC_<PROTOCOL>_<NAME>``). With ``mmap`` what lies on no local file system there is read.
    """

    supports_writes: bool = False
    supports_deletes: bool = False
    supports_listing: bool = True

    def __init__(
        self,
        opened: Opened,
        reading: Reading,
        guard: AbstractContextManager[None] | None = None,
        *,
        read_only: bool = True,
    ) -> None:
        if not read_only:
            raise InvalidInput(f"{opened.name} is committed: its Zarr store is read-only")
        super().__init__(read_only=True)
        register()
        self._opened = opened
        self._reading = reading
        self._nodes = Nodes(opened)
        self._bytes: BoxBytes = reading.of(opened)
        self._release = held(self, guard)
        self._before: GenerationStore | None = None

    # -- what zarr asks of a store ------------------------------------------------------------------
    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        if not self._is_open:
            await self._open()
        found = self._find(key)
        if isinstance(found, Chunk) and not found.at_hand(self._bytes):
            return await asyncio.to_thread(self._buffer, found, prototype, byte_range)
        return None if found is None else self._buffer(found, prototype, byte_range)

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        self._is_open = True
        found = self._find(key)
        return None if found is None else self._buffer(found, prototype, byte_range)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*(self.get(key, prototype, wanted) for key, wanted in key_ranges)))

    async def exists(self, key: str) -> bool:
        return self._find(key) is not None

    async def getsize(self, key: str) -> int:
        found = self._find(key)
        if found is None:
            raise FileNotFoundError(key)
        return found.nbytes if isinstance(found, Chunk) else len(found)

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()

    async def delete(self, key: str) -> None:
        self._check_writable()

    async def delete_dir(self, prefix: str) -> None:
        self._check_writable()

    async def clear(self) -> None:
        self._check_writable()

    async def list(self) -> AsyncIterator[str]:
        for key in self._keys(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in self._keys(prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in self._children(prefix.strip("/")):
            yield name

    def with_read_only(self, read_only: bool = False) -> Self:
        if not read_only:
            return super().with_read_only(read_only)  # type: ignore[return-value]  # says that it can't be
        made = type(self)(self._opened, self._reading)
        made._before = self  # the registered reader
        return made

    def close(self) -> None:
        self._release()
        super().close()

    # -- keys ---------------------------------------------------------------------------------------
    def _find(self, key: str) -> bytes | Chunk | None:
        """The document or the chunk at ``key``."""
        if key == DOCUMENT:
            return self._nodes.document
        name, _, rest = key.partition("/")
        if name not in self._nodes:
            return None
        node = self._nodes[name]
        if rest == DOCUMENT:
            return node.document
        index = _index(rest)
        return Chunk(node, index, node.shown) if index is not None and index in node.grid else None

    def _keys(self, prefix: str) -> Iterator[str]:
        if DOCUMENT.startswith(prefix):
            yield DOCUMENT
        name, slash, _ = prefix.partition("/")
        for node in [name] if slash else self._nodes:
            if node in self._nodes and f"{node}/".startswith(prefix[: len(node) + 1]):
                keys = chain((f"{node}/{DOCUMENT}",), (chunk_key(node, at) for at in self._nodes[node].grid.indices()))
                yield from (key for key in keys if key.startswith(prefix))

    def _children(self, folder: str) -> Iterator[str]:
        if not folder:
            yield DOCUMENT
            yield from self._nodes
            return
        name, _, rest = folder.partition("/")
        if name not in self._nodes:
            return
        counts = self._nodes[name].grid.counts
        if not rest:
            yield DOCUMENT
            if all(counts):
                yield CHUNKS
            return
        above = _index(rest)
        if above is not None and len(above) < len(counts) and all(i < n for i, n in zip(above, counts, strict=False)):
            yield from map(str, range(counts[len(above)] if all(counts) else 0))

    # -- bytes --------------------------------------------------------------------------------------
    def _buffer(self, found: bytes | Chunk, prototype: BufferPrototype | None, wanted: ByteRequest | None) -> Buffer:
        nbytes = found.nbytes if isinstance(found, Chunk) else len(found)
        start, stop = _range(wanted, nbytes)
        data = found.read(self._bytes, start, stop) if isinstance(found, Chunk) else found[start:stop]
        return (prototype or default_buffer_prototype()).buffer.from_bytes(data)

    # -- itself -------------------------------------------------------------------------------------
    def __eq__(self, other: object) -> bool:
        return isinstance(other, GenerationStore) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[Any, ...]:
        return (self._opened.info.key, self._opened.site.backend.url, self._reading)

    def __getstate__(self) -> dict[str, Any]:
        opened = self._opened
        return {
            "url": opened.site.backend.url,
            "folder": opened.folder,
            "key": opened.info.key,
            "storage_options": dict(opened.site.backend.storage_options),
            "tiers": places_of(opened),
            "reading": self._reading,
            "is_open": self._is_open,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        where = {name: state[name] for name in ("url", "folder", "key", "storage_options", "tiers")}
        GenerationStore.__init__(self, reopened(**where), state["reading"])
        self._is_open = state["is_open"]

    def __str__(self) -> str:
        return f"{self._opened.site.backend.url.rstrip('/')}/{self._opened.folder}".rstrip("/")

    def __repr__(self) -> str:
        return f"<GenerationStore of {self._opened.name}: {len(self._nodes)} arrays>"


def _index(key: str) -> Extent | None:
    """The chunk that ``c/0/1`` names, or None if it names none."""
    first, *numbers = key.split("/")
    if first != CHUNKS or not all(n == "0" or (n.isascii() and n.isdigit() and n[0] != "0") for n in numbers):
        return None
    return tuple(map(int, numbers))


def _range(wanted: ByteRequest | None, nbytes: int) -> tuple[int, int]:
    """The bytes that a request asks for, as zarr's own stores understand it."""
    if wanted is None:
        return 0, nbytes
    if isinstance(wanted, RangeByteRequest):
        start, stop = wanted.start, wanted.end
    elif isinstance(wanted, OffsetByteRequest):
        start, stop = wanted.offset, nbytes
    elif isinstance(wanted, SuffixByteRequest):
        start, stop = nbytes - wanted.suffix, nbytes
    else:
        raise TypeError(f"Unexpected byte_range, got {wanted}.")
    start = min(max(0, start), nbytes)
    return start, min(max(start, stop), nbytes)
