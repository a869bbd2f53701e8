"""Which catalog governs a root: ``catalogs/<epoch>.json``, of which the highest epoch wins (spec/catalog.md).

A catalog that is not the one says nothing about these bytes: through it nothing is committed and nothing is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ckptfmt.engine.marker import check_one_root
from ckptfmt.engine.site import Site
from ckptfmt.engine.verdicts import read_object
from ckptfmt.errors import CatalogBehind, Conflict, FormatError
from ckptfmt.format import layout, verdict
from ckptfmt.ports.backend import Backend
from ckptfmt.ports.catalog import Catalog

Location = Literal["embedded", "external"]


def governing_claim(backend: Backend) -> verdict.CatalogClaim | None:
    """The claim of the highest epoch, None for a root that no catalog governs yet. ``FormatError`` if it is damaged."""
    epochs = _epochs(backend)
    return _read(backend, epochs[max(epochs)]) if epochs else None


@dataclass(frozen=True)
class Claims:
    """All claims of a root, as far as they can be read."""

    highest: int
    """0: there is none."""
    readable: Mapping[int, verdict.CatalogClaim]
    damaged: bool = False
    """There are claims that cannot be read."""

    @property
    def governing(self) -> verdict.CatalogClaim | None:
        """None also where the highest one is damaged."""
        return self.readable.get(self.highest)

    def catalogs(self) -> frozenset[str]:
        """Every catalog that ever governed the root."""
        return frozenset(claim.catalog for claim in self.readable.values())


def all_claims(backend: Backend) -> Claims:
    """Read every claim; damaged ones only count."""
    readable = {}
    epochs = _epochs(backend)
    for epoch, key in epochs.items():
        try:
            readable[epoch] = _read(backend, key)
        except FormatError:
            continue
    return Claims(max(epochs, default=0), readable, damaged=len(readable) < len(epochs))


def claim_epoch(backend: Backend, claim: verdict.CatalogClaim) -> None:
    """Let a catalog govern the root from an epoch on. ``Conflict`` if another one has claimed that epoch."""
    backend.make_folder(layout.CATALOGS)
    backend.create(layout.catalog_claim(claim.epoch), verdict.encode_claim(claim))


def check_governs(site: Site, catalog: Catalog, claim: verdict.CatalogClaim | None) -> None:
    """Raise unless ``catalog`` is the one that governs this root by ``claim``; one without a claim awaits its first.

    ``CatalogBehind`` if it governed an earlier epoch, ``Conflict`` if it is another one.
    """
    if claim is None:
        return
    check_one_root(site.backend, site.repository, claim)
    backend, identity = site.backend, catalog.identity()
    if claim.catalog != identity.uuid:
        raise Conflict(
            f"{backend.url} is governed by catalog {claim.catalog} (epoch {claim.epoch}), but {catalog.url} is catalog "
            f"{identity.uuid} (epoch {identity.epoch}); pass the catalog that governs it, or read what storage proves "
            'with mode="r", catalog="none". If that catalog is lost: `ckptfmt db rebuild`; if this root is a copy of '
            "another: `ckptfmt db adopt`",
            kind="catalog_stranger",
        )
    if claim.epoch > identity.epoch:
        raise CatalogBehind(
            f"{backend.url} is governed by epoch {claim.epoch} of its catalog, but {catalog.url} is of epoch "
            f"{identity.epoch}: an older copy of it was put back, or a rebuild did not come to its end; run "
            f'`ckptfmt db rebuild --merge {backend.url}`, or read what storage proves with mode="r", catalog="none"'
        )


def claim_missing(site: Site, catalog: Catalog, claim: verdict.CatalogClaim | None, *, location: Location) -> None:
    """Make the claim that a catalog lacks which governs by ``claim``: the first one of a root, or that of a later
    epoch, where a catalog of several repositories was rebuilt for another one of them.

    As ``check_governs`` if another catalog is quicker.
    """
    identity = catalog.identity()
    if claim is not None and claim.epoch >= identity.epoch:
        return
    mine = verdict.CatalogClaim(
        repository=site.repository, catalog=identity.uuid, epoch=identity.epoch, location=location
    )
    claim_epoch(site.backend, mine)
    check_governs(site, catalog, governing_claim(site.backend))


def require_governing(site: Site) -> None:
    """Before anything is deleted: is the catalog still the one that governs? It may have been rebuilt since it was
    opened. Makes no claim."""
    check_governs(site, site.sql(), governing_claim(site.backend))


def _epochs(backend: Backend) -> dict[int, str]:
    found = (
        (layout.parse_catalog_claim(info.key.rpartition("/")[2]), info.key) for info in backend.list(layout.CATALOGS)
    )
    return {epoch: key for epoch, key in found if epoch is not None}


def _read(backend: Backend, key: str) -> verdict.CatalogClaim:
    return read_object(backend, key, verdict.decode_claim)
