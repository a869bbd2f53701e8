"""The places beside the durable one, as far as the catalog has heard of them. No run's lock: rows only say what is."""

from __future__ import annotations

from ckptfmt.catalog.free_text import kept, storable
from ckptfmt.catalog.queries import tiers as queries
from ckptfmt.catalog.transaction import NOW, Transaction
from ckptfmt.errors import CatalogError, Conflict, InvalidInput, NotFound
from ckptfmt.ports.records import TierRecord, TierRole


def ensure(tx: Transaction, uuid: str, *, role: TierRole, url: str, host: str | None) -> TierRecord:
    """Note the tier, or where it is now; one that was forgotten begins anew."""
    if role == "stage" and not host:
        raise InvalidInput(f"the stage {url} is of no host: name the one that it is local to")
    standing = queries.find(tx.session, tx.repository_id, uuid)
    if standing is None:
        # Two processes may come first at once: neither may fail.
        values = {"repository_id": tx.repository_id, "uuid": uuid, "role": role, "url": url, "host": host}
        tx.insert_if_absent("tiers", **values, created_at=NOW)
        standing = queries.find(tx.session, tx.repository_id, uuid)
    if standing is None:
        raise CatalogError(f"the catalog {tx.url} lost the tier {uuid} as it was written: run `ckptfmt db check`")
    found, forgotten = standing
    if (found.role, found.host) != (role, kept(host)):
        raise Conflict(
            f"the tier {uuid} at {url} is known as a {_told(found.role, found.host)}, not as a {_told(role, host)}: "
            "its mark, tier.json, belongs to another place",
            kind="tier_differs",
        )
    if forgotten:
        _drop_all(tx, found.id)
    if forgotten or found.url != storable(url):
        tx.update("tiers", "id = :id", {"url": url, "forgotten_at": None}, id=found.id)
    return TierRecord(found.id, found.uuid, found.role, storable(url), found.host, found.created_at)


def forget(tx: Transaction, uuid: str) -> None:
    """Drop what the tier held, and leave it out from now on. Idempotent."""
    standing = queries.find(tx.session, tx.repository_id, uuid)
    if standing is None:
        raise NotFound(f"the catalog {tx.url} knows no tier {uuid}: see `ckptfmt replicate` for those that it knows")
    found, forgotten = standing
    if not forgotten:
        tx.update("tiers", "id = :id", {"forgotten_at": NOW}, id=found.id)
        _drop_all(tx, found.id)


def id_of(tx: Transaction, uuid: str) -> int:
    """Of a tier that is in use; ``NotFound`` else."""
    standing = queries.find(tx.session, tx.repository_id, uuid)
    if standing is None or standing[1]:
        raise NotFound(f"the catalog {tx.url} knows no tier {uuid}: open the repository with it for writing first")
    return standing[0].id


def _drop_all(tx: Transaction, tier_id: int) -> None:
    for table in ("replicated_generations", "replicas"):
        tx.session.execute(f"DELETE FROM {table} WHERE tier_id = :tier", tier=tier_id)


def _told(role: str, host: str | None) -> str:
    return role if host is None else f"{role} of host {host}"
