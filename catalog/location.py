"""Catalog URLs, and the sessions that serve them, by scheme."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from ckptfmt.errors import InvalidInput

SQLITE_DRIVERS = ("sqlite", "sqlite+pysqlite")


def display(url: str) -> str:
    """Return the URL without its password."""
    return parse(url).render_as_string(hide_password=True)


def parse(url: str) -> URL:
    """Read a catalog URL; ``InvalidInput`` if it is none."""
    try:
        return make_url(url)
    except ArgumentError as error:
        raise InvalidInput(f"{url!r} is not a catalog URL: use sqlite:////absolute/path.sqlite") from error


def sqlite_path(url: str) -> Path:
    """Return the absolute path of a ``sqlite:`` URL; ``InvalidInput`` for anything else."""
    parsed = parse(url)
    if parsed.drivername not in SQLITE_DRIVERS:
        raise InvalidInput(
            f"the catalog {display(url)} needs the driver {parsed.drivername!r}, which this version of ckptfmt "
            "does not have: use sqlite:////absolute/path.sqlite"
        )
    if not parsed.database or parsed.database == ":memory:" or parsed.database.startswith("file:"):
        raise InvalidInput(
            f"{url!r} names no file: a catalog outlives its process, use sqlite:////absolute/path.sqlite"
        )
    if parsed.query:
        raise InvalidInput(f"{url!r}: a SQLite catalog takes no options ({', '.join(parsed.query)})")
    return Path(parsed.database).absolute()
