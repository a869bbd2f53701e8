"""Launches: who holds a run's lease, under which fence, by the database's clock."""

from __future__ import annotations

from ckptfmt.catalog.clock import moment, moment_or_none
from ckptfmt.catalog.snapshot import Row, Snapshot
from ckptfmt.errors import CatalogError
from ckptfmt.ports.records import LaunchRecord

# A displaced launch is never live, whatever its lease says: the run's fence has moved on.
_LIVE = "l.closed_at IS NULL AND l.lease_until > {now} AND l.fence = r.fence"
_ALL = f"""
SELECT l.id, r.name, l.token, l.kind, l.fence, l.host, l.pid, l.boot_id, l.pid_started, l.world_size, l.restored_from,
       l.last_step, l.lease_until, CASE WHEN {_LIVE} THEN 1 ELSE 0 END, l.created_at, l.closed_at
FROM launches AS l JOIN runs AS r ON r.id = l.run_id
WHERE r.repository_id = :repository
"""
_HOLDER = f"{_ALL} AND r.name = :run AND {_LIVE}"
_EVERY = f"{_ALL} AND r.name = :run ORDER BY l.fence DESC"
_BY_ID = f"{_ALL} AND l.id = :launch"
_BY_TOKEN = f"{_ALL} AND l.run_id = :run AND l.token = :token"
_WITH_FENCE = f"{_ALL} AND l.run_id = :run AND l.fence = :fence"
_RUN_ID = """
SELECT l.run_id FROM launches AS l JOIN runs AS r ON r.id = l.run_id
WHERE r.repository_id = :repository AND l.id = :launch
"""
_RESTORED = f"{_ALL} AND l.restored_from = :key AND {_LIVE} LIMIT 1"


def live(snapshot: Snapshot, repository_id: int, run: str) -> LaunchRecord | None:
    """The launch that holds the lease now."""
    found = snapshot.rows(_HOLDER, repository=repository_id, run=run)
    return _record(found[0]) if found else None


def every(snapshot: Snapshot, repository_id: int, run: str) -> list[LaunchRecord]:
    """All launches of the run, newest first."""
    return [_record(row) for row in snapshot.rows(_EVERY, repository=repository_id, run=run)]


def by_id(snapshot: Snapshot, repository_id: int, launch_id: int) -> LaunchRecord:
    """The launch; ``CatalogError`` if there is none, for ids come from rows that refer to it."""
    found = snapshot.rows(_BY_ID, repository=repository_id, launch=launch_id)
    if not found:
        raise CatalogError(f"the catalog has no launch {launch_id} in this repository: run `ckptfmt db check`")
    return _record(found[0])


def by_token(snapshot: Snapshot, repository_id: int, run_id: int, token: str) -> LaunchRecord | None:
    """The launch of the run that came with this token."""
    found = snapshot.rows(_BY_TOKEN, repository=repository_id, run=run_id, token=token)
    return _record(found[0]) if found else None


def with_fence(snapshot: Snapshot, repository_id: int, run_id: int, fence: int) -> LaunchRecord | None:
    """The launch of the run to which this fence was given."""
    found = snapshot.rows(_WITH_FENCE, repository=repository_id, run=run_id, fence=fence)
    return _record(found[0]) if found else None


def run_id_of(snapshot: Snapshot, repository_id: int, launch_id: int) -> int | None:
    found = snapshot.rows(_RUN_ID, repository=repository_id, launch=launch_id)
    return found[0][0] if found else None


def restored(snapshot: Snapshot, repository_id: int, generation_key: str) -> LaunchRecord | None:
    """A live launch, of any run, that restored from this generation."""
    found = snapshot.rows(_RESTORED, repository=repository_id, key=generation_key)
    return _record(found[0]) if found else None


def _record(row: Row) -> LaunchRecord:
    # The columns stand in the order of the record's fields.
    *plain, lease_until, live, created_at, closed_at = row
    values = [*plain, moment(lease_until), bool(live), moment(created_at), moment_or_none(closed_at)]
    return LaunchRecord(*values)
