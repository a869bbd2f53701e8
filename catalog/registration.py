"""The repositories that a catalog knows."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select, update

from ckptfmt.catalog.column_types import database_now
from ckptfmt.catalog.schema import repositories


def register(connection: Connection, repository: str, display_url: str) -> None:
    """Add the repository, or note where it has moved to: the URL is for display only."""
    known = select(repositories.c.id).where(repositories.c.uuid == repository)
    if connection.execute(known).scalar_one_or_none() is None:
        values = {"uuid": repository, "url": display_url, "created_at": database_now()}
        connection.execute(insert(repositories).values(values))
    else:
        connection.execute(update(repositories).where(repositories.c.uuid == repository).values(url=display_url))
