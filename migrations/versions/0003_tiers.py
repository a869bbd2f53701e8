"""Stages and replicas: which tiers there are, what they hold, and when ranks were staged."""

from __future__ import annotations

from alembic import op

from ckptfmt.migrations.r0003_postgresql import STATEMENTS as POSTGRESQL
from ckptfmt.migrations.r0003_sqlite import STATEMENTS as SQLITE

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for statement in SQLITE if op.get_context().dialect.name == "sqlite" else POSTGRESQL:
        op.execute(statement.strip().replace(":", "\\:"))
