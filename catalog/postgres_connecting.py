"""How a connection with a PostgreSQL server is made, and for how long it is waited for.

- Nothing that a session would have to keep: behind pgbouncer, in transaction mode, the next transaction is another
  server process's. So settings are those of a transaction (``SET LOCAL``), and no statement is prepared.
- A peer that is gone is noticed by the kernel (keepalives while nothing is under way, ``tcp_user_timeout`` while
  something is); one that is there and does not answer, by the bound on every wait.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, Final, TypeVar

import psycopg
from psycopg import conninfo

from ckptfmt.catalog.location import display, postgres_uri
from ckptfmt.errors import CatalogError, InvalidInput

ANSWER_SECONDS: Final = 40.0
"""How long the server may take to answer anything. Longer than what it allows itself for a statement."""
_OLDEST: Final = 120000
_DEFAULTS: Final[dict[str, Any]] = {
    "application_name": "ckptfmt",
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}

T = TypeVar("T")


class BoundedConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection on which no wait is endless."""

    def wait(self, gen: Generator[Any, Any, T], *arguments: Any, **named: Any) -> T:
        return super().wait(_bounded(gen), *arguments, **named)


def _bounded(steps: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
    """The same steps, with an end: the driver asks again every 0.1 s, with nothing in hand if nothing has come."""
    until = time.monotonic() + ANSWER_SECONDS
    try:
        wanted = next(steps)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > until:
                raise psycopg.OperationalError(f"the server has not answered for {ANSWER_SECONDS:g} s")
            wanted = steps.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result


def parameters(url: str) -> dict[str, Any]:
    """libpq's parameters for a catalog URL; what the URL says itself comes first. ``InvalidInput`` if it is no URL."""
    try:
        given = conninfo.conninfo_to_dict(postgres_uri(url))
    except (psycopg.Error, UnicodeError):  # its text may hold the password
        raise InvalidInput(
            f"{display(url)!r} is not a catalog URL: use postgresql://user@host:port/database, with special characters "
            "of a password as %XX"
        ) from None
    return {**_DEFAULTS, **given, "client_encoding": "UTF8"}


def connected(given: dict[str, Any], url: str, *, autocommit: bool = True) -> BoundedConnection:
    """A new connection. ``CatalogError`` for a server that is too old."""
    connection = BoundedConnection.connect(**given, autocommit=autocommit, prepare_threshold=None)
    version = connection.info.server_version
    if version < _OLDEST:
        connection.close()
        raise CatalogError(
            f"catalog {display(url)}: the server is PostgreSQL {version // 10_000}, ckptfmt needs "
            f"{_OLDEST // 10_000} or newer: upgrade it, or name another one",
            kind="catalog_older",
        )
    return connection
