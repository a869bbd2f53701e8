"""The views: questions of an operator, answered by plain SQL with a stable contract.

``VIEWS`` is the contract (names, order, meaning and kind of the columns); ``spec/catalog.md`` prints it, and
a test keeps both equal. Columns are only ever added, at the end. Templates are rendered per database.
"""

from __future__ import annotations

from typing import Final

from ckptfmt.catalog.view_contract import View, columns

_RUN = """
repository | text | uuid of the repository
run | text | name of the run
"""

_LATEST = View(
    "latest_committed",
    "What a resume would take: the newest committed generation of each run that is not quarantined.",
    columns(
        _RUN
        + """
generation_id | integer | its id
key | text | its key
step | integer | its step
epoch | integer | catalog epoch of the commit
commit_seq | integer | the run's commit number; (epoch, commit_seq) is the order, never step or time
committed_at | time | commit point (C4)
proven_at | time | COMMIT.json is durable (C5); NULL: proof pending
parent_key | text | key of the generation that it continues
world_size | integer | ranks of the launch that saved it
nbytes | integer | tensor bytes
manifest_name | text | object name of the manifest in its folder
manifest_digest | text | digest of the manifest's stored bytes
seconds_since_commit | real | age of the commit
"""
    ),
    "run",
    """
SELECT repository, run, generation_id, "key", step, epoch, commit_seq, committed_at, proven_at, parent_key,
       world_size, nbytes, manifest_name, manifest_digest, seconds_since_commit
FROM (
  SELECT p.uuid AS repository, r.name AS run, g.id AS generation_id, g."key" AS "key", g.step AS step,
         g.epoch AS epoch, g.commit_seq AS commit_seq, g.committed_at AS committed_at, g.proven_at AS proven_at,
         g.parent_key AS parent_key, g.world_size AS world_size, g.nbytes AS nbytes,
         g.manifest_name AS manifest_name, g.manifest_digest AS manifest_digest,
         {seconds:g.committed_at:now} AS seconds_since_commit,
         ROW_NUMBER() OVER (PARTITION BY g.run_id ORDER BY g.epoch DESC, g.commit_seq DESC) AS place
  FROM generations AS g JOIN runs AS r ON r.id = g.run_id JOIN repositories AS p ON p.id = r.repository_id
  WHERE g.state = 'committed' AND g.quarantined_at IS NULL
) AS ranked
WHERE place = 1
""",
)

_LAG = View(
    "commit_lag",
    "How much work a kill would lose now, one row per run: the newest launch against the latest committed generation.",
    columns(
        _RUN
        + """
launch_id | integer | the newest launch; NULL: the run was never launched
host | text | its host
pid | integer | its process
live | integer | 1: neither closed nor lapsed, else 0
last_step | integer | last step it reported with a heartbeat; NULL: none yet
committed_generation_id | integer | latest committed generation; NULL: none
committed_step | integer | its step
lag_steps | integer | last_step - committed_step; negative: the launch went back behind it and has not committed since
lag_seconds | real | seconds since that commit
"""
    ),
    "run",
    """
SELECT p.uuid AS repository, r.name AS run, l.id AS launch_id, l.host AS host, l.pid AS pid,
       CASE WHEN l.id IS NOT NULL AND l.closed_at IS NULL AND l.lease_until > {now} THEN 1 ELSE 0 END AS live,
       l.last_step AS last_step, c.generation_id AS committed_generation_id, c.step AS committed_step,
       l.last_step - c.step AS lag_steps, c.seconds_since_commit AS lag_seconds
FROM runs AS r JOIN repositories AS p ON p.id = r.repository_id
LEFT JOIN launches AS l ON l.run_id = r.id AND l.fence = r.fence
LEFT JOIN latest_committed AS c ON c.repository = p.uuid AND c.run = r.name
""",
)

