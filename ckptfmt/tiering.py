"""Opening the tiers beside the durable one: what the user gave, marked and checked (spec/tiers.md)."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ckptfmt import connect
from ckptfmt.errors import BackendError, CatalogError, CkptError, Conflict, InvalidInput
from ckptfmt.policy import check_bytes_max

if TYPE_CHECKING:
    from ckptfmt.engine.site import Site
    from ckptfmt.engine.tiers import Tier
    from ckptfmt.format.verdict import TierMark
    from ckptfmt.ports.backend import Backend
    from ckptfmt.ports.catalog import Catalog

log = logging.getLogger("ckptfmt")

Place = str | os.PathLike[str] | Mapping[str, Any]
"""A path, a URL, or a mapping with ``url`` and more."""


@dataclass(frozen=True)
class TierOrder:
    """What ``open`` was told of tiers and bounds."""

    stage: Place | None = None
    replicas: Sequence[Place] = ()
    durable_on: int = 1
    bytes_max: int | None = None
    bandwidth_max: int | None = None

    def __post_init__(self) -> None:
        if type(self.durable_on) is not int or not 1 <= self.durable_on <= 1 + len(self.replicas):
            raise InvalidInput(
                f"durable_on={self.durable_on!r}: give 1 (the durable tier alone) up to {1 + len(self.replicas)} (with "
                "all replicas)"
            )
        check_bytes_max(self.bytes_max)


NO_TIERS: Final = TierOrder()


def with_tiers(connection: connect.Connection, order: TierOrder) -> connect.Connection:
    """``connection`` with its tiers opened; it is closed if one of them cannot be used."""
    if order == NO_TIERS:
        return connection
    try:
        site = _tiered(connection.site, order)
    except BaseException:
        connection.close()
        raise
    return dataclasses.replace(connection, site=site)


def _tiered(site: Site, order: TierOrder) -> Site:
    from ckptfmt.engine.limiter import Limiter
    from ckptfmt.engine.tiers import Tiers

    if not site.repository:
        raise InvalidInput(f"{site.backend.url} is a generation's folder: it has no tiers")
    limiter = None if order.bandwidth_max is None else Limiter(order.bandwidth_max)
    with ExitStack() as opened:  # those before one that cannot be used are closed
        stage = None if order.stage is None else _stage(site, order.stage)
        if stage is not None:
            opened.callback(stage.backend.close)
        replicas = []
        for given in order.replicas:
            tier = _replica(site, given, needed=order.durable_on > 1)
            if tier is not None:
                opened.callback(tier.backend.close)
                replicas.append(tier)
        tiers = Tiers(stage, tuple(replicas), order.durable_on, limiter)
        if site.catalog is not None and not site.read_only:
            for tier in tiers.every():
                _note(site.catalog, tier)
        opened.pop_all()
    return dataclasses.replace(site, tiers=tiers, bytes_max=order.bytes_max)


def _note(catalog: Catalog, tier: Tier) -> None:
    from ckptfmt.ports.catalog import UNWRITABLE

    try:
        catalog.ensure_tier(tier.uuid, role=tier.role, url=tier.backend.url, host=tier.host)
    except CatalogError as error:
        if error.kind not in UNWRITABLE:
            raise
        log.warning("%s is not noted in the catalog: %s", tier.name, error)


def _stage(site: Site, given: Place) -> Tier | None:
    """The stage of this host. Read-only, one that is not there, or not ours, is none."""
    from ckptfmt.engine import process
    from ckptfmt.engine.tiers import Tier

    options = _options("stage", given)
    url, keep, bytes_max = options["url"], options.get("keep", 1), options.get("bytes_max")
    if type(keep) is not int or keep < 0:
        raise InvalidInput(f"stage: keep={keep!r}: give how many commits stay there, 0 or more")
    check_bytes_max(bytes_max)
    place = os.path.join(url, site.repository) if "://" not in url else url
    if place.startswith("file://"):
        place = f"{url.rstrip('/')}/{site.repository}"
    backend = connect.backend_for(place, options.get("storage_options"), create=not site.read_only)
    host = process.host_name()
    with connect.closed_on_error(backend):
        mark = _stage_mark(site, backend, host)
    if mark is None:
        backend.close()
        return None
    return Tier(mark.tier, "stage", backend, host, {"keep": keep, "bytes_max": bytes_max})


def _stage_mark(site: Site, backend: Backend, host: str) -> TierMark | None:
    from ckptfmt.engine import tier_marks

    if not site.read_only:
        return tier_marks.ensure_mark(backend, role="stage", repository=site.repository, host=host)
    try:
        mark = tier_marks.read_mark(backend)
        if mark is not None:
            tier_marks.check_mark(backend, mark, role="stage", repository=site.repository, host=host)
    except CkptError as error:
        log.warning("nothing is read from the stage: %s", error)
        return None
    return mark


def _replica(site: Site, given: Place, *, needed: bool) -> Tier | None:
    """A replica; None for one that cannot be used and is not ``needed``: no save and no restore fails for that."""
    from ckptfmt.engine.tiers import Tier

    options = _options("replica", given)
    try:
        backend = connect.backend_for(options["url"], options.get("storage_options"), create=not site.read_only)
        with connect.closed_on_error(backend):
            mark = _replica_mark(site, backend)
    except InvalidInput:
        raise
    except (BackendError, CkptError) as error:
        if needed or not (site.read_only or (isinstance(error, BackendError) and error.transient)):
            raise
        log.error("the replica %s is left out: %s", options["url"], error)
        return None
    return Tier(mark.tier, "replica", backend)


def _replica_mark(site: Site, backend: Backend) -> TierMark:
    from ckptfmt.engine import tier_marks
    from ckptfmt.engine.roots import is_same_place

    if is_same_place(backend.url, site.backend.url):
        raise InvalidInput(f"{backend.url} is the durable tier itself: give another place for a replica")
    if not site.read_only:
        return tier_marks.ensure_replica(site.backend, backend, repository=site.repository)
    mark = tier_marks.read_mark(backend)
    if mark is None:
        raise Conflict(f"{backend.url} is no replica: it has no mark", kind="tier_differs")
    tier_marks.check_mark(backend, mark, role="replica", repository=site.repository, host=None)
    return mark


_KNOWN = {"stage": ("url", "bytes_max", "keep", "storage_options"), "replica": ("url", "storage_options")}


def _options(what: str, given: Place) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        return {"url": os.fspath(given)}
    unknown = sorted(set(given) - set(_KNOWN[what]))
    if unknown or "url" not in given:
        named = ", ".join(map(str, given))
        raise InvalidInput(f"{what}: it has {named}; give url, and perhaps {', '.join(_KNOWN[what][1:])}")
    return {**given, "url": os.fspath(given["url"])}
