"""``db rebuild`` and ``db adopt``: which database it is about, whether it may be used, and the work itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ckptfmt import connect
from ckptfmt.catalog import repair
from ckptfmt.catalog.database import database_of
from ckptfmt.catalog.location import display
from ckptfmt.catalog.open import open_catalog
from ckptfmt.engine import governing
from ckptfmt.engine.keep.rebuild import Order, rebuild
from ckptfmt.engine.marker import require_marker
from ckptfmt.engine.reports import RebuildReport
from ckptfmt.engine.roots import is_same_catalog_file
from ckptfmt.engine.site import Site
from ckptfmt.errors import CatalogError, Conflict, InvalidInput
from ckptfmt.format import layout
from ckptfmt.ports.backend import Backend
from ckptfmt.ports.catalog import DAMAGED, Catalog

How = Literal["rebuild", "merge", "adopt"]


@dataclass(frozen=True)
class _Target:
    """The root and the database that is to govern it."""

    backend: Backend
    repository: str
    claims: governing.Claims
    url: str
    how: How

    @property
    def embedded(self) -> bool:
        return connect.is_embedded(self.backend, display(self.url))

    @property
    def root(self) -> str:
        return self.backend.url


def repair_catalog(
    url: str | os.PathLike[str],
    *,
    how: How,
    catalog: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> RebuildReport:
    """Rebuild the catalog of a root from storage (``rebuild``), bring one that is behind up to it (``merge``), or give
    a copied root a catalog of its own (``adopt``).

    ``Conflict`` while somebody else does the same, or a launch is live. After a crash the same call goes on.
    """
    backend = connect.backend_for(url, storage_options)
    try:
        marker = require_marker(backend)
        claims = governing.all_claims(backend)
        target = _Target(backend, marker.repository, claims, _database(backend, claims, catalog, how), how)
        with repair.exclusive(target.url):
            return _repair(target)
    finally:
        backend.close()


def _database(backend: Backend, claims: governing.Claims, given: str | None, how: How) -> str:
    if given is None and how != "adopt":
        given = os.environ.get(connect.CATALOG_VARIABLE) or None
    if given == connect.NO_CATALOG:
        raise InvalidInput(
            f'{backend.url}: "none" is no catalog that could be rebuilt; name a database, or none at all'
        )
    if given is not None:
        database_of(given)  # a URL that names no database is refused before anything is done
        return given
    claim = claims.governing
    if not backend.traits.local or (how != "adopt" and claim is not None and claim.location == "external"):
        raise InvalidInput(f"{backend.url} has no embedded catalog; name the one that is to govern it: --catalog URL")
    return connect.embedded_url(backend)


def _repair(target: _Target) -> RebuildReport:
    found = repair.condition(target.url)
    if target.how == "merge" and found.state != "sound":
        why = f": {found.why}" if found.why else ""
        raise CatalogError(
            f"the catalog {display(target.url)} is {found.state}{why}; rebuild it from storage alone with "
            f"`ckptfmt db rebuild {target.root}`",
            kind="catalog_missing" if found.state == "absent" else DAMAGED,
        )
    if found.state == "sound":
        _check_alone(target)
    # Also where there is no database: a journal that was left behind would be rolled back into the next one.
    aside = repair.set_aside(target.url) if found.state != "sound" else None
    sql = open_catalog(
        target.url, repository=target.repository, display_url=target.root, mode="w", create=target.how != "merge"
    )
    try:
        _check_usable(target, sql)
        return _run(target, sql, aside)
    finally:
        sql.close()


def _run(target: _Target, sql: Catalog, aside: str | None) -> RebuildReport:
    knows = bool(sql.runs())
    copied = target.how == "adopt" and knows
    order = Order(
        how=target.how,
        location="embedded" if target.embedded else "external",
        claims=target.claims,
        new_identity=copied,
        set_aside=aside,
        require_idle=not copied,
        blank=not knows,
    )
    report = rebuild(Site(target.repository, target.backend, sql), order)
    if target.how == "adopt":
        target.backend.delete(layout.TIER)  # it is no replica any more
    return report


def _check_alone(target: _Target) -> None:
    """A catalog of several repositories has ids of all of them: those of a lost one may be taken."""
    others = repair.other_repositories(target.url, target.repository)
    if others and target.how != "merge":
        raise InvalidInput(
            f"the catalog {display(target.url)} serves other repositories ({', '.join(others[:3])}): name a new "
            "database for this one, --catalog URL"
        )


def _check_usable(target: _Target, sql: Catalog) -> None:
    identity, claim = sql.identity(), target.claims.governing
    if target.how == "merge":
        claims = target.claims
        if claims.highest and not claims.damaged and identity.uuid not in claims.catalogs():
            raise Conflict(
                f"{sql.url} is catalog {identity.uuid}, which never governed {target.root}; name the one that did, or "
                f"rebuild from storage alone: `ckptfmt db rebuild {target.root}`",
                kind="catalog_stranger",
            )
        return
    if not sql.runs():
        return  # it is new, or knows no more than that the repository exists
    if target.how == "rebuild":
        unfinished = claim is not None and claim.catalog == identity.uuid and claim.epoch > identity.epoch
        if not unfinished:
            raise InvalidInput(
                f"the catalog {sql.url} is sound: there is nothing to rebuild. If it was put back from a copy: "
                f"`ckptfmt db rebuild --merge {target.root}`"
            )
        return
    if not target.embedded:
        raise Conflict(
            f"the catalog {sql.url} serves this repository at {sql.root_url()}: give the copy one of its own, by "
            "leaving out --catalog or with the URL of a new database",
            kind="copied_root",
        )
    if sql.root_url() != target.root and is_same_catalog_file(sql.root_url(), target.backend):
        raise Conflict(
            f"{sql.url} is the very file of {sql.root_url()}, by a link: put a copy of it in its place "
            "(`ckptfmt db backup`), or take the link away",
            kind="copied_root",
        )
