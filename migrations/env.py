"""Alembic's environment. ``ckptfmt.catalog.upgrade`` hands over a connection whose transaction is the lock.

Without a connection the statements are printed (``--sql``) for the dialect in the ``dialect`` attribute.
"""

from __future__ import annotations

from typing import Any

from alembic import context

from ckptfmt.catalog.revision import VERSION_TABLE
from ckptfmt.catalog.schema import metadata


def run() -> None:
    connection = context.config.attributes.get("connection")
    options: dict[str, Any] = {"target_metadata": metadata, "version_table": VERSION_TABLE, "transactional_ddl": True}
    if connection is None:
        context.configure(dialect_name=context.config.attributes["dialect"], as_sql=True, **options)
    else:
        context.configure(connection=connection, **options)
    with context.begin_transaction():
        context.run_migrations()


run()
