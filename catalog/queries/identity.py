"""Which catalog this is, what it calls a repository, and what time it is there."""

from __future__ import annotations

from datetime import datetime

from ckptfmt.catalog.clock import moment
from ckptfmt.catalog.snapshot import Row, Session, Snapshot
from ckptfmt.errors import CatalogError
from ckptfmt.ports.catalog import DAMAGED
from ckptfmt.ports.records import CatalogIdentity

_IDENTITY = "SELECT uuid, epoch FROM catalog_meta"


def identity(snapshot: Snapshot) -> CatalogIdentity:
    return _identity(snapshot.rows(_IDENTITY))


def locked(session: Session) -> CatalogIdentity:
    """The identity, its row locked until the transaction ends."""
    return _identity(session.rows(f"{_IDENTITY}{{locked}}"))


def _identity(found: list[Row]) -> CatalogIdentity:
    if len(found) != 1:
        raise CatalogError(
            "the catalog does not say who it is (table catalog_meta): run `ckptfmt db check`", kind=DAMAGED
        )
    return CatalogIdentity(*found[0])


def repository(snapshot: Snapshot, uuid: str) -> tuple[int, str] | None:
    """Id of the repository and where it was last opened for writing; None if the catalog does not know it."""
    found = snapshot.rows("SELECT id, url FROM repositories WHERE uuid = :uuid", uuid=uuid)
    return (found[0][0], found[0][1]) if found else None


def other_repositories(snapshot: Snapshot, uuid: str) -> list[str]:
    """Where the other repositories of this catalog are, by URL."""
    return [url for (url,) in snapshot.rows("SELECT url FROM repositories WHERE uuid <> :uuid ORDER BY url", uuid=uuid)]


def now(snapshot: Snapshot) -> datetime:
    ((value,),) = snapshot.rows("SELECT {now}")
    return moment(value)
