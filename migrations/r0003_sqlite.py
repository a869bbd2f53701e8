"""Revision 0003 for SQLite, frozen: a migration says what it did, whatever the schema becomes later."""

# ruff: noqa: E501
from __future__ import annotations

from typing import Final

STATEMENTS: Final[tuple[str, ...]] = (
    r"""
CREATE TABLE tiers (
  id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
  repository_id INTEGER NOT NULL,
  uuid TEXT NOT NULL,
  role TEXT NOT NULL,
  url TEXT NOT NULL,
  host TEXT,
  created_at VARCHAR(26) NOT NULL,
  forgotten_at VARCHAR(26),
  CONSTRAINT ck_tiers_role CHECK (role IN ('durable', 'stage', 'replica')),
  CONSTRAINT ck_tiers_stage_host CHECK (role <> 'stage' OR host IS NOT NULL),
  CONSTRAINT uq_tiers_repository_id_uuid UNIQUE (repository_id, uuid),
  CONSTRAINT fk_tiers_repository_id_repositories FOREIGN KEY(repository_id) REFERENCES repositories (id)
)
""",
    r"""
CREATE TABLE replicas (
  pack_id INTEGER NOT NULL,
  tier_id INTEGER NOT NULL,
  name TEXT NOT NULL,
  verified_at VARCHAR(26) NOT NULL,
  CONSTRAINT pk_replicas PRIMARY KEY (pack_id, tier_id),
  CONSTRAINT fk_replicas_pack_id_packs FOREIGN KEY(pack_id) REFERENCES packs (id),
  CONSTRAINT fk_replicas_tier_id_tiers FOREIGN KEY(tier_id) REFERENCES tiers (id)
)
""",
    r"""
CREATE INDEX ix_replicas_tier_id ON replicas (tier_id)
""",
    r"""
CREATE TABLE replicated_generations (
  generation_id INTEGER NOT NULL,
  tier_id INTEGER NOT NULL,
  replicated_at VARCHAR(26) NOT NULL,
  CONSTRAINT pk_replicated_generations PRIMARY KEY (generation_id, tier_id),
  CONSTRAINT fk_replicated_generations_generation_id_generations FOREIGN KEY(generation_id) REFERENCES generations (id),
  CONSTRAINT fk_replicated_generations_tier_id_tiers FOREIGN KEY(tier_id) REFERENCES tiers (id)
)
""",
    r"""
CREATE INDEX ix_replicated_generations_tier_id ON replicated_generations (tier_id)
""",
    r"""
ALTER TABLE generations ADD COLUMN tiers TEXT
""",
    r"""
ALTER TABLE ranks ADD COLUMN staged_tier TEXT
""",
    r"""
ALTER TABLE ranks ADD COLUMN staged_bytes INTEGER
""",
    r"""
ALTER TABLE ranks ADD COLUMN staged_seconds FLOAT
""",
    r"""
ALTER TABLE ranks ADD COLUMN staged_at VARCHAR(26)
""",
    r"""
ALTER TABLE ranks ADD COLUMN durable_at VARCHAR(26)
""",
    r"""
ALTER TABLE ranks ADD COLUMN replicated_bytes INTEGER
""",
    r"""
UPDATE ranks SET durable_at = updated_at WHERE state = 'durable'
""",
    r"""
DROP TRIGGER ckptfmt_generations_verdict_update
""",
    r"""
CREATE TRIGGER ckptfmt_generations_verdict_update BEFORE UPDATE ON generations
WHEN OLD.commit_seq IS NOT NULL AND (NEW."epoch" IS NOT OLD."epoch" OR NEW."commit_seq" IS NOT OLD."commit_seq" OR NEW."committed_at" IS NOT OLD."committed_at" OR NEW."commit_fence" IS NOT OLD."commit_fence" OR NEW."parent_key" IS NOT OLD."parent_key" OR NEW."manifest_name" IS NOT OLD."manifest_name" OR NEW."manifest_digest" IS NOT OLD."manifest_digest" OR NEW."manifest_bytes" IS NOT OLD."manifest_bytes" OR NEW."nbytes" IS NOT OLD."nbytes" OR NEW."tiers" IS NOT OLD."tiers")
BEGIN SELECT RAISE(ABORT, 'ckptfmt: what was committed never changes'); END
""",
    r"""
CREATE TRIGGER ckptfmt_tiers_replace_insert BEFORE INSERT ON tiers
WHEN EXISTS (SELECT 1 FROM tiers AS t WHERE t.id = NEW.id OR (t.repository_id = NEW.repository_id AND t.uuid = NEW.uuid))
BEGIN SELECT RAISE(ABORT, 'ckptfmt: a tier row is never replaced'); END
""",
    r"""
CREATE TRIGGER ckptfmt_tiers_identity_update BEFORE UPDATE ON tiers
WHEN NEW."id" IS NOT OLD."id" OR NEW."repository_id" IS NOT OLD."repository_id" OR NEW."uuid" IS NOT OLD."uuid" OR NEW."role" IS NOT OLD."role" OR NEW."host" IS NOT OLD."host" OR NEW."created_at" IS NOT OLD."created_at"
BEGIN SELECT RAISE(ABORT, 'ckptfmt: uuid, role and host of a tier never change'); END
""",
    r"""
CREATE TRIGGER ckptfmt_tiers_keep_delete BEFORE DELETE ON tiers
WHEN 1 = 1
BEGIN SELECT RAISE(ABORT, 'ckptfmt: a tier row is never deleted'); END
""",
    r"""
CREATE TRIGGER ckptfmt_replicas_kept_insert BEFORE INSERT ON replicas
WHEN NOT EXISTS (SELECT 1 FROM generation_packs AS u JOIN generations AS g ON g.id = u.generation_id WHERE u.pack_id = NEW.pack_id AND g.state IN ('durable', 'committed'))
BEGIN SELECT RAISE(ABORT, 'ckptfmt: a replica is one of a pack of a durable or committed generation'); END
""",
    r"""
CREATE TRIGGER ckptfmt_replicas_identity_update BEFORE UPDATE ON replicas
WHEN NEW."pack_id" IS NOT OLD."pack_id" OR NEW."tier_id" IS NOT OLD."tier_id"
BEGIN SELECT RAISE(ABORT, 'ckptfmt: pack and tier of a replica never change'); END
""",
    r"""
CREATE TRIGGER ckptfmt_replicas_whole_delete BEFORE DELETE ON replicas
WHEN EXISTS (SELECT 1 FROM generation_packs AS u JOIN replicated_generations AS w ON w.generation_id = u.generation_id WHERE u.pack_id = OLD.pack_id AND w.tier_id = OLD.tier_id)
BEGIN SELECT RAISE(ABORT, 'ckptfmt: a tier that holds a generation whole holds its packs'); END
""",
    r"""
CREATE TRIGGER ckptfmt_replicated_generations_whole_insert BEFORE INSERT ON replicated_generations
WHEN NOT EXISTS (SELECT 1 FROM generations AS g WHERE g.id = NEW.generation_id AND g.state = 'committed') OR EXISTS (SELECT 1 FROM generation_packs AS u WHERE u.generation_id = NEW.generation_id AND NOT EXISTS (SELECT 1 FROM replicas AS x WHERE x.pack_id = u.pack_id AND x.tier_id = NEW.tier_id))
BEGIN SELECT RAISE(ABORT, 'ckptfmt: a tier holds a committed generation whole once it holds its packs'); END
""",
    r"""
CREATE TRIGGER ckptfmt_replicated_generations_identity_update BEFORE UPDATE ON replicated_generations
WHEN NEW."generation_id" IS NOT OLD."generation_id" OR NEW."tier_id" IS NOT OLD."tier_id"
BEGIN SELECT RAISE(ABORT, 'ckptfmt: generation and tier of a whole replica never change'); END
""",
    r"""
DROP VIEW in_flight
""",
    r"""
CREATE VIEW in_flight AS
SELECT p.uuid AS repository, r.name AS run, g.id AS generation_id, g."key" AS "key", g.step AS step, g.state AS state,
       CASE WHEN g.state = 'durable' THEN 'committing'
            WHEN k.ranks_durable = k.ranks_expected THEN 'merging' ELSE 'writing' END AS stage,
       (JULIANDAY(strftime('%Y-%m-%d %H:%M:%f000', 'now')) - JULIANDAY(g.created_at)) * 86400.0 AS age_seconds, (JULIANDAY(g.deadline) - JULIANDAY(strftime('%Y-%m-%d %H:%M:%f000', 'now'))) * 86400.0 AS seconds_to_deadline,
       k.ranks_expected AS ranks_expected, k.ranks_durable AS ranks_durable, k.missing_ranks AS missing_ranks,
       s.rank AS slowest_rank, s.state AS slowest_rank_state, (JULIANDAY(strftime('%Y-%m-%d %H:%M:%f000', 'now')) - JULIANDAY(s.updated_at)) * 86400.0 AS slowest_rank_seconds,
       CASE WHEN l.fence = r.fence AND l.closed_at IS NULL AND l.lease_until > strftime('%Y-%m-%d %H:%M:%f000', 'now') THEN 1 ELSE 0 END AS launch_live,
       k.ranks_staged AS ranks_staged, k.staged_bytes AS staged_bytes, k.replicated_bytes AS replicated_bytes
FROM generations AS g JOIN runs AS r ON r.id = g.run_id JOIN repositories AS p ON p.id = r.repository_id
JOIN launches AS l ON l.id = g.launch_id
LEFT JOIN (
  SELECT q.generation_id AS generation_id, COUNT(*) AS ranks_expected,
         SUM(CASE WHEN q.state = 'durable' THEN 1 ELSE 0 END) AS ranks_durable,
         GROUP_CONCAT(CASE WHEN q.state <> 'durable' THEN q.rank END) AS missing_ranks,
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
    r"""
DROP VIEW stalls
""",
    r"""
CREATE VIEW stalls AS
SELECT p.uuid AS repository, r.name AS run, g.id AS generation_id, g.step AS step, g.state AS state,
       g.created_at AS created_at, k.stall_seconds AS stall_seconds, k.write_seconds AS write_seconds,
       k.nbytes AS nbytes, k.nbytes / NULLIF(k.write_seconds, 0) AS bytes_per_second,
       COALESCE(k.retries, 0) AS retries, (JULIANDAY(g.committed_at) - JULIANDAY(g.created_at)) * 86400.0 AS commit_seconds,
       k.staged_bytes AS staged_bytes, k.staged_seconds AS staged_seconds,
       (JULIANDAY(k.freed_at) - JULIANDAY(g.created_at)) * 86400.0 AS freed_seconds, (JULIANDAY(k.durable_at) - JULIANDAY(g.created_at)) * 86400.0 AS durable_seconds
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
    r"""
CREATE VIEW replica_lag AS
SELECT p.uuid AS repository, r.name AS run, t.uuid AS tier, t.url AS url,
       c.newest_generation_id AS newest_generation_id, c.newest_step AS newest_step,
       c.replicated_generation_id AS replicated_generation_id, c.replicated_step AS replicated_step,
       COALESCE(c.generations_behind, 0) AS generations_behind, COALESCE(b.bytes_behind, 0) AS bytes_behind,
       (JULIANDAY(strftime('%Y-%m-%d %H:%M:%f000', 'now')) - JULIANDAY(c.oldest_behind)) * 86400.0 AS seconds_behind
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
