"""Catalog URLs: how they are shown, and which file or which server's database one names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

from ckptfmt.errors import InvalidInput

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

SQLITE_DRIVERS = ("sqlite", "sqlite+pysqlite")
POSTGRES_DRIVERS = ("postgresql", "postgresql+psycopg")
FORMS: Final = "sqlite:////absolute/path.sqlite or postgresql://user@host/database"
"""What the URL of a catalog looks like, for messages."""
# The usual URL is read here: SQLAlchemy, which reads all others, takes longer to import than a listing takes.
_FILE: Final = re.compile(r"(?P<driver>sqlite(\+pysqlite)?):///(?P<path>[^?]+)")
# What libpq keeps secret, of every version (https://www.postgresql.org/docs/current/libpq-connect.html).
_SECRETS: Final = re.compile(
    r"([?&](?:password|sslpassword|scram_client_key|scram_server_key|oauth_client_secret)=)[^&]*", re.IGNORECASE
)


def sqlite_url(path: Path) -> str:
    """Return the URL of a catalog file, as ``display`` shows it."""
    return f"sqlite:///{_quoted(str(path))}"


def display(url: str) -> str:
    """Return the URL without its password."""
    file = _FILE.fullmatch(url)
    if file is not None:
        return f"{file['driver']}:///{_quoted(unquote(file['path']))}"
    if is_postgres(url):
        return _without_secrets(url)
    return _SECRETS.sub(r"\1***", parse(url).render_as_string(hide_password=True))


def _without_secrets(url: str) -> str:
    driver, separator, rest = url.partition("://")
    if not separator:
        driver, rest = "", url
    # Up to the last @: a password that was not quoted must not be shown either. One in the options may hold an @, too.
    login, at, place = _SECRETS.sub(r"\1***", rest).rpartition("@")
    user, colon, _ = login.partition(":")
    return f"{driver}{separator}{user}{':***' if colon else ''}{at}{place}"


def parse(url: str) -> URL:
    """Read a catalog URL; ``InvalidInput`` if it is none."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url)
    except (ArgumentError, ValueError):  # ValueError: a port that is no number; the text of either may hold a password
        raise InvalidInput(f"{_without_secrets(url)!r} is not a catalog URL: use {FORMS}") from None


def is_postgres(url: str) -> bool:
    driver, separator, _ = url.partition("://")
    return bool(separator) and driver in POSTGRES_DRIVERS


def postgres_uri(url: str) -> str:
    """What libpq calls the database of a ``postgresql:`` URL."""
    return f"postgresql://{url.split('://', 1)[1]}"


def sqlite_path(url: str) -> Path:
    """Return the absolute path of a ``sqlite:`` URL; ``InvalidInput`` for anything else."""
    file = _FILE.fullmatch(url)
    database = unquote(file["path"]) if file is not None else _parsed_path(url)
    if not database or database == ":memory:" or database.startswith("file:"):
        raise InvalidInput(
            f"{display(url)!r} names no file: a catalog outlives its process, use sqlite:////absolute/path.sqlite"
        )
    if "\0" in database:
        raise InvalidInput(f"{url!r} names no file: a path holds no NUL character (%00)")
    return Path(database).absolute()


def _parsed_path(url: str) -> str | None:
    parsed = parse(url)
    if parsed.drivername not in SQLITE_DRIVERS:
        raise InvalidInput(
            f"the catalog {display(url)} needs the driver {parsed.drivername!r}, which this version of ckptfmt "
            f"does not have: use {FORMS}"
        )
    if parsed.query and parsed.database:
        raise InvalidInput(f"{display(url)!r}: a SQLite catalog takes no options ({', '.join(parsed.query)})")
    return parsed.database


def _quoted(path: str) -> str:
    """As SQLAlchemy quotes the path of a URL."""
    return quote(path, safe=" +/")
