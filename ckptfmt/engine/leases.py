"""How long a launch may stay silent before another one takes its run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from ckptfmt.errors import CatalogError
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import LaunchRecord

log = logging.getLogger("ckptfmt")

LEASE_SECONDS: Final = 30.0
RENEW_SECONDS: Final = LEASE_SECONDS / 6


def renewal(catalog: Catalog, launch: LaunchRecord) -> Callable[[], None]:
    """What keeps the lease of a launch that has no heartbeat yet. ``Fenced`` once a newer launch has the run."""

    def renew() -> None:
        try:
            catalog.renew_lease(launch.id, lease_seconds=LEASE_SECONDS)
        except CatalogError as error:  # the fence decides at the next transition, not the lease
            log.warning("the lease of run %r could not be renewed: %s", launch.run, error)

    return renew
