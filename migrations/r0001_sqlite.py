"""Revision 0001 for SQLite, frozen: a migration says what it did, whatever the schema becomes later."""

# ruff: noqa: E501
from __future__ import annotations

from typing import Final

STATEMENTS: Final[tuple[str, ...]] = (
    r"""
CREATE TABLE catalog_meta (
  id INTEGER NOT NULL,
  uuid TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  created_at VARCHAR(26) NOT NULL,
  CONSTRAINT pk_catalog_meta PRIMARY KEY (id),
  CONSTRAINT ck_catalog_meta_one_row CHECK (id = 1),
  CONSTRAINT ck_catalog_meta_epoch CHECK (epoch >= 1)
)
""",
    r"""
CREATE TABLE repositories (
  id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
  uuid TEXT NOT NULL,
  url TEXT NOT NULL,
  created_at VARCHAR(26) NOT NULL,
  CONSTRAINT uq_repositories_uuid UNIQUE (uuid)
)
""",
    r"""
CREATE TABLE packs (
  id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
  repository_id INTEGER NOT NULL,
  generation_key TEXT NOT NULL,
  name TEXT NOT NULL,
  rank INTEGER NOT NULL,
  nbytes INTEGER NOT NULL,
  header_digest TEXT NOT NULL,
  CONSTRAINT uq_packs_repository_id_generation_key_name UNIQUE (repository_id, generation_key, name),
  CONSTRAINT fk_packs_repository_id_repositories FOREIGN KEY(repository_id) REFERENCES repositories (id)
)
""",
    r"""
CREATE TABLE runs (
  id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
  repository_id INTEGER NOT NULL,
  name TEXT NOT NULL,
  "key" TEXT NOT NULL,
  fence INTEGER DEFAULT '0' NOT NULL,
  next_commit_seq INTEGER DEFAULT '1' NOT NULL,
  retention_hold BOOLEAN DEFAULT 0 NOT NULL,
  created_at VARCHAR(26) NOT NULL,
  CONSTRAINT uq_runs_repository_id_name UNIQUE (repository_id, name),
  CONSTRAINT uq_runs_repository_id_key UNIQUE (repository_id, "key"),
  CONSTRAINT fk_runs_repository_id_repositories FOREIGN KEY(repository_id) REFERENCES repositories (id)
)
""",
    r"""
CREATE TABLE launches (
  id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
  run_id INTEGER NOT NULL,
  token TEXT NOT NULL,
  kind TEXT NOT NULL,
  fence INTEGER NOT NULL,
  host TEXT NOT NULL,
  pid INTEGER NOT NULL,
  boot_id TEXT NOT NULL,
  pid_started TEXT NOT NULL,
  world_size INTEGER NOT NULL,
  restored_from TEXT,
  last_step INTEGER,
  lease_until VARCHAR(26) NOT NULL,
  created_at VARCHAR(26) NOT NULL,
  closed_at VARCHAR(26),
  CONSTRAINT ck_launches_kind CHECK (kind IN ('training', 'recover')),
  CONSTRAINT ck_launches_world_size CHECK (world_size >= 1),
  CONSTRAINT uq_launches_run_id_token UNIQUE (run_id, token),
  CONSTRAINT uq_launches_run_id_fence UNIQUE (run_id, fence),
  CONSTRAINT fk_launches_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id)
)
""",
    r"""
CREATE INDEX ix_launches_restored_from ON launches (restored_from)
""",
    r"""
CREATE TABLE generations (
  id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
  repository_id INTEGER NOT NULL,
  run_id INTEGER NOT NULL,
  launch_id INTEGER NOT NULL,
  save_number INTEGER NOT NULL,
  "key" TEXT NOT NULL,
  step INTEGER NOT NULL,
  state TEXT NOT NULL,
  fence INTEGER NOT NULL,
  world_size INTEGER NOT NULL,
  parent_key TEXT,
  epoch INTEGER NOT NULL,
  commit_seq INTEGER,
  manifest_name TEXT,
  manifest_digest TEXT,
  manifest_bytes INTEGER,
  nbytes INTEGER,
  created_at VARCHAR(26) NOT NULL,
  deadline VARCHAR(26),
  durable_at VARCHAR(26),
  committed_at VARCHAR(26),
  commit_fence INTEGER,
  proven_at VARCHAR(26),
  aborted_at VARCHAR(26),
  abort_stage TEXT,
  abort_rank INTEGER,
  abort_reason TEXT,
  quarantined_at VARCHAR(26),
  quarantine_reason TEXT,
  retired_at VARCHAR(26),
  swept_at VARCHAR(26),
  adopted_at VARCHAR(26),
  adopted_by TEXT,
  CONSTRAINT ck_generations_state CHECK (state IN ('writing', 'durable', 'committed', 'aborted', 'retired', 'deleted')),
  CONSTRAINT ck_generations_durable_facts CHECK (state NOT IN ('durable', 'committed', 'retired') OR (manifest_name IS NOT NULL AND manifest_digest IS NOT NULL AND manifest_bytes IS NOT NULL AND nbytes IS NOT NULL)),
  CONSTRAINT ck_generations_commit_facts CHECK (state NOT IN ('committed', 'retired') OR (commit_seq IS NOT NULL AND committed_at IS NOT NULL AND commit_fence IS NOT NULL)),
  CONSTRAINT ck_generations_commit_seq CHECK (commit_seq IS NULL OR state IN ('committed', 'retired', 'deleted')),
  CONSTRAINT ck_generations_abort_facts CHECK (state <> 'aborted' OR (aborted_at IS NOT NULL AND abort_stage IS NOT NULL AND abort_reason IS NOT NULL)),
  CONSTRAINT uq_generations_repository_id_key UNIQUE (repository_id, "key"),
  CONSTRAINT uq_generations_run_id_epoch_commit_seq UNIQUE (run_id, epoch, commit_seq),
  CONSTRAINT uq_generations_launch_id_save_number UNIQUE (launch_id, save_number),
  CONSTRAINT fk_generations_repository_id_repositories FOREIGN KEY(repository_id) REFERENCES repositories (id),
  CONSTRAINT fk_generations_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id),
  CONSTRAINT fk_generations_launch_id_launches FOREIGN KEY(launch_id) REFERENCES launches (id)
)
""",
    r"""
CREATE INDEX ix_generations_repository_id_state_epoch_commit_seq ON generations (repository_id, state, epoch, commit_seq)
""",
    r"""
CREATE INDEX ix_generations_run_id_state_epoch_commit_seq ON generations (run_id, state, epoch, commit_seq)
""",
    r"""
CREATE INDEX ix_generations_run_id_step ON generations (run_id, step)
""",
    r"""
CREATE TABLE launch_ranks (
  launch_id INTEGER NOT NULL,
  rank INTEGER NOT NULL,
  host TEXT NOT NULL,
  pid INTEGER NOT NULL,
  boot_id TEXT NOT NULL,
  pid_started TEXT NOT NULL,
  joined_at VARCHAR(26) NOT NULL,
  CONSTRAINT pk_launch_ranks PRIMARY KEY (launch_id, rank),
  CONSTRAINT fk_launch_ranks_launch_id_launches FOREIGN KEY(launch_id) REFERENCES launches (id)
)
""",
    r"""
CREATE TABLE events (
  id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
  run_id INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  generation_id INTEGER,
  at VARCHAR(26) NOT NULL,
  kind TEXT NOT NULL,
  from_state TEXT,
  to_state TEXT,
  actor TEXT NOT NULL,
  detail JSON NOT NULL,
  library TEXT NOT NULL,
  CONSTRAINT uq_events_run_id_seq UNIQUE (run_id, seq),
  CONSTRAINT fk_events_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id),
  CONSTRAINT fk_events_generation_id_generations FOREIGN KEY(generation_id) REFERENCES generations (id)
)
""",
    r"""
CREATE INDEX ix_events_generation_id ON events (generation_id)
""",
    r"""
CREATE TABLE generation_packs (
  generation_id INTEGER NOT NULL,
  pack_id INTEGER NOT NULL,
  CONSTRAINT pk_generation_packs PRIMARY KEY (generation_id, pack_id),
  CONSTRAINT fk_generation_packs_generation_id_generations FOREIGN KEY(generation_id) REFERENCES generations (id),
  CONSTRAINT fk_generation_packs_pack_id_packs FOREIGN KEY(pack_id) REFERENCES packs (id)
)
""",
    r"""
CREATE INDEX ix_generation_packs_pack_id ON generation_packs (pack_id)
""",
    r"""
CREATE TABLE pins (
  generation_id INTEGER NOT NULL,
  reason TEXT NOT NULL,
  pinned_by TEXT NOT NULL,
  pinned_at VARCHAR(26) NOT NULL,
  CONSTRAINT pk_pins PRIMARY KEY (generation_id),
  CONSTRAINT fk_pins_generation_id_generations FOREIGN KEY(generation_id) REFERENCES generations (id)
)
""",
    r"""
CREATE TABLE ranks (
  generation_id INTEGER NOT NULL,
  rank INTEGER NOT NULL,
  state TEXT NOT NULL,
  part_name TEXT,
  part_digest TEXT,
  nbytes INTEGER,
  stall_seconds FLOAT,
  write_seconds FLOAT,
  retries INTEGER NOT NULL,
  error TEXT,
  updated_at VARCHAR(26) NOT NULL,
  CONSTRAINT pk_ranks PRIMARY KEY (generation_id, rank),
  CONSTRAINT ck_ranks_state CHECK (state IN ('writing', 'staged', 'durable', 'failed')),
  CONSTRAINT ck_ranks_durable_part CHECK (state <> 'durable' OR (part_name IS NOT NULL AND part_digest IS NOT NULL)),
  CONSTRAINT fk_ranks_generation_id_generations FOREIGN KEY(generation_id) REFERENCES generations (id)
)
""",
    r"""
CREATE TABLE readers (
  id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
  generation_id INTEGER NOT NULL,
  host TEXT NOT NULL,
  pid INTEGER NOT NULL,
  opened_at VARCHAR(26) NOT NULL,
  expires_at VARCHAR(26) NOT NULL,
  CONSTRAINT fk_readers_generation_id_generations FOREIGN KEY(generation_id) REFERENCES generations (id)
)
""",
    r"""
CREATE INDEX ix_readers_generation_id ON readers (generation_id)
""",
    r"""
CREATE TABLE saves (
  launch_id INTEGER NOT NULL,
  n INTEGER NOT NULL,
  run_id INTEGER NOT NULL,
  step INTEGER NOT NULL,
  outcome TEXT NOT NULL,
  generation_id INTEGER,
  tags JSON NOT NULL,
  created_at VARCHAR(26) NOT NULL,
  CONSTRAINT pk_saves PRIMARY KEY (launch_id, n),
  CONSTRAINT ck_saves_outcome CHECK ((outcome = 'begun' AND generation_id IS NOT NULL) OR (outcome = 'skipped' AND generation_id IS NULL)),
  CONSTRAINT uq_saves_generation_id UNIQUE (generation_id),
  CONSTRAINT fk_saves_launch_id_launches FOREIGN KEY(launch_id) REFERENCES launches (id),
  CONSTRAINT fk_saves_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id),
  CONSTRAINT fk_saves_generation_id_generations FOREIGN KEY(generation_id) REFERENCES generations (id)
)
""",
    r"""
CREATE TABLE tags (
  run_id INTEGER NOT NULL,
  name TEXT NOT NULL,
  generation_id INTEGER NOT NULL,
  tagged_at VARCHAR(26) NOT NULL,
  CONSTRAINT pk_tags PRIMARY KEY (run_id, name),
  CONSTRAINT fk_tags_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id),
  CONSTRAINT fk_tags_generation_id_generations FOREIGN KEY(generation_id) REFERENCES generations (id)
)
""",
    r"""
CREATE INDEX ix_tags_generation_id ON tags (generation_id)
""",
    r"""
CREATE TRIGGER ckptfmt_generations_start_insert BEFORE INSERT ON generations
WHEN NEW.state <> 'writing' OR NEW.commit_seq IS NOT NULL OR NEW.adopted_at IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'ckptfmt: a generation starts in state writing'); END
""",
    r"""
CREATE TRIGGER ckptfmt_generations_replace_insert BEFORE INSERT ON generations
WHEN EXISTS (SELECT 1 FROM generations AS g WHERE g.id = NEW.id OR (g.launch_id = NEW.launch_id AND g.save_number = NEW.save_number) OR (g.repository_id = NEW.repository_id AND g."key" = NEW."key"))
BEGIN SELECT RAISE(ABORT, 'ckptfmt: a generation row is never replaced'); END
""",
    r"""
CREATE TRIGGER ckptfmt_generations_transition_update BEFORE UPDATE ON generations
WHEN NEW.state <> OLD.state AND NOT ((OLD.state = 'writing' AND NEW.state = 'durable') OR (OLD.state = 'durable' AND NEW.state = 'committed') OR (OLD.state = 'writing' AND NEW.state = 'aborted') OR (OLD.state = 'durable' AND NEW.state = 'aborted') OR (OLD.state = 'committed' AND NEW.state = 'retired') OR (OLD.state = 'retired' AND NEW.state = 'deleted') OR (OLD.state = 'aborted' AND NEW.state = 'deleted') OR (OLD.state = 'aborted' AND NEW.state = 'committed' AND OLD.adopted_at IS NULL AND NEW.adopted_at IS NOT NULL AND NEW.adopted_by IS NOT NULL) OR (OLD.state = 'writing' AND NEW.state = 'committed' AND OLD.adopted_at IS NULL AND NEW.adopted_at IS NOT NULL AND NEW.adopted_by IS NOT NULL) OR (OLD.state = 'durable' AND NEW.state = 'committed' AND OLD.adopted_at IS NULL AND NEW.adopted_at IS NOT NULL AND NEW.adopted_by IS NOT NULL))
BEGIN SELECT RAISE(ABORT, 'ckptfmt: the state of a generation does not allow this transition'); END
""",
    r"""
CREATE TRIGGER ckptfmt_generations_identity_update BEFORE UPDATE ON generations
WHEN NEW."id" IS NOT OLD."id" OR NEW."repository_id" IS NOT OLD."repository_id" OR NEW."run_id" IS NOT OLD."run_id" OR NEW."launch_id" IS NOT OLD."launch_id" OR NEW."save_number" IS NOT OLD."save_number" OR NEW."key" IS NOT OLD."key" OR NEW."step" IS NOT OLD."step" OR NEW."fence" IS NOT OLD."fence" OR NEW."world_size" IS NOT OLD."world_size" OR NEW."created_at" IS NOT OLD."created_at"
BEGIN SELECT RAISE(ABORT, 'ckptfmt: id, key, step and origin of a generation never change'); END
""",
    r"""
CREATE TRIGGER ckptfmt_generations_verdict_update BEFORE UPDATE ON generations
WHEN OLD.commit_seq IS NOT NULL AND (NEW."epoch" IS NOT OLD."epoch" OR NEW."commit_seq" IS NOT OLD."commit_seq" OR NEW."committed_at" IS NOT OLD."committed_at" OR NEW."commit_fence" IS NOT OLD."commit_fence" OR NEW."parent_key" IS NOT OLD."parent_key" OR NEW."manifest_name" IS NOT OLD."manifest_name" OR NEW."manifest_digest" IS NOT OLD."manifest_digest" OR NEW."manifest_bytes" IS NOT OLD."manifest_bytes" OR NEW."nbytes" IS NOT OLD."nbytes")
BEGIN SELECT RAISE(ABORT, 'ckptfmt: what was committed never changes'); END
""",
    r"""
CREATE TRIGGER ckptfmt_generations_commit_seq_update BEFORE UPDATE ON generations
WHEN OLD.commit_seq IS NULL AND NEW.commit_seq IS NOT NULL AND EXISTS (SELECT 1 FROM generations AS g WHERE g.run_id = NEW.run_id AND g.epoch = NEW.epoch AND g.commit_seq = NEW.commit_seq)
BEGIN SELECT RAISE(ABORT, 'ckptfmt: this commit_seq belongs to another generation'); END
""",
    r"""
CREATE TRIGGER ckptfmt_generations_keep_delete BEFORE DELETE ON generations
WHEN 1 = 1
BEGIN SELECT RAISE(ABORT, 'ckptfmt: a generation row is never deleted'); END
""",
    r"""
CREATE TRIGGER ckptfmt_events_replace_insert BEFORE INSERT ON events
WHEN EXISTS (SELECT 1 FROM events AS e WHERE e.id = NEW.id OR (e.run_id = NEW.run_id AND e.seq = NEW.seq))
BEGIN SELECT RAISE(ABORT, 'ckptfmt: events are append-only'); END
""",
    r"""
CREATE TRIGGER ckptfmt_events_frozen_update BEFORE UPDATE ON events
WHEN 1 = 1
BEGIN SELECT RAISE(ABORT, 'ckptfmt: events are append-only'); END
""",
    r"""
CREATE TRIGGER ckptfmt_events_keep_delete BEFORE DELETE ON events
WHEN 1 = 1
BEGIN SELECT RAISE(ABORT, 'ckptfmt: events are append-only'); END
""",
    r"""
CREATE TRIGGER ckptfmt_runs_counters_update BEFORE UPDATE ON runs
WHEN NEW.fence < OLD.fence OR NEW.next_commit_seq < OLD.next_commit_seq
BEGIN SELECT RAISE(ABORT, 'ckptfmt: fence and next_commit_seq of a run never go down'); END
""",
    r"""
CREATE TRIGGER ckptfmt_runs_keep_delete BEFORE DELETE ON runs
WHEN 1 = 1
BEGIN SELECT RAISE(ABORT, 'ckptfmt: a run row is never deleted'); END
""",
    r"""
CREATE VIEW latest_committed AS
SELECT repository, run, generation_id, "key", step, epoch, commit_seq, committed_at, proven_at, parent_key,
       world_size, nbytes, manifest_name, manifest_digest, seconds_since_commit
FROM (
  SELECT p.uuid AS repository, r.name AS run, g.id AS generation_id, g."key" AS "key", g.step AS step,
         g.epoch AS epoch, g.commit_seq AS commit_seq, g.committed_at AS committed_at, g.proven_at AS proven_at,
         g.parent_key AS parent_key, g.world_size AS world_size, g.nbytes AS nbytes,
         g.manifest_name AS manifest_name, g.manifest_digest AS manifest_digest,
         (JULIANDAY(strftime('%Y-%m-%d %H:%M:%f000', 'now')) - JULIANDAY(g.committed_at)) * 86400.0 AS seconds_since_commit,
         ROW_NUMBER() OVER (PARTITION BY g.run_id ORDER BY g.epoch DESC, g.commit_seq DESC) AS place
  FROM generations AS g JOIN runs AS r ON r.id = g.run_id JOIN repositories AS p ON p.id = r.repository_id
  WHERE g.state = 'committed' AND g.quarantined_at IS NULL
) AS ranked
WHERE place = 1
""",
    r"""
CREATE VIEW commit_lag AS
SELECT p.uuid AS repository, r.name AS run, l.id AS launch_id, l.host AS host, l.pid AS pid,
       CASE WHEN l.id IS NOT NULL AND l.closed_at IS NULL AND l.lease_until > strftime('%Y-%m-%d %H:%M:%f000', 'now') THEN 1 ELSE 0 END AS live,
       l.last_step AS last_step, c.generation_id AS committed_generation_id, c.step AS committed_step,
       l.last_step - c.step AS lag_steps, c.seconds_since_commit AS lag_seconds
FROM runs AS r JOIN repositories AS p ON p.id = r.repository_id
LEFT JOIN launches AS l ON l.run_id = r.id AND l.fence = r.fence
LEFT JOIN latest_committed AS c ON c.repository = p.uuid AND c.run = r.name
""",
    r"""
CREATE VIEW in_flight AS
SELECT p.uuid AS repository, r.name AS run, g.id AS generation_id, g."key" AS "key", g.step AS step, g.state AS state,
       CASE WHEN g.state = 'durable' THEN 'committing'
            WHEN k.ranks_durable = k.ranks_expected THEN 'merging' ELSE 'writing' END AS stage,
       (JULIANDAY(strftime('%Y-%m-%d %H:%M:%f000', 'now')) - JULIANDAY(g.created_at)) * 86400.0 AS age_seconds, (JULIANDAY(g.deadline) - JULIANDAY(strftime('%Y-%m-%d %H:%M:%f000', 'now'))) * 86400.0 AS seconds_to_deadline,
       k.ranks_expected AS ranks_expected, k.ranks_durable AS ranks_durable, k.missing_ranks AS missing_ranks,
       s.rank AS slowest_rank, s.state AS slowest_rank_state, (JULIANDAY(strftime('%Y-%m-%d %H:%M:%f000', 'now')) - JULIANDAY(s.updated_at)) * 86400.0 AS slowest_rank_seconds,
       CASE WHEN l.fence = r.fence AND l.closed_at IS NULL AND l.lease_until > strftime('%Y-%m-%d %H:%M:%f000', 'now') THEN 1 ELSE 0 END AS launch_live
FROM generations AS g JOIN runs AS r ON r.id = g.run_id JOIN repositories AS p ON p.id = r.repository_id
JOIN launches AS l ON l.id = g.launch_id
LEFT JOIN (
  SELECT q.generation_id AS generation_id, COUNT(*) AS ranks_expected,
         SUM(CASE WHEN q.state = 'durable' THEN 1 ELSE 0 END) AS ranks_durable,
         GROUP_CONCAT(CASE WHEN q.state <> 'durable' THEN q.rank END) AS missing_ranks
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
CREATE VIEW flush_errors AS
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
    r"""
CREATE VIEW stalls AS
SELECT p.uuid AS repository, r.name AS run, g.id AS generation_id, g.step AS step, g.state AS state,
       g.created_at AS created_at, k.stall_seconds AS stall_seconds, k.write_seconds AS write_seconds,
       k.nbytes AS nbytes, k.nbytes / NULLIF(k.write_seconds, 0) AS bytes_per_second,
       COALESCE(k.retries, 0) AS retries, (JULIANDAY(g.committed_at) - JULIANDAY(g.created_at)) * 86400.0 AS commit_seconds
FROM generations AS g JOIN runs AS r ON r.id = g.run_id JOIN repositories AS p ON p.id = r.repository_id
LEFT JOIN (
  SELECT generation_id, MAX(stall_seconds) AS stall_seconds, MAX(write_seconds) AS write_seconds,
         CAST(SUM(nbytes) AS BIGINT) AS nbytes, CAST(SUM(retries) AS BIGINT) AS retries
  FROM ranks GROUP BY generation_id
) AS k ON k.generation_id = g.id
""",
    r"""
CREATE VIEW space_by_run AS
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
