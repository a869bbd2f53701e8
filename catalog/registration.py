"""The repositories that a catalog knows."""

from __future__ import annotations

from ckptfmt.catalog.queries import identity
from ckptfmt.catalog.snapshot import Session


def register(session: Session, repository: str, display_url: str) -> None:
    """Add the repository, or note where it has moved to: the URL is for display only."""
    if identity.repository(session, repository) is None:
        statement = "INSERT INTO repositories (uuid, url, created_at) VALUES (:uuid, :url, {now})"
    else:
        statement = "UPDATE repositories SET url = :url WHERE uuid = :uuid"
    session.execute(statement, uuid=repository, url=display_url)
