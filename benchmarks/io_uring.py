"""One timed experiment: would io_uring write and read packs faster than two threads do?

    python -m benchmarks.io_uring FOLDER [--megabytes 1000] [--pairs 9]

The kernel's interface through ctypes (io_uring_setup(2), io_uring_enter(2)), since the wrapper on PyPI takes no views
of memory. One thread keeps ``depth`` requests of 8 MiB in flight and hashes each piece, as the threads do. What came of
it stands in spec/decisions/005-io-uring.md.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import xxhash

from benchmarks.pairs import interval, ratios
from benchmarks.tables import spread
from ckptfmt.engine.arena import map_memory
from ckptfmt.engine.touch import address_of, populate
from ckptfmt.measure.raw_files import PIECE, Timed, drop_cache, raw_read, raw_write, sync_folder

_SETUP, _ENTER = 425, 426  # one number on every architecture
_READ, _WRITE = 22, 23
_GET_EVENTS: Final = 1
_SQ_RING, _ENTRIES = 0, 0x10000000
_U32 = ctypes.c_uint32
_libc: Final = ctypes.CDLL(None, use_errno=True)


class _Offsets(ctypes.Structure):
    """struct io_sqring_offsets, and io_cqring_offsets, which is as long (linux/io_uring.h)."""

    _fields_ = (("at", _U32 * 8), ("user_addr", ctypes.c_uint64))


class _Parameters(ctypes.Structure):
    _fields_ = (
        ("sq_entries", _U32),
        ("cq_entries", _U32),
        ("rest", _U32 * 8),
        ("sq", _Offsets),
        ("cq", _Offsets),
    )


class _Request(ctypes.Structure):
    """struct io_uring_sqe, as far as reads and writes use it."""

    _fields_ = (
        ("opcode", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("ioprio", ctypes.c_uint16),
        ("fd", ctypes.c_int32),
        ("offset", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("length", _U32),
        ("rw_flags", _U32),
        ("user_data", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 3),
    )


class _Completion(ctypes.Structure):
    _fields_ = (("user_data", ctypes.c_uint64), ("result", ctypes.c_int32), ("flags", _U32))


class Ring:
    """One submission and one completion queue, used by one thread."""

    def __init__(self, depth: int) -> None:
        parameters = _Parameters()
        self._descriptor = _call(_SETUP, depth, ctypes.byref(parameters))
        submissions, completions = parameters.sq.at, parameters.cq.at
        length = max(
            submissions[6] + parameters.sq_entries * 4,
            completions[5] + parameters.cq_entries * ctypes.sizeof(_Completion),
        )
        # Since Linux 5.4 both queues lie in one mapping (IORING_FEAT_SINGLE_MMAP).
        self._queues = mmap.mmap(self._descriptor, length, offset=_SQ_RING)
        self._memory = mmap.mmap(self._descriptor, parameters.sq_entries * ctypes.sizeof(_Request), offset=_ENTRIES)
        self._requests = (_Request * parameters.sq_entries).from_buffer(self._memory)
        self._sq_tail, self._sq_mask = (_U32.from_buffer(self._queues, submissions[at]) for at in (1, 2))
        self._sq_array = (_U32 * parameters.sq_entries).from_buffer(self._queues, submissions[6])
        self._cq_head, self._cq_tail, self._cq_mask = (
            _U32.from_buffer(self._queues, completions[at]) for at in (0, 1, 2)
        )
        self._done = (_Completion * parameters.cq_entries).from_buffer(self._queues, completions[5])

    def submit(self, opcode: int, descriptor: int, address: int, length: int, offset: int, tag: int) -> None:
        """Hand one request to the kernel."""
        slot = self._sq_tail.value & self._sq_mask.value
        self._requests[slot] = _Request(
            opcode=opcode, fd=descriptor, offset=offset, address=address, length=length, user_data=tag
        )
        self._sq_array[slot] = slot
        self._sq_tail.value += 1
        _call(_ENTER, self._descriptor, 1, 0, 0, None, 0)

    def wait(self) -> tuple[int, int]:
        """Tag and result of one finished request."""
        while self._cq_head.value == self._cq_tail.value:
            _call(_ENTER, self._descriptor, 0, 1, _GET_EVENTS, None, 0)
        done = self._done[self._cq_head.value & self._cq_mask.value]
        found = done.user_data, done.result
        self._cq_head.value += 1
        return found

    def close(self) -> None:
        os.close(self._descriptor)


def _call(number: int, *arguments: Any) -> int:
    found = _libc.syscall(number, *arguments)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"io_uring: {os.strerror(code)}; it may be switched off (kernel.io_uring_disabled)")
    return int(found)


def _move(opcode: int, descriptor: int, memory: memoryview, depth: int) -> None:
    """Move all pieces with ``depth`` of them in flight, hashing each before it is written or after it was read."""
    ring, base = Ring(depth), address_of(memory)
    try:
        starts, flying = iter(range(0, len(memory), PIECE)), 0
        while True:
            start = next(starts, None) if flying < depth else None
            if start is not None:
                length = min(PIECE, len(memory) - start)
                if opcode == _WRITE:
                    xxhash.xxh3_128_digest(memory[start : start + length])
                ring.submit(opcode, descriptor, base + start, length, start, start)
                flying += 1
                continue
            if not flying:
                return
            start, result = ring.wait()
            flying -= 1
            if result != min(PIECE, len(memory) - start):
                raise OSError(-result, f"io_uring moved {result} bytes at offset {start}")
            if opcode == _READ:
                xxhash.xxh3_128_digest(memory[start : start + result])
    finally:
        ring.close()


@contextmanager
def _timed() -> Iterator[list[Timed]]:
    found: list[Timed] = []
    began, cpu = time.perf_counter(), time.process_time()
    yield found
    found.append(Timed(time.perf_counter() - began, time.process_time() - cpu, True))


def ring_write(path: Path, memory: memoryview, depth: int) -> Timed:
    """As ``raw_write(..., hashed=True)``: a fresh preallocated file, direct, file and folder synced."""
    with _timed() as found:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT)
        try:
            os.posix_fallocate(descriptor, 0, len(memory))
            _move(_WRITE, descriptor, memory, depth)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(path.parent)
    return found[0]


def ring_read(path: Path, memory: memoryview, depth: int) -> Timed:
    with _timed() as found:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            _move(_READ, descriptor, memory, depth)
        finally:
            os.close(descriptor)
    return found[0]


def experiment(folder: Path, nbytes: int, pairs: int) -> None:
    """Time all ways in turns, check that they move the same bytes, print medians and ratios."""
    memory = map_memory(nbytes)
    populate(memory)
    block = os.urandom(1 << 20)
    for start in range(0, len(memory), len(block)):
        memory[start : start + len(block)] = block[: len(memory) - start]
    memory[::4096] = os.urandom(len(memory[::4096]))
    digest = xxhash.xxh3_128_digest(memory)
    path = folder / "uring"
    writes: dict[str, Callable[[], Timed]] = {
        "2 threads": lambda: raw_write(path, memory, threads=2, hashed=True),
        "4 threads": lambda: raw_write(path, memory, threads=4, hashed=True),
        "8 threads": lambda: raw_write(path, memory, threads=8, hashed=True),
        "ring, depth 4": lambda: ring_write(path, memory, 4),
        "ring, depth 8": lambda: ring_write(path, memory, 8),
    }
    reads: dict[str, Callable[[], Timed]] = {
        "2 threads": lambda: raw_read(path, memory, threads=2, direct=True, hashed=True),
        "4 threads": lambda: raw_read(path, memory, threads=4, direct=True, hashed=True),
        "8 threads": lambda: raw_read(path, memory, threads=8, direct=True, hashed=True),
        "ring, depth 4": lambda: ring_read(path, memory, 4),
        "ring, depth 8": lambda: ring_read(path, memory, 8),
    }
    found: dict[str, dict[str, list[Timed]]] = {"write": {}, "cold read": {}}
    for _ in range(pairs):
        for name, write in writes.items():
            path.unlink(missing_ok=True)
            found["write"].setdefault(name, []).append(write())
        for name, read in reads.items():
            drop_cache(folder)
            memory[::4096] = bytes(len(memory[::4096]))
            found["cold read"].setdefault(name, []).append(read())
            if xxhash.xxh3_128_digest(memory) != digest:
                raise ValueError(f"{name} read other bytes than were written")
    path.unlink()
    for what, ways in found.items():
        print(f"{what} of {len(memory) / 1e9:.2f} GB, hashed, {pairs} rounds")
        plain = [one.seconds for one in ways["2 threads"]]
        for name, timed in ways.items():
            seconds = [one.seconds for one in timed]
            ratio = interval(ratios(seconds, plain))
            cpu = spread([one.cpu_seconds for one in timed])
            print(
                f"  {name:<14} {spread(seconds):>24}  CPU {cpu:>24}  "
                f"to 2 threads {ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    experiment(arguments.folder, arguments.megabytes << 20, arguments.pairs)


if __name__ == "__main__":
    main()
