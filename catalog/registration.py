"""The repositories that a catalog knows."""

from __future__ import annotations

from ckptfmt.catalog.snapshot import Session

# Two processes may open a new repository at once: neither may fail.
_ADD = "INSERT INTO repositories (uuid, url, created_at) VALUES (:uuid, :url, {now}) ON CONFLICT DO NOTHING"
_MOVE = "UPDATE repositories SET url = :url WHERE uuid = :uuid AND url <> :url"


def register(session: Session, repository: str, display_url: str) -> None:
    """Add the repository, or note where it has moved to: the URL is for display only."""
    if not session.execute(_ADD, uuid=repository, url=display_url):
        session.execute(_MOVE, uuid=repository, url=display_url)
