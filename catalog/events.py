"""The history of a run: append-only, numbered from 1 without gaps."""

from __future__ import annotations

from typing import Any

from ckptfmt.catalog.free_text import document
from ckptfmt.catalog.snapshot import Session
from ckptfmt.format.states import State

# Events are never deleted and the run's lock is held, so the largest number plus one is the next.
_APPEND = """
INSERT INTO events (run_id, seq, generation_id, at, kind, from_state, to_state, actor, detail, library)
VALUES (:run, (SELECT COALESCE(MAX(seq), 0) + 1 FROM events WHERE run_id = :run), :generation, {now}, :kind, :source,
        :target, :actor, :detail, :library)
"""


def append(
    session: Session,
    *,
    run_id: int,
    generation_id: int | None,
    kind: str,
    from_state: State | None,
    to_state: State | None,
    actor: str,
    detail: dict[str, Any],
    library: str,
) -> None:
    """Write the next event of a run whose lock is held."""
    session.execute(
        _APPEND,
        run=run_id,
        generation=generation_id,
        kind=kind,
        source=from_state,
        target=to_state,
        actor=actor,
        detail=document(detail),
        library=library,
    )
