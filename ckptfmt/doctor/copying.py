"""One process that copies memory as a save does, and prints the seconds of a copy: ``python -m ckptfmt.doctor.copying
BYTES COPIES``."""

from __future__ import annotations

import mmap
import statistics
import sys
import time
from typing import Final

from ckptfmt.engine.arena import map_memory
from ckptfmt.engine.touch import address_of, populate
from ckptfmt.engine.transfer import copy_memory

_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def seconds_of_a_copy(nbytes: int, copies: int) -> float:
    """The median of ``copies`` copies of ``nbytes`` from memory as tensors have it into that of a snapshot, all of it
    touched, after one that does not count."""
    source, target = memoryview(mmap.mmap(-1, nbytes, flags=_PRIVATE)), map_memory(nbytes)
    populate(source)
    populate(target)
    taken = []
    for _ in range(1 + copies):
        began = time.perf_counter()
        copy_memory([(address_of(target), address_of(source), nbytes)])
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    print(seconds_of_a_copy(*map(int, sys.argv[1:])))
