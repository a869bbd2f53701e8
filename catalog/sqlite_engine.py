"""How SQLAlchemy is given a SQLite connection: opened, begun and forgotten by the sessions that own it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool
from sqlalchemy.util import LRUCache

# Statements compile once per process, not once per catalog object.
_compiled: Final[LRUCache[Any, Any]] = LRUCache(500)


def sqlite_engine(
    *,
    connect: Callable[[], sqlite3.Connection],
    begin: Callable[[sqlite3.Connection], None],
    closing: Callable[[sqlite3.Connection], None],
) -> Engine:
    """An engine without a pool: a connection lives for one transaction."""
    engine = create_engine(
        "sqlite://", creator=connect, poolclass=NullPool, execution_options={"compiled_cache": _compiled}
    )

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        begin(driver)

    @event.listens_for(engine, "close")
    def _close(connection: sqlite3.Connection, record: Any) -> None:
        closing(connection)

    return engine
