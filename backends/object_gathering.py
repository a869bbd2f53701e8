"""Parts of an object that come in pieces, held until they are whole. The piece that is last is not copied."""

from __future__ import annotations

import mmap
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ckptfmt.backends.buffers import copy_into

_MEMORY_MAX: Final = 96 << 20
"""Bytes of memory for unfinished parts: six threads send one of 8 MiB each and begin another. More lie in temporary
files, which the system writes out."""


class _Room:
    def __init__(self, nbytes: int, memory: memoryview | None) -> None:
        self.memory: Final = memory
        self.missing = nbytes
        self.copying = 0
        """Pieces that are on their way into the room."""
        self._mapped: mmap.mmap | None = None
        if memory is not None:
            self.view = memory[:nbytes]
            return
        with tempfile.TemporaryFile(prefix="ckptfmt-part-") as file:
            file.truncate(nbytes)
            self._mapped = mmap.mmap(file.fileno(), nbytes)
        self.view = memoryview(self._mapped)

    def around(self, at: int, piece: memoryview) -> tuple[memoryview, ...]:
        """The part, with ``piece`` where it lies instead of a copy of it."""
        return self.view[:at], piece, self.view[at + len(piece) :]

    def close(self) -> None:
        self.view.release()
        if self._mapped is not None:
            self._mapped.close()


class Gathering:
    """``length`` gives the bytes of a part. Thread-safe for disjoint pieces."""

    def __init__(self, length: Callable[[int], int]) -> None:
        self._length: Final = length
        self._lock: Final = threading.Lock()
        self._rooms: dict[int, _Room] = {}
        self._held = 0
        """Bytes of all memory that was made and is kept, idle or not."""
        self._idle: list[memoryview] = []
        """Used again: fresh memory costs more than the copy into it."""

    @contextmanager
    def added(self, index: int, at: int, piece: memoryview) -> Iterator[tuple[memoryview, ...] | None]:
        """Keep a piece of the part ``index``; if the part is whole now, gives all of it in pieces, in their order.

        They are forgotten afterwards; ``piece`` itself may be one of them.
        """
        with self._lock:
            room = self._rooms.get(index) or self._open(index)
            room.missing -= len(piece)
            room.copying += 1
            whole = room.around(at, piece) if self._is_ready(index, room, copying=1) else None
        if whole is None:
            copy_into(room.view[at : at + len(piece)], piece)
            with self._lock:
                room.copying -= 1
                whole = (room.view[:],) if self._is_ready(index, room, copying=0) else None
        if whole is None:
            yield None
            return
        try:
            yield whole
        finally:
            for each in whole:
                if each is not piece:
                    each.release()
            self._close(room)

    def _is_ready(self, index: int, room: _Room, *, copying: int) -> bool:
        """Whether all but so many pieces have been copied and none is missing: then nobody else is told so."""
        is_ready = room.missing <= 0 and room.copying == copying and self._rooms.get(index) is room
        if is_ready:
            del self._rooms[index]
        return is_ready

    def _open(self, index: int) -> _Room:
        nbytes = self._length(index)
        room = self._rooms[index] = _Room(nbytes, self._memory(nbytes))
        return room

    def _memory(self, nbytes: int) -> memoryview | None:
        """As much or more; None beyond what is held in memory. The last part is shorter than the others."""
        fitting = next((at for at, memory in enumerate(self._idle) if len(memory) >= nbytes), None)
        if fitting is not None:
            return self._idle.pop(fitting)
        if self._held + nbytes > _MEMORY_MAX:
            return None
        self._held += nbytes
        # Only the pages that are written to are taken, which are few where the last piece is most of the part.
        return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def _close(self, room: _Room) -> None:
        room.close()
        if room.memory is not None:
            with self._lock:
                self._idle.append(room.memory)

    def forget(self) -> None:
        """Drop what is unfinished, and all memory. No piece may be on its way."""
        with self._lock:
            rooms, self._rooms = list(self._rooms.values()), {}
        for room in rooms:
            self._close(room)
        with self._lock:
            self._idle.clear()
            self._held = 0
