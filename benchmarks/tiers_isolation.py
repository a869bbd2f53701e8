"""The rate of a stream of data that is read for training, alone and beside the copy from a stage to S3."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import ckptfmt
from benchmarks.contenders import RUN
from benchmarks.job import Job
from benchmarks.states import build
from benchmarks.tiers_transfer import options, url
from ckptfmt.measure import states

WAYS: Final = ("unlimited", "bandwidth_max")
_BLOCK: Final = 1 << 20
_FILE_BLOCKS: Final = 256


def measure_isolation(job: Job) -> dict[str, Any]:
    """``count`` pairs: bytes per second ``alone``, before and after, and ``beside`` a copy, from staged to durable."""
    state = build(job)
    found: dict[str, list[float]] = {"alone": [], "beside": [], "copied": []}
    window, stage, limit = job.option("window"), job.folder / "stage", job.option("bandwidth_max")
    opened = ckptfmt.open(url(job), stage=stage, bandwidth_max=limit, **options(job))
    with opened as repo, repo.checkpointer(RUN) as checkpointer, _loader(job.folder) as rate:
        for number in range(job.count):
            states.step(state, number)
            before = rate.over(window)
            pending = checkpointer.save(state, step=number)
            assert pending is not None
            pending.wait("staged")
            mark, began = rate.mark(), time.perf_counter()
            pending.wait("durable")
            beside = rate.since(mark)
            seconds = time.perf_counter() - began
            pending.wait()
            found["beside"].append(beside)
            found["alone"].append((before + rate.over(window)) / 2)
            found["copied"].append(states.state_bytes(state) / seconds)
    return found


class Rate:
    """Reads the loader's count of bytes."""

    def __init__(self, counter: mmap.mmap) -> None:
        self._counter = counter

    def mark(self) -> tuple[int, float]:
        return struct.unpack("Q", self._counter[:8])[0], time.perf_counter()

    def since(self, mark: tuple[int, float]) -> float:
        """Bytes per second from ``mark`` to now."""
        count, now = self.mark()
        return (count - mark[0]) / (now - mark[1])

    def over(self, seconds: float) -> float:
        mark = self.mark()
        time.sleep(seconds)
        return self.since(mark)


@contextmanager
def _loader(folder: Path) -> Iterator[Rate]:
    """A process that reads a file past the page cache, again and again, and takes a CRC of it in place of decoding."""
    data, count = folder / "data", folder / "count"
    with data.open("xb") as file:
        for _ in range(_FILE_BLOCKS):
            file.write(os.urandom(_BLOCK))
        file.flush()
        os.fsync(file.fileno())
    count.write_bytes(bytes(mmap.PAGESIZE))
    process = multiprocessing.get_context("spawn").Process(target=_load, args=(data, count), daemon=True)
    with count.open("r+b") as shared, mmap.mmap(shared.fileno(), 0) as counter:
        process.start()
        try:
            rate = Rate(counter)
            until = time.monotonic() + 60
            while not rate.mark()[0]:
                if time.monotonic() > until or process.exitcode is not None:
                    raise RuntimeError(f"the loader reads nothing (exit code {process.exitcode})")
                time.sleep(0.01)
            yield rate
        finally:
            process.kill()
            process.join()


def _load(data: Path, count: Path) -> None:
    buffer = mmap.mmap(-1, _BLOCK)
    total = 0
    with count.open("r+b") as file, mmap.mmap(file.fileno(), 0) as counter:
        descriptor = _opened(data)
        while True:
            for block in range(_FILE_BLOCKS):
                total += os.preadv(descriptor, [buffer], block * _BLOCK)
                zlib.crc32(buffer)
                counter[:8] = struct.pack("Q", total)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # for where there is no direct I/O


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY)
