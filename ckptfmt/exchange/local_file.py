"""One file of this machine, read at offsets, and whether it is still what it was."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

import xxhash

from ckptfmt.backends.posix_errors import translated
from ckptfmt.errors import Corrupt, FormatError, InvalidInput
from ckptfmt.exchange.pieces import PIECE_BYTES

KEPT_MAX: Final = 64
"""Files that stay open at a time; others are opened for each read. A save of many ranks has more than a process may."""


class LocalFile:
    """Open for reading until it is closed. ``name`` is how messages and reports call it within what was opened.

    ``NotFound``, ``AccessDenied`` and ``Unavailable`` name the path; ``InvalidInput`` for what is no regular file.
    """

    _kept = 0

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = path.name if name is None else name
        with translated("open", str(path)):
            require_regular(path)  # first: to open a pipe would wait for its writer
            self._descriptor = self._open()
        self._facts = os.fstat(self._descriptor)
        if LocalFile._kept < KEPT_MAX:
            LocalFile._kept += 1
        else:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def nbytes(self) -> int:
        return self._facts.st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes; ``Corrupt`` where the file ends before."""
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` from ``offset`` on; ``Corrupt`` where the file ends before."""
        if self._descriptor >= 0:
            self._read(self._descriptor, offset, memory)
            return
        with translated("open", str(self.path)):
            descriptor = self._open()
        try:
            self._read(descriptor, offset, memory)
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def _read(self, descriptor: int, offset: int, memory: memoryview) -> None:
        done = 0
        while done < memory.nbytes:
            with translated("read", f"{self.path} at offset {offset + done}"):
                count = os.preadv(descriptor, [memory[done:]], offset + done)
            if not count:
                raise Corrupt(
                    f"{self.path} ends at {offset + done}, but {memory.nbytes - done} more bytes should follow; the "
                    "file is cut short: get another copy",
                    kind="truncated",
                    object=str(self.path),
                    offset=offset + done,
                )
            done += count

    def digest(self, read: Callable[[int], None] | None = None) -> str:
        """xxh3-128 of all of it, as 32 hex digits. ``read`` is told of each piece, in bytes."""
        state = xxhash.xxh3_128()
        memory = memoryview(bytearray(PIECE_BYTES))
        for offset in range(0, self.nbytes, PIECE_BYTES):
            piece = memory[: min(PIECE_BYTES, self.nbytes - offset)]
            self.read_into(offset, piece)
            state.update(piece)
            if read is not None:
                read(piece.nbytes)
        return state.hexdigest()

    def changed(self) -> bool:
        """Whether the file at the path is no longer the one that was opened, or was written to since."""
        try:
            return _identity(os.stat(self.path)) != _identity(self._facts)
        except OSError:
            return True

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            LocalFile._kept -= 1


def _identity(facts: os.stat_result) -> tuple[int, ...]:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def plain_name(name: str) -> str:
    """Return ``name``, read from bytes, if it can be that of a file beside them. ``FormatError`` if it leads away."""
    if not name or name in (".", "..") or len(name) > 255 or any(c in name for c in "/\\\0"):
        raise FormatError(f"{name[:120]!r} is no plain file name")
    return name


def require_regular(path: Path) -> None:
    """``InvalidInput`` for a folder, pipe or device."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise InvalidInput(f"{path} is no regular file: give a file that holds a checkpoint, or the folder around it")


class FileRange:
    """Consecutive bytes of a file as the bytes of one box."""

    __slots__ = ("_file", "_offset")

    def __init__(self, file: LocalFile, offset: int) -> None:
        self._file = file
        self._offset = offset

    def read_into(self, first: int, memory: memoryview) -> None:
        self._file.read_into(self._offset + first, memory)
