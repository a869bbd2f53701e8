"""What pgbouncer does in transaction mode, in this process: a transaction gets whichever session is idle.

A catalog that left something in a session, or looked for it there, would not get through its suite. And a suite of
thousands of transactions takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from psycopg.pq import TransactionStatus

from ckptfmt.catalog import postgres
from ckptfmt.catalog.postgres_connecting import BoundedConnection


@contextmanager
def pooled_sessions() -> Iterator[None]:
    """Sessions of transactions that have ended are given to the next ones. For one thread."""
    connect, close = postgres.connected, BoundedConnection.close
    idle: dict[str, list[BoundedConnection]] = {}
    places: dict[BoundedConnection, str] = {}

    def connected(given: dict[str, Any], url: str, *, autocommit: bool = True) -> BoundedConnection:
        place = f"{autocommit} {sorted(given.items())}"
        if idle.get(place):
            return idle[place].pop(0)
        connection = connect(given, url, autocommit=autocommit)
        places[connection] = place
        return connection

    def give_back(connection: BoundedConnection) -> None:
        if connection not in places or connection.closed:
            close(connection)
            return
        if connection.info.transaction_status != TransactionStatus.IDLE:
            connection.execute("ROLLBACK")
        idle.setdefault(places[connection], []).append(connection)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postgres, "connected", connected)
        patch.setattr(BoundedConnection, "close", give_back)
        yield
    for connection in places:
        close(connection)
