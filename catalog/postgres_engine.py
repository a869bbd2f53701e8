"""How SQLAlchemy is given a PostgreSQL connection: opened and closed by the sessions that own it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.pool import NullPool


def postgres_engine(connect: Callable[[], psycopg.Connection[Any]]) -> Engine:
    """An engine without a pool. Who gives ``connect`` closes what it gave."""
    return create_engine("postgresql+psycopg://", creator=connect, poolclass=NullPool)


def driver_connection(connection: Connection) -> psycopg.Connection[Any]:
    """What SQLAlchemy's connection stands on."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return driver
