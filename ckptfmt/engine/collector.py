"""Holding Python's cyclic garbage collector back while tens of thousands of small objects are made at once.

Each of its passes walks every object of the process, the training's included, and finds nothing in ours: for a state of
20,000 tensors they cost more than the work itself.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holders = 0
_was_enabled = False


@contextmanager
def held_back() -> Iterator[None]:
    """No collection by itself inside the block; nested and concurrent blocks count. Afterwards it is as it was."""
    global _holders, _was_enabled
    with _lock:
        if _holders == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0 and _was_enabled:
                gc.enable()
