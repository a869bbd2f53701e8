"""Runs: named series of generations."""

from __future__ import annotations

from ckptfmt.catalog.clock import moment
from ckptfmt.catalog.snapshot import Row, Snapshot
from ckptfmt.ports.catalog import RunRecord

_EVERY = """
SELECT id, name, key, fence, next_commit_seq, retention_hold, created_at
FROM runs WHERE repository_id = :repository ORDER BY name
"""


def every(snapshot: Snapshot, repository_id: int) -> list[RunRecord]:
    """All runs of the repository, by name."""
    return [_record(row) for row in snapshot.rows(_EVERY, repository=repository_id)]


def _record(row: Row) -> RunRecord:
    id, name, key, fence, next_commit_seq, retention_hold, created_at = row
    return RunRecord(
        id=id,
        name=name,
        key=key,
        fence=fence,
        next_commit_seq=next_commit_seq,
        retention_hold=bool(retention_hold),
        created_at=moment(created_at),
    )
