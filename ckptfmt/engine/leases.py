"""How long a launch may stay silent before another one takes its run, and the heartbeat that keeps it from that."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Final

from ckptfmt.engine.transfer import Heartbeat
from ckptfmt.errors import CatalogError, Conflict, Fenced, NotFound
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import LaunchRecord

log = logging.getLogger("ckptfmt")

LEASE_SECONDS: Final = 30.0


class Lease:
    """Keeps a launch alive and watches for the moment when it is fenced: from its beginning on, as what it does before
    its first save may take long. Only the coordinator's ``holds`` the lease: the others only have its beat."""

    def __init__(
        self,
        catalog: Catalog,
        launch: LaunchRecord,
        *,
        lease_seconds: float = LEASE_SECONDS,
        beat_seconds: float = LEASE_SECONDS / 6,
        holds: bool = True,
    ) -> None:
        self.launch = launch
        self.last_step: int | None = None
        self.fenced: Fenced | None = None
        self.on_beat: Callable[[], None] = lambda: None
        """Called at each beat as well, on its thread."""
        self._catalog = catalog
        self._lease_seconds = lease_seconds
        self._holds = holds
        self._pid = os.getpid()
        self._renew_after = 0.0
        self._heartbeat = Heartbeat(self._beat, seconds=beat_seconds, name="ckptfmt-lease")

    def _beat(self) -> None:
        if self._holds and time.monotonic() >= self._renew_after:
            self._renew_after = time.monotonic() + self._lease_seconds / 6
            self._renew()
        self.on_beat()

    def _renew(self) -> None:
        try:
            self._catalog.renew_lease(self.launch.id, lease_seconds=self._lease_seconds, last_step=self.last_step)
        except Fenced as error:
            self.lost(error)
        except NotFound as error:
            self.lost(Fenced(f"run {self.launch.run!r}: {error}"))
        except (CatalogError, Conflict) as error:
            # A missed beat is survivable: the fence decides at the next transition, not the lease.
            log.warning("the lease of run %r could not be renewed: %s", self.launch.run, error)

    def lost(self, error: Fenced) -> None:
        """A newer launch has taken the run, or the catalog does not know this one: no further save may begin."""
        if self.fenced is None:
            log.error("%s", error)
            self.fenced = error

    def check(self) -> None:
        """Raise ``Fenced`` if the run is lost to this launch."""
        if self.fenced is not None:
            raise self.fenced

    def confirm(self) -> None:
        """As ``check``, but the catalog is asked now."""
        self._renew()
        self.check()

    def close(self) -> None:
        """Stop the heartbeat and release the lease; in a forked child neither is ours."""
        if os.getpid() != self._pid:
            return
        self._heartbeat.stop()
        if not self._holds:
            return
        try:
            if self.last_step is not None and self.fenced is None:
                self._catalog.renew_lease(self.launch.id, lease_seconds=self._lease_seconds, last_step=self.last_step)
            self._catalog.close_launch(self.launch.id)
        except (CatalogError, Conflict) as error:
            log.warning("the lease of run %r was not released and will lapse by itself: %s", self.launch.run, error)
        except NotFound as error:
            log.warning("run %r: there is no lease to release: %s", self.launch.run, error)
