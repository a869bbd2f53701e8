"""Registering host memory with the CUDA driver, so that copies to and from devices are asynchronous and fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ckptfmt.errors import CkptError
from ckptfmt.torch.elements import address_of

PIECE_BYTES: Final = 1 << 30
"""Registering is quadratic or refused for very large ranges in some drivers, so it is done in pieces."""


def pin_host(memory: memoryview) -> Callable[[], None]:
    """Page-lock ``memory`` where this process uses CUDA. Returns the undo (may be called more than once).

    Raises ``CkptError`` of kind ``pin_failed`` with the driver's code; nothing stays registered then.
    """
    if not memory.nbytes or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return _nothing
    return register(memory, torch.cuda.cudart())  # type: ignore[no-untyped-call]


def register(memory: memoryview, cudart: Any, piece_bytes: int = PIECE_BYTES) -> Callable[[], None]:
    """Register ``memory`` piece by piece with the given runtime (``torch.cuda.cudart()``)."""
    start = address_of(memory)
    registered: list[int] = []

    def undo() -> None:
        failures = []
        while registered:
            address = registered.pop()
            code = int(cudart.cudaHostUnregister(address))
            if code:
                failures.append(f"0x{address:x}: code {code}")
        if failures:
            raise CkptError(f"cudaHostUnregister failed for {', '.join(failures)}", kind="unpin_failed")

    for offset in range(0, memory.nbytes, piece_bytes):
        size = min(piece_bytes, memory.nbytes - offset)
        code = int(cudart.cudaHostRegister(start + offset, size, 0))
        if code:
            undo()
            raise CkptError(
                f"cudaHostRegister of {size} bytes of host memory failed with CUDA error {code}; raise the limit on "
                "locked memory (ulimit -l) or save without pinned memory",
                kind="pin_failed",
            )
        registered.append(start + offset)
    return undo


def _nothing() -> None:
    pass
