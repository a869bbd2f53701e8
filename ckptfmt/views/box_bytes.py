"""Ranges of bytes of stored boxes, for views that are asked for some of them at any time, from any thread."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from ckptfmt.engine.arena import map_memory
from ckptfmt.engine.plan import align_down, align_up
from ckptfmt.engine.read import StoredBox, check_chunk
from ckptfmt.engine.rereading import read_whole
from ckptfmt.errors import Corrupt, NotFound, Unavailable
from ckptfmt.ports.backend import Backend

KEPT_BYTES: Final = 64 << 20
"""Of chunks that were verified: readers ask for pieces of them, one after the other."""
MAPPED_MAX: Final = 64
"""Packs that are mapped at a time: each takes a descriptor."""
_POPULATE_READ: Final = 22  # MADV_POPULATE_READ

_T = TypeVar("_T")
_Key = tuple[str, int]
"""A chunk: its pack, and its offset there."""


class BoxBytes(Protocol):
    def read(self, box: StoredBox, first: int, stop: int) -> memoryview:
        """Bytes ``first`` up to ``stop`` of ``box``, not to be written to. Raises as ``Backend.read_into`` does, and
        ``Corrupt`` for what does not have its digest, if that is looked at."""

    def at_hand(self, box: StoredBox, first: int, stop: int) -> bool:
        """Whether ``read`` would return at once."""


class UnverifiedBytes:
    """Exactly what was asked for, as it comes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def read(self, box: StoredBox, first: int, stop: int) -> memoryview:
        data = map_memory(stop - first)[: stop - first]
        self._backend.read_into(box.pack, box.offset + first, data)
        return data

    def at_hand(self, box: StoredBox, first: int, stop: int) -> bool:
        return False