_IN_FLIGHT = View(
    "in_flight",
    "Generations that are being saved, and whom they wait for.",
    columns(
        _RUN
        + """
generation_id | integer | its id
key | text | its key
step | integer | its step
state | text | writing or durable
stage | text | writing: ranks write; merging: all ranks are durable, C3 is due; committing: C4 is due
age_seconds | real | since it began
seconds_to_deadline | real | negative: past it, any rank may abort; NULL: no deadline
ranks_expected | integer | ranks that take part
ranks_durable | integer | ranks whose part is on the durable tier
missing_ranks | text | ranks not durable yet, comma-separated in no set order; NULL: none
slowest_rank | integer | the rank heard of longest ago among those not durable; if all are, the last one
slowest_rank_state | text | its state
slowest_rank_seconds | real | since it was heard of
launch_live | integer | 1: the launch that began it still holds its lease, else 0
ranks_staged | integer | ranks whose packs are on their stage, and not all on the durable tier yet
staged_bytes | integer | bytes that ranks have put on their stages; NULL: none told
replicated_bytes | integer | bytes of their packs that ranks have copied to the durable tier so far; NULL: none told
"""
    ),
    "run, generation_id",
    """
SELECT p.uuid AS repository, r.name AS run, g.id AS generation_id, g."key" AS "key", g.step AS step, g.state AS state,
       CASE WHEN g.state = 'durable' THEN 'committing'
            WHEN k.ranks_durable = k.ranks_expected THEN 'merging' ELSE 'writing' END AS stage,
       {seconds:g.created_at:now} AS age_seconds, {seconds:now:g.deadline} AS seconds_to_deadline,
       k.ranks_expected AS ranks_expected, k.ranks_durable AS ranks_durable, k.missing_ranks AS missing_ranks,
       s.rank AS slowest_rank, s.state AS slowest_rank_state, {seconds:s.updated_at:now} AS slowest_rank_seconds,
       CASE WHEN l.fence = r.fence AND l.closed_at IS NULL AND l.lease_until > {now} THEN 1 ELSE 0 END AS launch_live,
       k.ranks_staged AS ranks_staged, k.staged_bytes AS staged_bytes, k.replicated_bytes AS replicated_bytes
FROM generations AS g JOIN runs AS r ON r.id = g.run_id JOIN repositories AS p ON p.id = r.repository_id
JOIN launches AS l ON l.id = g.launch_id
LEFT JOIN (
  SELECT q.generation_id AS generation_id, COUNT(*) AS ranks_expected,
         SUM(CASE WHEN q.state = 'durable' THEN 1 ELSE 0 END) AS ranks_durable,
         {concat:CASE WHEN q.state <> 'durable' THEN q.rank END} AS missing_ranks,
         SUM(CASE WHEN q.state = 'staged' THEN 1 ELSE 0 END) AS ranks_staged,
         CAST(SUM(q.staged_bytes) AS BIGINT) AS staged_bytes,
         CAST(SUM(q.replicated_bytes) AS BIGINT) AS replicated_bytes
  FROM ranks AS q JOIN generations AS h ON h.id = q.generation_id AND h.state IN ('writing', 'durable')
  GROUP BY q.generation_id
) AS k ON k.generation_id = g.id
LEFT JOIN (
  SELECT q.generation_id AS generation_id, q.rank AS rank, q.state AS state, q.updated_at AS updated_at,
         ROW_NUMBER() OVER (
           PARTITION BY q.generation_id
           ORDER BY CASE WHEN q.state = 'durable' THEN 1 ELSE 0 END,
                    CASE WHEN q.state <> 'durable' THEN q.updated_at END, q.updated_at DESC, q.rank
         ) AS place
  FROM ranks AS q JOIN generations AS h ON h.id = q.generation_id AND h.state IN ('writing', 'durable')
) AS s ON s.generation_id = g.id AND s.place = 1
WHERE g.state IN ('writing', 'durable')
""",
)

_ERRORS = View(
    "flush_errors",
    "Saves that were not committed, and ranks that failed.",
    columns(
        _RUN
        + """
generation_id | integer | the generation
key | text | its key
step | integer | its step
source | text | generation: it was aborted; rank: a rank reported a failure
at | time | when
stage | text | stage of the abort; persist for a rank
rank | integer | the rank to blame; NULL: none was named
reason | text | message of the error
"""
    ),
    "at, generation_id, source, rank",
    """
SELECT p.uuid AS repository, r.name AS run, g.id AS generation_id, g."key" AS "key", g.step AS step,
       'generation' AS source, g.aborted_at AS at, g.abort_stage AS stage, g.abort_rank AS rank,
       g.abort_reason AS reason
FROM generations AS g JOIN runs AS r ON r.id = g.run_id JOIN repositories AS p ON p.id = r.repository_id
WHERE g.aborted_at IS NOT NULL AND g.commit_seq IS NULL
UNION ALL
SELECT p.uuid, r.name, g.id, g."key", g.step, 'rank', q.updated_at, 'persist', q.rank, q.error
FROM ranks AS q JOIN generations AS g ON g.id = q.generation_id
JOIN runs AS r ON r.id = g.run_id JOIN repositories AS p ON p.id = r.repository_id
WHERE q.state = 'failed'
""",
)

