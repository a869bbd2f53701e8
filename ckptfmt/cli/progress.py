"""A progress bar with a rate, on standard error, where a person looks at it."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from ckptfmt.cli import quantities as q
from ckptfmt.cli.output import is_terminal

if TYPE_CHECKING:
    from ckptfmt.engine.keep.verify import Progress
    from ckptfmt.exchange.counting import Phases

EVERY_SECONDS = 0.1
_BAR = 24


@contextmanager
def progress_bar(label: str) -> Iterator[Progress | None]:
    """Yield ``progress(done, total)`` in bytes, safe to call from any thread; None if stderr is no terminal."""
    if not is_terminal(sys.stderr):
        yield None
        return
    bar = _Bar(label)
    try:
        yield bar.update
    finally:
        bar.erase()


def progress_bars(arguments: Namespace) -> Phases:
    """A bar for each phase of a command, by its label; none with ``--json``, which programs read."""
    return (lambda label: nullcontext()) if arguments.as_json else progress_bar


class _Bar:
    def __init__(self, label: str) -> None:
        self._label = label
        self._began = time.monotonic()
        self._drawn = 0.0
        self._lock = threading.Lock()

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._drawn < EVERY_SECONDS and done < total:
                return
            self._drawn = now
            sys.stderr.write(f"\r\x1b[2K{self._text(done, total, now - self._began)}")
            sys.stderr.flush()

    def _text(self, done: int, total: int, seconds: float) -> str:
        part = done / total if total else 1.0
        filled = round(part * _BAR)
        left = seconds * (1 - part) / part if part > 0 else None
        text = (
            f"{self._label} [{'#' * filled}{'.' * (_BAR - filled)}] {part:4.0%}  {q.size(done)} of {q.size(total)}  "
            f"{q.rate(done, seconds)}  {q.duration(left)} left"
        )
        return text[: shutil.get_terminal_size().columns - 1]

    def erase(self) -> None:
        with self._lock:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
