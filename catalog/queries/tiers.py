"""Tiers, and which packs they hold."""

from __future__ import annotations

from ckptfmt.catalog.clock import moment
from ckptfmt.catalog.snapshot import Row, Snapshot
from ckptfmt.ports.records import ReplicaRecord, TierRecord

_ALL = """
SELECT id, uuid, role, url, host, created_at, forgotten_at IS NOT NULL FROM tiers WHERE repository_id = :repository"""
_PACKS = """
SELECT t.id, k.generation_key, k.name, t.uuid, x.name, k.nbytes, x.verified_at
FROM replicas AS x JOIN packs AS k ON k.id = x.pack_id JOIN tiers AS t ON t.id = x.tier_id
WHERE k.repository_id = :repository AND t.forgotten_at IS NULL AND k.id IN (
  SELECT u.pack_id FROM generation_packs AS u WHERE u.generation_id = :generation
  UNION
  SELECT o.id FROM packs AS o JOIN generations AS g ON g.repository_id = o.repository_id AND g.key = o.generation_key
  WHERE o.repository_id = :repository AND g.id = :generation)
"""
_OF_RUN = " AND g.run_id = (SELECT id FROM runs WHERE repository_id = :repository AND name = :run)"
# A pack counts once, however many generations refer to it.
_HELD = """
SELECT CAST(COALESCE(SUM(k.nbytes), 0) AS BIGINT) FROM packs AS k
WHERE k.repository_id = :repository AND k.id IN (
  SELECT u.pack_id FROM generation_packs AS u JOIN generations AS g ON g.id = u.generation_id
  WHERE g.repository_id = :repository AND g.state <> 'deleted'{of_run})
"""
_TOLD = """
SELECT CAST(COALESCE(SUM(COALESCE(q.nbytes, q.staged_bytes)), 0) AS BIGINT)
FROM ranks AS q JOIN generations AS g ON g.id = q.generation_id
WHERE g.repository_id = :repository AND g.state <> 'deleted'{of_run}
  AND NOT EXISTS (SELECT 1 FROM generation_packs AS u WHERE u.generation_id = g.id)
"""


def find(snapshot: Snapshot, repository_id: int, uuid: str) -> tuple[TierRecord, bool] | None:
    """The tier, and whether it was forgotten; None if there never was one."""
    for *row, forgotten in snapshot.rows(f"{_ALL} AND uuid = :uuid", repository=repository_id, uuid=uuid):
        return _record(tuple(row)), bool(forgotten)
    return None


def every(snapshot: Snapshot, repository_id: int) -> list[TierRecord]:
    """Those in use, in the order in which they came."""
    found = snapshot.rows(f"{_ALL} AND forgotten_at IS NULL ORDER BY id", repository=repository_id)
    return [_record(row[:-1]) for row in found]


def replicas_of(snapshot: Snapshot, repository_id: int, generation_id: int) -> list[ReplicaRecord]:
    """What tiers hold of the packs that the generation refers to, or has in its folder."""
    found = snapshot.rows(_PACKS, repository=repository_id, generation=generation_id)
    # Sorted here, for databases differ in how they sort text.
    return [
        ReplicaRecord(key, pack, tier, name, nbytes, moment(verified_at))
        for _, key, pack, tier, name, nbytes, verified_at in sorted(found)
    ]


def bytes_held(snapshot: Snapshot, repository_id: int, run: str | None) -> int:
    """See the port."""
    of_run = "" if run is None else _OF_RUN
    total = 0
    for query in (_HELD, _TOLD):
        ((nbytes,),) = snapshot.rows(query.format(of_run=of_run), repository=repository_id, run=run)
        total += nbytes
    return total


def _record(row: Row) -> TierRecord:
    id, uuid, role, url, host, created_at = row
    return TierRecord(id, uuid, role, url, host, moment(created_at))
