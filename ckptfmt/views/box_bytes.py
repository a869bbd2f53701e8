"""Ranges of bytes of stored boxes, for views that are asked for some of them at any time, from any thread.

They come from the nearest tier that has them, as in every other reader (spec/tiers.md, "Reading").
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from ckptfmt.engine.arena import map_memory
from ckptfmt.engine.nearest import Copy
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.read import check_chunk
from ckptfmt.engine.read_plan import StoredBox
from ckptfmt.engine.units import align_down, align_up
from ckptfmt.errors import CkptError, Corrupt, NotFound

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
        """Bytes ``first`` up to ``stop`` of ``box``, not to be written to. Raises as ``Nearest.fill`` does: ``Corrupt``
        for what has its digest nowhere, if that is looked at."""

    def at_hand(self, box: StoredBox, first: int, stop: int) -> bool:
        """Whether ``read`` would return at once."""


class UnverifiedBytes:
    """Exactly what was asked for, as it comes."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened

    def read(self, box: StoredBox, first: int, stop: int) -> memoryview:
        start, nbytes = box.offset + first, stop - first
        data = map_memory(nbytes)[:nbytes]
        wanted = (box, first // box.chunk_bytes, start, nbytes)
        with self._opened.noting_damage():
            self._opened.nearest.fill(box.pack, start, data, [wanted], verify=False)
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

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
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
        with self._opened.noting_damage():
            self._opened.nearest.fill(box.pack, start, memory, [(box, number, offset, nbytes)])
        return memory[offset - start : offset - start + nbytes].toreadonly()


@dataclass(frozen=True)
class _Mapping:
    """A pack as a file shows it. ``looked_at``: offset of a chunk -> whether it may be shown."""

    copy: Copy
    path: Path
    memory: memoryview
    looked_at: dict[int, bool] = field(default_factory=dict)


class MappedBytes:
    """Packs of local file systems, shown without a copy from the nearest of them. With ``verify`` every chunk is
    compared with its digest before any of it is shown for the first time. What no local tier can show so comes from
    ``otherwise``.

    Pages that the system drops afterwards come from the disk once more, unverified; and if they do not come, or the
    file was cut short, the process ends with a signal that nobody can catch. So this is for those who ask for it.
    """

    def __init__(self, opened: Opened, otherwise: BoxBytes, *, verify: bool) -> None:
        self._opened = opened
        self._otherwise = otherwise
        self._verify = verify
        self._lock = threading.Lock()
        self._packs: OrderedDict[str, _Mapping] = OrderedDict()
        self._looking = _Under[bool]()
        self._looked_at: dict[tuple[str, str], dict[int, bool]] = {}
        """By copy, for when it is mapped again."""

    def read(self, box: StoredBox, first: int, stop: int) -> memoryview:
        pack = self._pack(box)
        numbers = range(first // box.chunk_bytes, (stop - 1) // box.chunk_bytes + 1)
        if pack is None or not all(self._shows(pack, box, number) for number in numbers):
            return self._otherwise.read(box, first, stop)
        return pack.memory[box.offset + first : box.offset + stop]

    def at_hand(self, box: StoredBox, first: int, stop: int) -> bool:
        pack = self._packs.get(box.pack)
        if pack is not None and all(pack.looked_at.get(at) for at in _chunks(box, first, stop)):
            return True
        return self._otherwise.at_hand(box, first, stop)

    def _shows(self, pack: _Mapping, box: StoredBox, number: int) -> bool:
        at = box.offset + number * box.chunk_bytes
        found = pack.looked_at.get(at)
        if found is None:
            found = self._looking.run((str(pack.path), at), lambda: self._look_at(pack, box, number))
        return found

    def _look_at(self, pack: _Mapping, box: StoredBox, number: int) -> bool:
        """Bring a chunk in, and compare it. Who reads it after a refusal tells what is wrong."""
        offset, nbytes = _extent(box, number)
        found = pack.looked_at.get(offset)
        if found is not None:
            return found
        start = align_down(offset)
        try:
            _bring_in(pack.memory, start, offset + nbytes - start)
            if self._verify:
                check_chunk(box, number, offset, pack.memory[offset : offset + nbytes])
        except (OSError, Corrupt):
            pack.looked_at[offset] = False
        else:
            self._opened.nearest.log.read(pack.copy.tier, nbytes)
            pack.looked_at[offset] = True
        return pack.looked_at[offset]

    def _pack(self, box: StoredBox) -> _Mapping | None:
        with self._lock:
            found = self._packs.get(box.pack)
            if found is None:
                found = self._mapped(box)
                if found is None:
                    return None
                self._packs[box.pack] = found
                if len(self._packs) > MAPPED_MAX:  # what was shown of it keeps it mapped
                    self._packs.popitem(last=False)
            self._packs.move_to_end(box.pack)
            return found

    def _mapped(self, box: StoredBox) -> _Mapping | None:
        """The nearest copy that can be mapped; those before it that are not what they should be are told."""
        nearest, wrong = self._opened.nearest, list[tuple[Copy, CkptError]]()
        for copy in nearest.copies(box.pack):
            path = copy.path
            if path is None:
                continue
            try:
                memory = _map(path, box)
            except (NotFound, Corrupt) as error:
                wrong.append((copy, error))
            except OSError:
                continue  # it may be read all the same
            else:
                with self._opened.noting_damage():
                    nearest.tell(wrong, moved_on=True)
                return _Mapping(copy, path, memory, self._looked_at.setdefault(copy.identity, {}))
        return None


def _chunks(box: StoredBox, first: int, stop: int) -> range:
    """Where the chunks that hold some of a range of a box begin in its pack."""
    size = box.chunk_bytes
    return range(box.offset + first // size * size, box.offset + stop, size)


def _extent(box: StoredBox, number: int) -> tuple[int, int]:
    """Where chunk ``number`` of a box lies in its pack, and how long it is."""
    inner = number * box.chunk_bytes
    return box.offset + inner, min(box.chunk_bytes, box.nbytes - inner)


def _map(path: Path, box: StoredBox) -> memoryview:
    """The pack of ``box``. ``NotFound`` and ``Corrupt`` as for one that is read; ``OSError`` if it cannot be mapped."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"{path} is not there", kind="object_missing") from error
    try:
        found = os.fstat(descriptor).st_size
        if found != box.pack_bytes:
            raise Corrupt(f"{path}: expected {box.pack_bytes} bytes, found {found}", kind="truncated", object=box.pack)
        return memoryview(mmap.mmap(descriptor, found, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


def _bring_in(pack: memoryview, start: int, nbytes: int) -> None:
    """Have the system read pages of a mapping in one call, which can fail where a look at them would be a signal."""
    mapping = pack.obj
    assert isinstance(mapping, mmap.mmap)
    try:
        mapping.madvise(_POPULATE_READ, start, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):  # before Linux 5.14
            raise
