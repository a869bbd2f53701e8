"""What happens to checkpointers at interpreter exit: nothing in flight is dropped, and no failure stays silent.

Save threads are not daemons, so the interpreter has waited for them before this runs.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Iterator
from typing import NoReturn, Protocol

log = logging.getLogger("ckptfmt")

FAILURE_STATUS = 1


@contextlib.contextmanager
def body_first(error: BaseException | None) -> Iterator[None]:
    """Close something at the end of a ``with`` block: the body's own exception stays the one that is raised."""
    try:
        yield
    except BaseException as failure:
        if error is None:
            raise
        note = f"in addition, a checkpoint save failed: {failure}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        log.error("a checkpoint save failed while %s was being raised: %s", type(error).__name__, failure)


class Closable(Protocol):
    def close(self, timeout: float | None = None) -> None: ...


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_registered_pid = 0


def register(checkpointer: Closable) -> None:
    """Close ``checkpointer`` at exit unless it was closed before."""
    global _registered_pid
    _open.add(checkpointer)
    if _registered_pid != os.getpid():
        _registered_pid = os.getpid()
        atexit.register(_close_all, _registered_pid)


def forget(checkpointer: Closable) -> None:
    _open.discard(checkpointer)


def _close_all(pid: int) -> None:
    if os.getpid() != pid:
        return
    failed = False
    for checkpointer in list(_open):
        try:
            checkpointer.close()
        except BaseException as error:
            failed = True
            print(f"ckptfmt: a save failed and nobody had looked at its outcome: {error}", file=sys.stderr)
    if failed:
        end_now(FAILURE_STATUS)  # a handler cannot change the exit status otherwise, and status 0 would say "saved"


def end_now(status: int) -> NoReturn:
    """End this process without the rest of the interpreter's shutdown; what was printed and logged goes out first."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
