"""Time as the catalog keeps it: aware UTC datetimes, read from the database's clock alone.

SQLite has no timestamp type, so times are text ``YYYY-MM-DD HH:MM:SS.ffffff`` in UTC: fixed width, hence
comparable as text and readable by SQLite's own date functions. PostgreSQL uses ``timestamp with time zone``.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

# SQLite 3.40 knows milliseconds only; the zeros keep the width that bound values have.
SQLITE_NOW: Final = "strftime('%Y-%m-%d %H:%M:%f000', 'now')"
POSTGRESQL_NOW: Final = "clock_timestamp()"
NOW: Final = {"sqlite": SQLITE_NOW, "postgresql": POSTGRESQL_NOW}
"""The clock at the moment of evaluation (not the transaction's start), by dialect."""


def to_text(value: datetime) -> str:
    """Return the SQLite form of an aware datetime."""
    # strftime's %Y is not padded on every platform; isoformat is.
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(sep=" ", timespec="microseconds")


def from_text(value: str) -> datetime:
    """Read the SQLite form back."""
    return datetime.fromisoformat(f"{value}+00:00")


def moment(value: Any) -> datetime:
    """An aware UTC datetime from what a driver returns for a time: text, or an aware datetime."""
    if isinstance(value, str):
        return from_text(value)
    aware: datetime = value.astimezone(UTC)
    return aware


def moment_or_none(value: Any) -> datetime | None:
    return None if value is None else moment(value)
