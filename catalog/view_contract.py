"""What the contract says of a view: its name, meaning and columns, in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptfmt.errors import InvalidInput

Kind = Literal["text", "integer", "real", "time"]


@dataclass(frozen=True)
class ViewColumn:
    name: str
    kind: Kind
    meaning: str


@dataclass(frozen=True)
class View:
    """``order`` is how ``Catalog.view`` sorts the rows; plain SQL states its own."""

    name: str
    meaning: str
    columns: tuple[ViewColumn, ...]
    order: str
    template: str


def columns(text: str) -> tuple[ViewColumn, ...]:
    """From lines of "name | kind | meaning"."""
    parsed = []
    for line in filter(None, text.splitlines()):
        name, kind, meaning = (part.strip() for part in line.split("|"))
        if kind not in ("text", "integer", "real", "time"):
            raise InvalidInput(f"view column {name!r} has the unknown kind {kind!r}")
        parsed.append(ViewColumn(name, kind, meaning))  # type: ignore[arg-type]
    return tuple(parsed)
