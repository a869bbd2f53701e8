"""``ckptfmt.json``: the first object of a root, which tells a repository from a generation's folder."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from ckptfmt.engine.verdicts import read_object
from ckptfmt.errors import Conflict, Corrupt, InvalidInput, NotFound
from ckptfmt.format import layout, verdict
from ckptfmt.ports.backend import Backend


def read_marker(backend: Backend) -> verdict.Marker | None:
    """The marker of a root; None if it has none."""
    try:
        return read_object(backend, layout.MARKER, verdict.decode_marker)
    except NotFound:
        return None


def require_marker(backend: Backend) -> verdict.Marker:
    """The marker of a root that must have one: ``NotFound``."""
    found = read_marker(backend)
    if found is None:
        raise NotFound(f"{backend.url} is no ckptfmt repository; check the path")
    return found


def is_generation_folder(backend: Backend) -> bool:
    """Whether the root is one generation's folder by itself, wherever it was copied to."""
    try:
        backend.head(layout.COMMIT)
    except NotFound:
        return False
    return True


def create_marker(backend: Backend) -> verdict.Marker:
    """Make the marker of a new root, or return that of who was quicker. ``Corrupt`` if what was saved lost its own."""
    if is_generation_folder(backend):
        raise InvalidInput(f"{backend.url} is a generation's folder: open its repository to write")
    if backend.list(layout.CATALOGS) or backend.list_folders(layout.RUNS):
        # The marker is the first object of a root. Another uuid would disown all that lies there.
        found = read_marker(backend)
        if found is not None:  # another process made it all a moment ago
            return found
        raise Corrupt(
            f"{backend.url}: {layout.MARKER} is gone, but the root holds what was saved; put it back from a copy",
            object=layout.MARKER,
        )
    new = verdict.Marker(repository=str(uuid.uuid4()), created_at=verdict.timestamp(datetime.now(UTC)))
    try:
        backend.create(layout.MARKER, verdict.encode_marker(new))
    except Conflict:  # another process made it a moment ago
        found = read_marker(backend)
        if found is None:
            raise
        return found
    return new


def check_one_root(backend: Backend, repository: str, claim: verdict.CatalogClaim | None) -> None:
    """Raise ``Conflict`` unless the claim is of the repository that the marker tells."""
    if claim is not None and claim.repository != repository:
        raise Conflict(
            f"{backend.url}: {layout.MARKER} says repository {repository}, "
            f"{layout.catalog_claim(claim.epoch)} says {claim.repository}: two roots were mixed; put the right object "
            "back from a copy"
        )
