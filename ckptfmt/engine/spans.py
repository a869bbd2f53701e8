"""Requests for a pack that lies far away: ranges that begin and end where the parts of its object do.

A store keeps an object in the parts in which it came, and a range that reaches into two of them costs two reads there.
Ours are multiples of ``IO_BYTES`` unless somebody wants others. Which chunks lie across them is nothing it knows.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from ckptfmt.engine.read_plan import Chunk, Region, chunks_of
from ckptfmt.engine.transfer import IO_BYTES

_SPAN_BYTES: Final = 2 * IO_BYTES
_LEAST_BYTES: Final = 1 << 20
"""Less at an end of a region is read with what is next to it: a request costs more than the second read there."""


class Across:
    """A chunk that comes in several spans. Thread-safe."""

    def __init__(self, chunk: Chunk, spans: int) -> None:
        self.chunk: Final = chunk
        self._lock = threading.Lock()
        self._left = spans

    def came(self) -> bool:
        """Count a span that has come; whether it was the last one."""
        with self._lock:
            self._left -= 1
            return not self._left


@dataclass(frozen=True)
class Span:
    """One read, the chunks that lie in it, and those that reach out of it."""

    start: int
    stop: int
    chunks: tuple[Chunk, ...]
    across: tuple[Across, ...]

    def came(self) -> list[Chunk]:
        """Count this span for the chunks that reach out of it; those that are all here now."""
        return [across.chunk for across in self.across if across.came()]


def span_bytes(nbytes: int, threads: int) -> int:
    """How long spans of ``nbytes`` together should be: the longest of which each of ``threads`` has at least two."""
    return _SPAN_BYTES if nbytes >= 2 * threads * _SPAN_BYTES else IO_BYTES


def read_spans(region: Region, nbytes: int) -> list[Span]:
    """Cut a region at multiples of ``nbytes``."""
    first = (region.start // nbytes + 1) * nbytes
    if first - region.start < _LEAST_BYTES:
        first += nbytes
    starts = [region.start, *range(first, region.stop - _LEAST_BYTES + 1, nbytes)]
    inside: list[list[Chunk]] = [[] for _ in starts]
    across: list[list[Across]] = [[] for _ in starts]
    for chunk in chunks_of(region):
        _, _, offset, length = chunk
        begin, end = (bisect_right(starts, place) - 1 for place in (offset, offset + length - 1))
        if begin == end:
            inside[begin].append(chunk)
        else:
            shared = Across(chunk, end - begin + 1)
            for among in across[begin : end + 1]:
                among.append(shared)
    return list(map(Span, starts, [*starts[1:], region.stop], map(tuple, inside), map(tuple, across)))
