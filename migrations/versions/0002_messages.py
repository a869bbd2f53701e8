"""The message board of a launch: what its ranks tell each other."""

from __future__ import annotations

from alembic import op

from ckptfmt.migrations.r0002 import POSTGRESQL, SQLITE

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for statement in SQLITE if op.get_context().dialect.name == "sqlite" else POSTGRESQL:
        op.execute(statement.strip())