_STALLS = View(
    "stalls",
    "What each save cost: the time for which training was blocked, and the flush behind it.",
    columns(
        _RUN
        + """
generation_id | integer | the generation
step | integer | its step
state | text | its state
created_at | time | when it began (C1)
stall_seconds | real | largest stall over the ranks; NULL: not reported
write_seconds | real | largest write time over the ranks; NULL: not reported
nbytes | integer | bytes written by all ranks; NULL: not reported
bytes_per_second | real | nbytes / write_seconds; NULL: either is missing or zero
retries | integer | write retries over all ranks
commit_seconds | real | from C1 to the commit point; NULL: not committed
staged_bytes | integer | bytes put on stages by all ranks; NULL: no stage
staged_seconds | real | largest time that it took a rank to stage; NULL: no stage
freed_seconds | real | from C1 until every rank was staged or durable, and held no snapshot any more; NULL: not all were
durable_seconds | real | from C1 until every rank was durable; NULL: not all were
"""
    ),
    "run, generation_id",
    """
SELECT p.uuid AS repository, r.name AS run, g.id AS generation_id, g.step AS step, g.state AS state,
       g.created_at AS created_at, k.stall_seconds AS stall_seconds, k.write_seconds AS write_seconds,
       k.nbytes AS nbytes, k.nbytes / NULLIF(k.write_seconds, 0) AS bytes_per_second,
       COALESCE(k.retries, 0) AS retries, {seconds:g.created_at:g.committed_at} AS commit_seconds,
       k.staged_bytes AS staged_bytes, k.staged_seconds AS staged_seconds,
       {seconds:g.created_at:k.freed_at} AS freed_seconds, {seconds:g.created_at:k.durable_at} AS durable_seconds
FROM generations AS g JOIN runs AS r ON r.id = g.run_id JOIN repositories AS p ON p.id = r.repository_id
LEFT JOIN (
  SELECT generation_id, MAX(stall_seconds) AS stall_seconds, MAX(write_seconds) AS write_seconds,
         CAST(SUM(nbytes) AS BIGINT) AS nbytes, CAST(SUM(retries) AS BIGINT) AS retries,
         CAST(SUM(staged_bytes) AS BIGINT) AS staged_bytes, MAX(staged_seconds) AS staged_seconds,
         CASE WHEN COUNT(COALESCE(staged_at, durable_at)) = COUNT(*)
              THEN MAX(COALESCE(staged_at, durable_at)) END AS freed_at,
         CASE WHEN COUNT(durable_at) = COUNT(*) THEN MAX(durable_at) END AS durable_at
  FROM ranks GROUP BY generation_id
) AS k ON k.generation_id = g.id
""",
)

_SPACE = View(
    "space_by_run",
    "Bytes that each run occupies on the durable tier, by what would free them.",
    columns(
        _RUN
        + """
committed_generations | integer | generations that can be restored
committed_bytes | integer | bytes of their own packs
in_flight_generations | integer | generations being saved
in_flight_bytes | integer | bytes that their ranks have reported
reclaimable_generations | integer | retired or aborted, not swept yet: gc frees them
reclaimable_bytes | integer | bytes of their packs, else bytes that their ranks have reported
deleted_generations | integer | swept; only tombstones remain
"""
    ),
    "run",
    """
SELECT p.uuid AS repository, r.name AS run,
       SUM(CASE WHEN g.state = 'committed' THEN 1 ELSE 0 END) AS committed_generations,
       CAST(SUM(CASE WHEN g.state = 'committed' THEN g.stored ELSE 0 END) AS BIGINT) AS committed_bytes,
       SUM(CASE WHEN g.state IN ('writing', 'durable') THEN 1 ELSE 0 END) AS in_flight_generations,
       CAST(SUM(CASE WHEN g.state IN ('writing', 'durable') THEN g.stored ELSE 0 END) AS BIGINT) AS in_flight_bytes,
       SUM(CASE WHEN g.state IN ('retired', 'aborted') THEN 1 ELSE 0 END) AS reclaimable_generations,
       CAST(SUM(CASE WHEN g.state IN ('retired', 'aborted') THEN g.stored ELSE 0 END) AS BIGINT) AS reclaimable_bytes,
       SUM(CASE WHEN g.state = 'deleted' THEN 1 ELSE 0 END) AS deleted_generations
FROM runs AS r JOIN repositories AS p ON p.id = r.repository_id
LEFT JOIN (
  SELECT h.run_id AS run_id, h.state AS state,
         COALESCE((SELECT SUM(k.nbytes) FROM packs AS k
                   WHERE k.repository_id = h.repository_id AND k.generation_key = h."key"),
                  (SELECT SUM(q.nbytes) FROM ranks AS q WHERE q.generation_id = h.id), 0) AS stored
  FROM generations AS h
) AS g ON g.run_id = r.id
GROUP BY p.uuid, r.id, r.name
""",
)

