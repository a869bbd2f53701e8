"""Time as the catalog keeps it: aware UTC datetimes, read from the database's clock alone.

SQLite has no timestamp type, so times are text ``YYYY-MM-DD HH:MM:SS.ffffff`` in UTC: fixed width, hence
comparable as text and readable by SQLite's own date functions. PostgreSQL uses ``timestamp with time zone``.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import DateTime, Dialect, String
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

# SQLite 3.40 knows milliseconds only; the zeros keep the width that bound values have.
SQLITE_NOW: Final = "strftime('%Y-%m-%d %H:%M:%f000', 'now')"
POSTGRESQL_NOW: Final = "clock_timestamp()"


def to_text(value: datetime) -> str:
    """Return the SQLite form of an aware datetime."""
    # strftime's %Y is not padded on every platform; isoformat is.
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(sep=" ", timespec="microseconds")


def from_text(value: str) -> datetime:
    """Read the SQLite form back."""
    return datetime.fromisoformat(value).replace(tzinfo=UTC)


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, always UTC, exact to the microsecond."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "sqlite":
            return dialect.type_descriptor(String(26))
        return dialect.type_descriptor(DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if value.tzinfo is None:
            raise TypeError(f"the catalog stores aware datetimes only, not {value!r}")
        return to_text(value) if dialect.name == "sqlite" else value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return from_text(value) if isinstance(value, str) else value.astimezone(UTC)


class database_now(FunctionElement[datetime]):
    """The database's clock at the moment of evaluation (not the transaction's start)."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(database_now)
def _now(element: database_now, compiler: SQLCompiler, **kw: Any) -> str:
    return POSTGRESQL_NOW


@compiles(database_now, "sqlite")
def _now_sqlite(element: database_now, compiler: SQLCompiler, **kw: Any) -> str:
    return SQLITE_NOW