class _Under(Generic[_T]):
    """Does one thing at a time for a key: who asks meanwhile gets the same answer, or the same error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[_Key, Future[_T]] = {}

    def run(self, key: _Key, work: Callable[[], _T]) -> _T:
        with self._lock:
            other = self._running.get(key)
            if other is None:
                mine: Future[_T] = Future()
                self._running[key] = mine
        if other is not None:
            return other.result()
        try:
            mine.set_result(work())
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._running[key]
        return mine.result()


class VerifiedBytes:
    """Reads whole chunks, since only those can be compared with their digests, and keeps the last ``KEPT_BYTES``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._reading = _Under[memoryview]()
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, memoryview] = OrderedDict()
        self._kept_bytes = 0

    def read(self, box: StoredBox, first: int, stop: int) -> memoryview:
        size = box.chunk_bytes
        numbers = range(first // size, (stop - 1) // size + 1)
        if len(numbers) == 1:
            inner = numbers[0] * size
            return self._chunk(box, numbers[0])[first - inner : stop - inner]
        data = memoryview(bytearray(stop - first))
        for number in numbers:
            low, high = max(first, number * size), min(stop, (number + 1) * size)
            data[low - first : high - first] = self._chunk(box, number)[low - number * size : high - number * size]
        return data

    def at_hand(self, box: StoredBox, first: int, stop: int) -> bool:
        return all((box.pack, at) in self._kept for at in _chunks(box, first, stop))

    def _chunk(self, box: StoredBox, number: int) -> memoryview:
        key = (box.pack, box.offset + number * box.chunk_bytes)
        found = self._look_up(key)
        return found if found is not None else self._reading.run(key, lambda: self._keep(key, box, number))

    def _look_up(self, key: _Key) -> memoryview | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def _keep(self, key: _Key, box: StoredBox, number: int) -> memoryview:
        found = self._look_up(key)  # since another thread may have read it a moment ago
        if found is not None:
            return found
        data = self._fetch(box, number)
        with self._lock:
            self._kept[key] = data
            self._kept_bytes += align_up(len(data))
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= align_up(len(self._kept.popitem(last=False)[1]))
        return data

    def _fetch(self, box: StoredBox, number: int) -> memoryview:
        offset, nbytes = _extent(box, number)
        start, stop = align_down(offset), min(align_up(offset + nbytes), box.pack_bytes)
        memory = map_memory(stop - start)[: stop - start]
        data = memory[offset - start : offset - start + nbytes]

        def read() -> None:
            self._backend.read_into(box.pack, start, memory)
            check_chunk(box, number, offset, data)

        read_whole(read)
        return data.toreadonly()


class MappedBytes:
    """Packs of a local file system, shown without a copy. With ``verify`` every chunk is compared with its digest
    before any of it is shown for the first time.

    Pages that the system drops afterwards come from the disk once more, unverified; and if they do not come, or the
    file was cut short, the process ends with a signal that nobody can catch. So this is for those who ask for it.
    """

    def __init__(self, path_of: Callable[[str], Path], *, verify: bool) -> None:
        self._path_of = path_of
        self._verify = verify
        self._lock = threading.Lock()
        self._packs: OrderedDict[str, memoryview] = OrderedDict()
        self._looking = _Under[None]()
        self._seen: set[_Key] = set()

    def read(self, box: StoredBox, first: int, stop: int) -> memoryview:
        pack = self._pack(box)
        for number in range(first // box.chunk_bytes, (stop - 1) // box.chunk_bytes + 1):
            key = (box.pack, box.offset + number * box.chunk_bytes)
            if key not in self._seen:
                self._looking.run(key, lambda key=key, number=number: self._look_at(key, box, number, pack))  # type: ignore[misc]
        return pack[box.offset + first : box.offset + stop]

    def at_hand(self, box: StoredBox, first: int, stop: int) -> bool:
        return all((box.pack, at) in self._seen for at in _chunks(box, first, stop))

    def _look_at(self, key: _Key, box: StoredBox, number: int, pack: memoryview) -> None:
        """Bring a chunk in, and compare it."""
        if key in self._seen:
            return
        offset, nbytes = _extent(box, number)
        start = align_down(offset)
        _bring_in(pack, start, offset + nbytes - start, self._path_of(box.pack))
        if self._verify:
            check_chunk(box, number, offset, pack[offset : offset + nbytes])
        self._seen.add(key)

    def _pack(self, box: StoredBox) -> memoryview:
        with self._lock:
            found = self._packs.get(box.pack)
            if found is None:
                found = self._packs[box.pack] = _map(self._path_of(box.pack), box.pack_bytes)
                if len(self._packs) > MAPPED_MAX:  # what was shown of it keeps it mapped
                    self._packs.popitem(last=False)
            self._packs.move_to_end(box.pack)
            return found


def _chunks(box: StoredBox, first: int, stop: int) -> range:
    """Where the chunks that hold some of a range of a box begin in its pack."""
    size = box.chunk_bytes
    return range(box.offset + first // size * size, box.offset + stop, size)


def _extent(box: StoredBox, number: int) -> tuple[int, int]:
    """Where chunk ``number`` of a box lies in its pack, and how long it is."""
    inner = number * box.chunk_bytes
    return box.offset + inner, min(box.chunk_bytes, box.nbytes - inner)


def _map(path: Path, nbytes: int) -> memoryview:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(
            f"{path} is not there; open the generation again, or an older one", kind="object_missing"
        ) from error
    except OSError as error:
        raise Unavailable(
            f"{path} cannot be opened to be mapped: {error}; use mmap=False", errno=error.errno
        ) from error
    try:
        found = os.fstat(descriptor).st_size
        if found != nbytes:
            raise Corrupt(
                f"{path}: expected {nbytes} bytes, found {found}; restore an older generation or another copy",
                kind="truncated",
                object=str(path),
            )
        return memoryview(mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_READ))
    except OSError as error:
        raise Unavailable(f"{path} cannot be mapped: {error}; use mmap=False", errno=error.errno) from error
    finally:
        os.close(descriptor)


def _bring_in(pack: memoryview, start: int, nbytes: int, path: Path) -> None:
    """Have the system read pages of a mapping in one call, which can fail where a look at them would be a signal."""
    mapping = pack.obj
    assert isinstance(mapping, mmap.mmap)
    try:
        mapping.madvise(_POPULATE_READ, start, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):  # before Linux 5.14
            raise Unavailable(f"read {path} at offset {start}: {error}; use mmap=False", errno=error.errno) from error
