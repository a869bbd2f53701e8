"""Events of a run or a generation, as the catalog recorded them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ckptfmt.cli import quantities as q
from ckptfmt.cli.contents import json_value
from ckptfmt.cli.output import Page
from ckptfmt.engine.reports import Report
from ckptfmt.ports.records import EventRecord


@dataclass(frozen=True)
class HistoryItem(Report):
    """One event. ``seq`` counts per run."""

    seq: int
    at: datetime
    kind: str
    generation_id: int | None
    from_state: str | None
    to_state: str | None
    actor: str
    detail: Mapping[str, Any]
    library: str


def items(events: Sequence[EventRecord]) -> tuple[HistoryItem, ...]:
    return tuple(
        HistoryItem(
            seq=event.seq,
            at=event.at,
            kind=event.kind,
            generation_id=event.generation_id,
            from_state=event.from_state,
            to_state=event.to_state,
            actor=event.actor,
            detail=json_value(event.detail),
            library=event.library,
        )
        for event in events
    )


def history_table(page: Page, history: Sequence[HistoryItem], *, generations: bool = True) -> None:
    """One line an event; ``generations`` adds the column of their ids."""
    rows = [
        (
            q.clock(item.at),
            *([f"#{item.generation_id}" if item.generation_id is not None else ""] if generations else []),
            item.kind,
            _change(item),
            item.actor,
            ", ".join(f"{key} {value}" for key, value in item.detail.items() if value is not None),
        )
        for item in history
    ]
    names = ("AT", *([">GENERATION"] if generations else []), "EVENT", "STATE", "BY", "")
    page.table(names, rows, indent=2)


def _change(item: HistoryItem) -> str:
    if item.to_state is None:
        return ""
    return item.to_state if item.from_state is None else f"{item.from_state} -> {item.to_state}"
