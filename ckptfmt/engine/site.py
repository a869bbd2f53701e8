"""A repository's parts, as the engine is handed them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptfmt.engine.tiers import Tiers
from ckptfmt.ports.backend import Backend
from ckptfmt.ports.catalog import Catalog


@dataclass(frozen=True)
class Site:
    """One repository: its uuid and durable tier, with the catalog where one is open (None: reading by proof)."""

    repository: str
    backend: Backend
    catalog: Catalog | None
    read_only: bool = False
    tiers: Tiers = field(default_factory=Tiers)
    """Beside the durable one, where some were opened."""
    bytes_max: int | None = None
    """Of the packs of all generations that are not deleted."""

    def sql(self) -> Catalog:
        """The catalog, for callers that only exist where there is one."""
        if self.catalog is None:
            raise AssertionError("this operation needs a catalog")  # a bug: the front refuses it earlier
        return self.catalog
