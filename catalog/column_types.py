"""Times and documents as SQLAlchemy sees them: the column types."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, DateTime, Dialect, String
from sqlalchemy.types import TypeDecorator, TypeEngine

from ckptfmt.catalog.clock import moment_or_none, to_text


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
        return moment_or_none(value)


class Document(TypeDecorator[Any]):
    """JSON; on PostgreSQL its binary form. That dialect is imported where it is in use: it costs a listing 80 ms."""

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        if dialect.name != "postgresql":
            return dialect.type_descriptor(JSON())
        from sqlalchemy.dialects.postgresql import JSONB

        return dialect.type_descriptor(JSONB())
