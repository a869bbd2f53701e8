"""Rows of the documented views."""

from __future__ import annotations

from typing import Any

from ckptfmt.catalog.clock import moment_or_none
from ckptfmt.catalog.snapshot import Snapshot
from ckptfmt.catalog.views import VIEWS
from ckptfmt.errors import InvalidInput


def view(snapshot: Snapshot, repository: str, name: str, run: str | None) -> list[dict[str, Any]]:
    """Rows of a documented view for one repository; times as aware datetimes."""
    found = VIEWS.get(name)
    if found is None:
        raise InvalidInput(f"the catalog has no view {name!r}: use one of {', '.join(VIEWS)}")
    columns = ", ".join(f'"{column.name}"' for column in found.columns)
    query = f"SELECT {columns} FROM {found.name} WHERE repository = :repository"
    if run is not None:
        query += " AND run = :run"
    rows = snapshot.rows(f"{query} ORDER BY {found.order}", repository=repository, run=run)
    return [
        {
            column.name: moment_or_none(value) if column.kind == "time" else value
            for column, value in zip(found.columns, row, strict=True)
        }
        for row in rows
    ]