_REPLICA_LAG = View(
    "replica_lag",
    "What each replica lacks, one row per run and replica. Committed generations count that are not quarantined.",
    columns(
        _RUN
        + """
tier | text | uuid of the replica
url | text | where it was last opened
newest_generation_id | integer | newest commit of the run; NULL: none
newest_step | integer | its step
replicated_generation_id | integer | newest commit that the replica holds whole; NULL: none
replicated_step | integer | its step
generations_behind | integer | generations that the replica does not hold whole
bytes_behind | integer | bytes of their packs that it does not hold; a pack of several generations counts once
seconds_behind | real | age of the oldest commit that it does not hold whole; NULL: it holds all
"""
    ),
    "run, tier",
    """
SELECT p.uuid AS repository, r.name AS run, t.uuid AS tier, t.url AS url,
       c.newest_generation_id AS newest_generation_id, c.newest_step AS newest_step,
       c.replicated_generation_id AS replicated_generation_id, c.replicated_step AS replicated_step,
       COALESCE(c.generations_behind, 0) AS generations_behind, COALESCE(b.bytes_behind, 0) AS bytes_behind,
       {seconds:c.oldest_behind:now} AS seconds_behind
FROM runs AS r JOIN repositories AS p ON p.id = r.repository_id
JOIN tiers AS t ON t.repository_id = p.id AND t.role = 'replica' AND t.forgotten_at IS NULL
LEFT JOIN (
  SELECT run_id, tier_id, MAX(CASE WHEN place = 1 THEN id END) AS newest_generation_id,
         MAX(CASE WHEN place = 1 THEN step END) AS newest_step,
         MAX(CASE WHEN whole = 1 AND place_of_its_kind = 1 THEN id END) AS replicated_generation_id,
         MAX(CASE WHEN whole = 1 AND place_of_its_kind = 1 THEN step END) AS replicated_step,
         SUM(1 - whole) AS generations_behind, MIN(CASE WHEN whole = 0 THEN committed_at END) AS oldest_behind
  FROM (
    SELECT h.*, ROW_NUMBER() OVER (PARTITION BY run_id, tier_id ORDER BY epoch DESC, commit_seq DESC) AS place,
           ROW_NUMBER() OVER (
             PARTITION BY run_id, tier_id, whole ORDER BY epoch DESC, commit_seq DESC
           ) AS place_of_its_kind
    FROM (
      SELECT g.run_id AS run_id, s.id AS tier_id, g.id AS id, g.step AS step, g.epoch AS epoch,
             g.commit_seq AS commit_seq, g.committed_at AS committed_at,
             CASE WHEN w.generation_id IS NULL THEN 0 ELSE 1 END AS whole
      FROM generations AS g
      JOIN tiers AS s ON s.repository_id = g.repository_id AND s.role = 'replica' AND s.forgotten_at IS NULL
      LEFT JOIN replicated_generations AS w ON w.generation_id = g.id AND w.tier_id = s.id
      WHERE g.state = 'committed' AND g.quarantined_at IS NULL
    ) AS h
  ) AS ranked
  GROUP BY run_id, tier_id
) AS c ON c.run_id = r.id AND c.tier_id = t.id
LEFT JOIN (
  SELECT run_id, tier_id, CAST(SUM(nbytes) AS BIGINT) AS bytes_behind
  FROM (
    SELECT DISTINCT g.run_id AS run_id, s.id AS tier_id, k.id AS pack_id, k.nbytes AS nbytes
    FROM generations AS g
    JOIN tiers AS s ON s.repository_id = g.repository_id AND s.role = 'replica' AND s.forgotten_at IS NULL
    JOIN generation_packs AS u ON u.generation_id = g.id JOIN packs AS k ON k.id = u.pack_id
    WHERE g.state = 'committed' AND g.quarantined_at IS NULL
      AND NOT EXISTS (SELECT 1 FROM replicas AS x WHERE x.pack_id = k.id AND x.tier_id = s.id)
  ) AS missing
  GROUP BY run_id, tier_id
) AS b ON b.run_id = r.id AND b.tier_id = t.id
""",
)

VIEWS: Final[dict[str, View]] = {
    view.name: view for view in (_LATEST, _LAG, _IN_FLIGHT, _ERRORS, _STALLS, _SPACE, _REPLICA_LAG)
}
"""In creation order: a later view may use an earlier one."""
