"""How SQLAlchemy is given a SQLite connection: opened, begun and closed by the sessions that own it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool


def sqlite_engine(
    *,
    connect: Callable[[], sqlite3.Connection],
    begin: Callable[[sqlite3.Connection], None],
) -> Engine:
    """An engine without a pool: a connection lives for one transaction. Who gives ``connect`` closes what it gave."""
    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        begin(driver_connection(connection))

    return engine


def driver_connection(connection: Connection) -> sqlite3.Connection:
    """What SQLAlchemy's connection stands on."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver
