"""``tier.json``: whose a stage or a replica is. A place without the right mark is not used."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Literal

from ckptfmt.engine import governing
from ckptfmt.engine.marker import read_marker
from ckptfmt.engine.verdicts import read_object
from ckptfmt.errors import Conflict, NotFound
from ckptfmt.format import layout, verdict
from ckptfmt.ports.backend import Backend

MarkedRole = Literal["stage", "replica"]


def read_mark(backend: Backend) -> verdict.TierMark | None:
    """The mark of a tier; None if it has none."""
    try:
        return read_object(backend, layout.TIER, verdict.decode_tier_mark)
    except NotFound:
        return None


def ensure_mark(backend: Backend, *, role: MarkedRole, repository: str, host: str | None) -> verdict.TierMark:
    """The mark of a tier, made if there is none. ``Conflict`` if it is another repository's, role's or host's."""
    found = read_mark(backend)
    if found is None:
        new = verdict.TierMark(
            tier=str(uuid.uuid4()),
            role=role,
            repository=repository,
            host=host,
            created_at=verdict.timestamp(datetime.now(UTC)),
        )
        try:
            backend.create(layout.TIER, verdict.encode_tier_mark(new))
        except Conflict:  # another rank was quicker
            found = read_mark(backend)
            if found is None:
                raise
        else:
            return new
    check_mark(backend, found, role=role, repository=repository, host=host)
    return found


def check_mark(
    backend: Backend, mark: verdict.TierMark, *, role: MarkedRole, repository: str, host: str | None
) -> None:
    """``Conflict`` unless the mark says that the place has this role for this repository, a stage for this host."""
    if (mark.repository, mark.role) != (repository, role):
        raise Conflict(
            f"{backend.url} cannot be the {role} of repository {repository}: its {layout.TIER} says that it is the "
            f"{mark.role} of repository {mark.repository}; give another place",
            kind="tier_differs",
        )
    if role == "stage" and mark.host != host:
        raise Conflict(
            f"{backend.url} is the stage of host {mark.host}, this is {host}: give a folder on a disk of this host; "
            f"if that host is now called {host}, remove {layout.TIER} there",
            kind="tier_differs",
        )


def refuse_replica(backend: Backend) -> None:
    """``Conflict`` if this root is the replica of another one, through whose catalog nobody may write here."""
    mark = read_mark(backend)
    if mark is not None:
        raise Conflict(
            f"{backend.url} is the {mark.role} of a repository that is elsewhere: open that one for writing. If it is "
            f"lost, `ckptfmt db adopt {backend.url}` makes this a repository of its own",
            kind="copied_root",
        )


def ensure_replica(durable: Backend, replica: Backend, *, repository: str) -> verdict.TierMark:
    """The mark of a replica, made if there is none, after copies of the objects of the root: it opens by proof when the
    durable tier is lost. ``Conflict`` if the place is, or belongs to, another repository."""
    found = read_mark(replica)
    if found is not None:
        check_mark(replica, found, role="replica", repository=repository, host=None)
    marker = read_marker(replica)
    if marker is not None and marker.repository != repository:
        raise Conflict(
            f"{replica.url} cannot be a replica of repository {repository}: it is repository {marker.repository}; give "
            "another place",
            kind="tier_differs",
        )
    claims = governing.all_claims(durable).readable
    for claim in governing.all_claims(replica).readable.values():
        if claims.get(claim.epoch) != claim:
            raise Conflict(
                f"{replica.url} cannot be a replica of {durable.url}: it has a catalog of its own ({claim.catalog}, "
                f"epoch {claim.epoch}), so it was adopted; give another place",
                kind="tier_differs",
            )
    replica.create(layout.MARKER, durable.read(layout.MARKER, limit=verdict.BYTES_MAX))
    replica.make_folder(layout.CATALOGS)
    for claim in claims.values():
        replica.create(layout.catalog_claim(claim.epoch), verdict.encode_claim(claim))
    return ensure_mark(replica, role="replica", repository=repository, host=None)
