"""The schema revision that this library needs, comparable without importing alembic."""

from __future__ import annotations

from typing import Final

from ckptfmt.catalog.snapshot import Snapshot
from ckptfmt.errors import CatalogError

VERSION_TABLE: Final = "ckptfmt_alembic_version"
HEAD: Final = "0003"
"""The newest revision under ``migrations/versions``. Revisions are numbers of four digits."""


def stored_revision(snapshot: Snapshot, url: str) -> str | None:
    """Return the database's revision, None for an empty database.

    Raises ``CatalogError`` for a database that belongs to something else.
    """
    names = snapshot.table_names()
    if VERSION_TABLE not in names:
        if names:
            raise CatalogError(
                f"the database {url} holds tables of something else ({', '.join(names[:3])}, ...) and no "
                "ckptfmt catalog; it was left alone: name another database",
                kind="catalog_foreign",
            )
        return None
    found = [version for (version,) in snapshot.rows(f"SELECT version_num FROM {VERSION_TABLE}")]
    if not found:
        return None
    if len(found) != 1 or not (len(found[0]) == 4 and found[0].isdigit()):
        raise CatalogError(
            f"the catalog {url} has the schema revision {', '.join(found)!r}, which is none of ckptfmt's: "
            "restore the last `ckptfmt db backup`",
            kind="catalog_foreign",
        )
    return str(found[0])


def require_head(revision: str | None, url: str) -> None:
    """Raise ``CatalogError`` unless ``revision`` is the one that this library needs."""
    if revision == HEAD:
        return
    if revision is None:
        raise CatalogError(
            f"the database {url} holds no catalog: `ckptfmt db upgrade {url}` makes an empty one; what was lost comes "
            "back with `ckptfmt db rebuild`",
            kind="catalog_older",
        )
    if revision < HEAD:
        raise CatalogError(
            f"the catalog {url} has schema revision {revision}, this library needs {HEAD}: "
            f"run `ckptfmt db upgrade {url}`",
            kind="catalog_older",
        )
    raise CatalogError(
        f"the catalog {url} has schema revision {revision}, newer than {HEAD} of this library: upgrade ckptfmt",
        kind="catalog_newer",
    )
