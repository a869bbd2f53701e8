"""Runs: named series of generations."""

from __future__ import annotations

from ckptfmt.catalog.clock import moment
from ckptfmt.catalog.snapshot import Row, Snapshot
from ckptfmt.ports.records import RunRecord

_ALL = """
SELECT id, name, key, fence, next_commit_seq, retention_hold, created_at
FROM runs WHERE repository_id = :repository"""


def every(snapshot: Snapshot, repository_id: int) -> list[RunRecord]:
    """All runs of the repository, by name: sorted here, for databases differ in how they sort text."""
    found = [_record(row) for row in snapshot.rows(_ALL, repository=repository_id)]
    return sorted(found, key=lambda run: run.name)


def locked(snapshot: Snapshot, repository_id: int, run_id: int) -> RunRecord | None:
    """The run, its row locked until the transaction ends."""
    return _one(snapshot.rows(f"{_ALL} AND id = :run{{locked}}", repository=repository_id, run=run_id))


def locked_by_name(snapshot: Snapshot, repository_id: int, name: str) -> RunRecord | None:
    """The run called ``name``, its row locked until the transaction ends."""
    return _one(snapshot.rows(f"{_ALL} AND name = :name{{locked}}", repository=repository_id, name=name))


def by_id(snapshot: Snapshot, repository_id: int, run_id: int) -> RunRecord | None:
    """The run as it is, not locked."""
    return _one(snapshot.rows(f"{_ALL} AND id = :run", repository=repository_id, run=run_id))


def by_name(snapshot: Snapshot, repository_id: int, name: str) -> RunRecord | None:
    """The run called ``name`` as it is, not locked."""
    return _one(snapshot.rows(f"{_ALL} AND name = :name", repository=repository_id, name=name))


def by_name_or_key(snapshot: Snapshot, repository_id: int, name: str, key: str) -> RunRecord | None:
    """A run that has either."""
    query = f"{_ALL} AND (name = :name OR key = :key) ORDER BY id LIMIT 1"
    return _one(snapshot.rows(query, repository=repository_id, name=name, key=key))


def _one(rows: list[Row]) -> RunRecord | None:
    return _record(rows[0]) if rows else None


def _record(row: Row) -> RunRecord:
    # The columns stand in the order of the record's fields.
    *plain, retention_hold, created_at = row
    return RunRecord(*[*plain, bool(retention_hold), moment(created_at)])
