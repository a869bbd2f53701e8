"""What reading a generation has led to: which tier gave how many bytes, and what was wrong with which object."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ckptfmt.engine.reports import GenerationInfo, Problem, ReadFrom
from ckptfmt.engine.site import Site
from ckptfmt.engine.tiers import Tier
from ckptfmt.errors import CatalogError, CkptError, NotFound

log = logging.getLogger("ckptfmt")


@dataclass(frozen=True)
class Mark:
    """A moment of a ``ReadLog``."""

    nbytes: Counter[str]
    retries: int


@dataclass(frozen=True)
class Reading:
    """What came from where since a moment."""

    sources: tuple[ReadFrom, ...]
    damaged: tuple[Problem, ...]
    """Also what was found before: from there nothing is read any more while another place has it."""
    retries: int


class ReadLog:
    """Thread-safe. Of each object the first thing wrong with it is told, once."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers
        self._lock = threading.Lock()
        self._nbytes: Counter[str] = Counter()
        self._retries = 0
        self._problems: dict[tuple[str, str], Problem] = {}
        self._noted = 0

    def read(self, tier: Tier, nbytes: int) -> None:
        with self._lock:
            self._nbytes[tier.uuid] += nbytes

    def read_again(self, tier: Tier, error: CkptError, times: int) -> None:
        """A chunk was right only when it was read once more."""
        with self._lock:
            first = not self._retries
            self._retries += times
        if first:
            log.warning("%s: right when it was read once more, so damaged on its way: %s", tier.name, error)

    def wrong(self, tier: Tier, key: str, error: CkptError, *, moved_on: bool) -> None:
        """An object could not be read, or not with the right bytes. A tier other than the durable one may lack any."""
        if isinstance(error, NotFound) and tier.role != "durable":
            log.debug("%s: not there: %s", tier.name, error)
            return
        problem = Problem(
            error.kind,
            key,
            str(error),
            tensor=getattr(error, "tensor", None),
            offset=getattr(error, "offset", None),
            tier=tier.backend.url,
        )
        with self._lock:
            told = (tier.uuid, key) in self._problems
            self._problems.setdefault((tier.uuid, key), problem)
        if moved_on and not told:
            log.warning("%s: %s is read from another place: %s", tier.name, key, error)

    def mark(self) -> Mark:
        with self._lock:
            return Mark(self._nbytes.copy(), self._retries)

    def since(self, mark: Mark) -> Reading:
        """What happened since then, by all threads."""
        with self._lock:
            sources = tuple(
                ReadFrom(tier.role, tier.backend.url, nbytes)
                for tier in self._tiers
                if (nbytes := self._nbytes[tier.uuid] - mark.nbytes[tier.uuid])
            )
            return Reading(sources, tuple(self._problems.values()), self._retries - mark.retries)

    def note(self, site: Site, info: GenerationInfo) -> None:
        """Leave an event in the catalog for each object that was found damaged, or gone, since the last time."""
        if site.catalog is None or site.read_only:
            return
        with self._lock:
            new, self._noted = list(self._problems.values())[self._noted :], len(self._problems)
        for problem in new:
            detail = {
                "object": problem.object,
                "tier": problem.tier,
                "problem": problem.kind,
                "tensor": problem.tensor,
                "offset": problem.offset,
            }
            try:
                site.catalog.note(info.run, generation_id=info.id, kind="damage", detail=detail)
            except CatalogError as error:
                log.warning("%s: the damage is not noted in the catalog: %s", problem.object, error)
