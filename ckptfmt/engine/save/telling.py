"""Telling how far a long copy is, now and then, to whoever looks at the catalog."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from ckptfmt.errors import CatalogError, Conflict
from ckptfmt.ports.coordination import Coordination
from ckptfmt.ports.records import GenerationRecord

log = logging.getLogger("ckptfmt")

_EVERY_SECONDS: Final = 2.0


class ProgressTeller:
    """Of one rank's copy to the durable tier. Called by the threads that copy; one of them at a time tells."""

    def __init__(self, coordination: Coordination, row: GenerationRecord, rank: int) -> None:
        self._coordination = coordination
        self._row = row
        self._rank = rank
        self._lock = threading.Lock()
        self._nbytes = 0
        self._tell_after = time.monotonic() + _EVERY_SECONDS
        self._ended: Conflict | None = None

    def add(self, nbytes: int) -> None:
        """So many bytes more are there."""
        with self._lock:
            self._nbytes += nbytes
            if time.monotonic() < self._tell_after:
                return
            self._tell_after = float("inf")
            there = self._nbytes
        try:
            self._coordination.progress(self._row, self._rank, there)
        except Conflict as error:
            self._ended = error
        except CatalogError as error:  # the next time will do
            log.debug("generation %d of run %r: progress is not told: %s", self._row.id, self._row.run, error)
        finally:
            with self._lock:
                self._tell_after = time.monotonic() + _EVERY_SECONDS

    def check(self) -> None:
        """Raise once it was answered that the generation is written no longer: nobody needs the rest."""
        if self._ended is not None:
            raise self._ended
