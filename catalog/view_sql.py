"""Rendering of the views' templates into the SQL of a database."""

from __future__ import annotations

import re
from typing import Final

from ckptfmt.catalog.clock import NOW
from ckptfmt.catalog.view_contract import View
from ckptfmt.catalog.views import VIEWS
from ckptfmt.errors import InvalidInput

_PLACEHOLDER: Final = re.compile(r"\{(now|seconds|concat)(?::([^}]*))?\}")


def view_sql(dialect: str) -> dict[str, str]:
    """Return ``{name: CREATE VIEW statement}`` in creation order, for ``sqlite`` or ``postgresql``."""
    if dialect not in NOW:
        raise InvalidInput(f"no catalog views for the database {dialect!r}: use sqlite or postgresql")
    return {view.name: _create(view, dialect) for view in VIEWS.values()}


def _create(view: View, dialect: str) -> str:
    def fill(match: re.Match[str]) -> str:
        word, argument = match.group(1), match.group(2) or ""
        if word == "now":
            return NOW[dialect]
        if word == "concat":
            return f"GROUP_CONCAT({argument})" if dialect == "sqlite" else f"STRING_AGG(({argument})::text, ',')"
        earlier, later = (NOW[dialect] if part == "now" else part for part in argument.split(":"))
        if dialect == "sqlite":
            # A difference of Julian days resolves about 0.05 ms, finer than the clock of SQLite itself.
            return f"(JULIANDAY({later}) - JULIANDAY({earlier})) * 86400.0"
        return f"EXTRACT(EPOCH FROM ({later} - {earlier}))::double precision"

    return f"CREATE VIEW {view.name} AS{_PLACEHOLDER.sub(fill, view.template).rstrip()}"
