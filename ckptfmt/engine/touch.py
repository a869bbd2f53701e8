"""Fresh memory, touched before it is needed.

The system hands a page out, zeroed, when it is first written to, and whoever writes waits for it: a reader that
waits for memory keeps no device busy.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ckptfmt.engine.transfer import Background, run_all, thread_count

SLICE_BYTES: Final = 32 << 20
_STEP_BYTES: Final = 2 << 20
"""So much is touched at once: until the system has cleared it nobody in this process can map memory or start a thread
(spec/decisions/009)."""
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not in the mmap module of Python 3.11
_libc = ctypes.CDLL(None, use_errno=True)


def address_of(view: memoryview) -> int:
    """Address of the first byte of a writable view (0 for an empty one)."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0


def populate(view: memoryview) -> None:
    """Touch every page of page-aligned ``view``, in slices and without holding the interpreter lock.

    What it holds may be lost: nobody else may be writing to it.
    """
    base = address_of(view)

    def touch(start: int) -> None:
        length = min(SLICE_BYTES, view.nbytes - start)
        if not _populate(base + start, length):
            ctypes.memset(base + start, 0, length)

    run_all(
        [lambda start=start: touch(start) for start in range(0, view.nbytes, SLICE_BYTES)],  # type: ignore[misc]
        threads=thread_count(),
        name="ckptfmt-touch",
    )


@contextmanager
def touched_ahead(view: memoryview) -> Iterator[Callable[[], None]]:
    """Gives what has page-aligned ``view`` touched, from its start, on a thread of its own, while others fill it in
    the same order: to be called once, when those run.

    What they have written stays. Where the system cannot do that (before Linux 5.14) nothing is touched ahead.
    """
    left = threading.Event()
    ahead = Background(_toucher(view, left.is_set), name="ckptfmt-touch")

    def begin() -> None:
        with suppress(RuntimeError):  # no more threads: each reader touches what it reads
            if view.nbytes > SLICE_BYTES:
                ahead.start()

    try:
        yield begin
    finally:
        left.set()
        if ahead.alive():
            ahead.join()


def _toucher(view: memoryview, left: Callable[[], bool]) -> Callable[[], None]:
    def touch() -> None:
        base = address_of(view)
        for start in range(0, view.nbytes, SLICE_BYTES):
            if left() or not _populate(base + start, min(SLICE_BYTES, view.nbytes - start)):
                return

    return touch


def _populate(address: int, nbytes: int) -> bool:
    """Whether the system has populated the range; its content stays as it is."""
    return all(
        _libc.madvise(
            ctypes.c_void_p(address + start),
            ctypes.c_size_t(min(_STEP_BYTES, nbytes - start)),
            _MADV_POPULATE_WRITE,
        )
        == 0
        for start in range(0, nbytes, _STEP_BYTES)
    )
