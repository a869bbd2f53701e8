"""Which objects of a tier stand in for damaged ones beside them: what ``repair-<digest>.json`` tells."""

from __future__ import annotations

import logging
import threading

from ckptfmt.engine.tiers import Tier
from ckptfmt.engine.verdicts import read_object
from ckptfmt.errors import BackendError, FormatError, NotFound
from ckptfmt.format import layout, verdict
from ckptfmt.ports.backend import Backend

log = logging.getLogger("ckptfmt")


def repairs_in(backend: Backend, folder: str) -> dict[str, tuple[str, ...]]:
    """Name of a damaged object -> names of those that were written for it, in the folder of a generation.

    A repair that cannot be read is passed over: what it named is damaged still.
    """
    found: dict[str, tuple[str, ...]] = {}
    for info in backend.list(folder):
        name = info.key[len(folder) + 1 :] if folder else info.key
        if not layout.is_repair(name):
            continue
        try:
            repair = read_object(backend, info.key, verdict.decode_repair)
        except (FormatError, NotFound) as error:
            log.warning("%s is passed over: %s", info.key, error)
            continue
        for damaged, new in repair.packs.items():
            found[damaged] = (*found.get(damaged, ()), new)
    return found


class Repairs:
    """The repairs of tiers, looked up once for each folder. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {}

    def of(self, tier: Tier, key: str) -> tuple[str, ...]:
        """Keys of the objects on ``tier`` that stand in for ``key``; none where the tier cannot be asked."""
        folder, _, name = key.rpartition("/")
        with self._lock:
            found = self._found.get((tier.uuid, folder))
            if found is None:
                try:
                    found = repairs_in(tier.backend, folder)
                except BackendError as error:
                    log.info("%s: no repairs are looked for: %s", tier.name, error)
                    found = {}
                self._found[tier.uuid, folder] = found
        return tuple(f"{folder}/{new}" if folder else new for new in found.get(name, ()))

    def forget(self) -> None:
        """Look again next time."""
        with self._lock:
            self._found.clear()
