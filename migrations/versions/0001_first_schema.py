"""The first schema: tables, triggers, views, and the identity of the catalog."""

from __future__ import annotations

import uuid

from alembic import op

from ckptfmt.catalog.clock import POSTGRESQL_NOW, SQLITE_NOW
from ckptfmt.migrations.r0001_postgresql import STATEMENTS as POSTGRESQL
from ckptfmt.migrations.r0001_sqlite import STATEMENTS as SQLITE

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    sqlite = op.get_context().dialect.name == "sqlite"
    for statement in SQLITE if sqlite else POSTGRESQL:
        op.execute(statement.strip().replace(":", "\\:"))
    now = SQLITE_NOW if sqlite else POSTGRESQL_NOW
    identity = f"INSERT INTO catalog_meta (id, uuid, epoch, created_at) VALUES (1, '{uuid.uuid4()}', 1, {now})"
    op.execute(identity.replace(":", "\\:"))
