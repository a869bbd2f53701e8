"""Catalogs whose transactions do not wait for the disk: for tests in which nothing has to survive a power cut."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckptfmt.catalog.sqlite import SqliteSessions


@contextmanager
def quick_catalogs() -> Iterator[None]:
    """What this process and its forks open meanwhile does not sync."""
    connect = SqliteSessions._connect

    def connect_quickly(self: SqliteSessions, *args: Any) -> sqlite3.Connection:
        connection = connect(self, *args)
        if self.mode == "ro":  # who only reads meets the journal of a killed writer later, and sees to it
            return connection
        try:
            connection.execute("PRAGMA synchronous=OFF")
        except BaseException:  # a damaged file: nothing may stay open, or no child could use a catalog any more
            SqliteSessions._close(connection)
            raise
        return connection

    SqliteSessions._connect = connect_quickly  # type: ignore[method-assign]
    try:
        yield
    finally:
        SqliteSessions._connect = connect  # type: ignore[method-assign]
