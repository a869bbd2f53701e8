"""The tables of the catalog (``spec/catalog.md``).

Migrations own the schema of a database; this metadata is what queries are written against and what
``ckptfmt.catalog.upgrade.check`` compares a database with.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Identity,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
)

from ckptfmt.catalog.column_types import Document, UtcDateTime
from ckptfmt.format.states import State

metadata: Final = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite gives AUTOINCREMENT (ids are never reused) to INTEGER primary keys only.
_BIG = BigInteger().with_variant(Integer(), "sqlite")
_JSON = Document()


def _one_of(column: str, values: list[str]) -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


def _id() -> Column[int]:
    return Column("id", _BIG, Identity(always=False), primary_key=True)


def _number(name: str, *, nullable: bool = False, **kw: Any) -> Column[int]:
    return Column(name, BigInteger().with_variant(Integer(), "sqlite"), nullable=nullable, **kw)


def _reference(name: str, target: str, *, nullable: bool = False, **kw: Any) -> Column[int]:
    return Column(name, BigInteger().with_variant(Integer(), "sqlite"), ForeignKey(target), nullable=nullable, **kw)


def _text(name: str, *, nullable: bool = False) -> Column[str]:
    return Column(name, Text(), nullable=nullable)


def _time(name: str, *, nullable: bool = False) -> Column[Any]:
    return Column(name, UtcDateTime(), nullable=nullable)


catalog_meta = Table(
    "catalog_meta",
    metadata,
    Column("id", Integer(), primary_key=True, autoincrement=False),
    _text("uuid"),
    _number("epoch"),
    _time("created_at"),
    CheckConstraint("id = 1", name="one_row"),
    CheckConstraint("epoch >= 1", name="epoch"),
)

repositories = Table(
    "repositories",
    metadata,
    _id(),
    _text("uuid"),
    _text("url"),
    _time("created_at"),
    UniqueConstraint("uuid"),
    sqlite_autoincrement=True,
)

runs = Table(
    "runs",
    metadata,
    _id(),
    _reference("repository_id", "repositories.id"),
    _text("name"),
    _text("key"),
    _number("fence", server_default="0"),
    _number("next_commit_seq", server_default="1"),
    Column("retention_hold", Boolean(), nullable=False, server_default=false()),
    _time("created_at"),
    UniqueConstraint("repository_id", "name"),
    UniqueConstraint("repository_id", "key"),
    sqlite_autoincrement=True,
)

launches = Table(
    "launches",
    metadata,
    _id(),
    _reference("run_id", "runs.id"),
    _text("token"),
    _text("kind"),
    _number("fence"),
    _text("host"),
    _number("pid"),
    _text("boot_id"),
    _text("pid_started"),
    _number("world_size"),
    _text("restored_from", nullable=True),
    _number("last_step", nullable=True),
    _time("lease_until"),
    _time("created_at"),
    _time("closed_at", nullable=True),
    CheckConstraint(_one_of("kind", ["training", "recover"]), name="kind"),
    CheckConstraint("world_size >= 1", name="world_size"),
    UniqueConstraint("run_id", "token"),
    UniqueConstraint("run_id", "fence"),
    Index(None, "restored_from"),
    sqlite_autoincrement=True,
)

launch_ranks = Table(
    "launch_ranks",
    metadata,
    _reference("launch_id", "launches.id", primary_key=True),
    _number("rank", primary_key=True, autoincrement=False),
    _text("host"),
    _number("pid"),
    _text("boot_id"),
    _text("pid_started"),
    _time("joined_at"),
)

messages = Table(
    "messages",
    metadata,
    _reference("launch_id", "launches.id", primary_key=True),
    Column("topic", Text(), primary_key=True),
    _number("rank", primary_key=True, autoincrement=False),
    Column("body", _JSON, nullable=False),
    _time("at"),
)

generations = Table(
    "generations",
    metadata,
    _id(),
    _reference("repository_id", "repositories.id"),
    _reference("run_id", "runs.id"),
    _reference("launch_id", "launches.id"),
    _number("save_number"),
    _text("key"),
    _number("step"),
    _text("state"),
    _number("fence"),
    _number("world_size"),
    _text("parent_key", nullable=True),
    _number("epoch"),
    _number("commit_seq", nullable=True),
    _text("manifest_name", nullable=True),
    _text("manifest_digest", nullable=True),
    _number("manifest_bytes", nullable=True),
    _number("nbytes", nullable=True),
    _time("created_at"),
    _time("deadline", nullable=True),
    _time("durable_at", nullable=True),
    _time("committed_at", nullable=True),
    _number("commit_fence", nullable=True),
    _time("proven_at", nullable=True),
    _time("aborted_at", nullable=True),
    _text("abort_stage", nullable=True),
    _number("abort_rank", nullable=True),
    _text("abort_reason", nullable=True),
    _time("quarantined_at", nullable=True),
    _text("quarantine_reason", nullable=True),
    _time("retired_at", nullable=True),
    _time("swept_at", nullable=True),
    _time("adopted_at", nullable=True),
    _text("adopted_by", nullable=True),
    _text("tiers", nullable=True),
    CheckConstraint(_one_of("state", [state.value for state in State]), name="state"),
    CheckConstraint(
        "state NOT IN ('durable', 'committed', 'retired') OR (manifest_name IS NOT NULL"
        " AND manifest_digest IS NOT NULL AND manifest_bytes IS NOT NULL AND nbytes IS NOT NULL)",
        name="durable_facts",
    ),
    CheckConstraint(
        "state NOT IN ('committed', 'retired') OR (commit_seq IS NOT NULL"
        " AND committed_at IS NOT NULL AND commit_fence IS NOT NULL)",
        name="commit_facts",
    ),
    CheckConstraint("commit_seq IS NULL OR state IN ('committed', 'retired', 'deleted')", name="commit_seq"),
    CheckConstraint(
        "state <> 'aborted' OR (aborted_at IS NOT NULL AND abort_stage IS NOT NULL AND abort_reason IS NOT NULL)",
        name="abort_facts",
    ),
    UniqueConstraint("repository_id", "key"),
    UniqueConstraint("run_id", "epoch", "commit_seq"),
    UniqueConstraint("launch_id", "save_number"),
    Index(None, "repository_id", "state", "epoch", "commit_seq"),
    Index(None, "run_id", "state", "epoch", "commit_seq"),
    Index(None, "run_id", "step"),
    sqlite_autoincrement=True,
)

saves = Table(
    "saves",
    metadata,
    _reference("launch_id", "launches.id", primary_key=True),
    _number("n", primary_key=True, autoincrement=False),
    _reference("run_id", "runs.id"),
    _number("step"),
    _text("outcome"),
    _reference("generation_id", "generations.id", nullable=True),
    Column("tags", _JSON, nullable=False),
    _time("created_at"),
    CheckConstraint(
        "(outcome = 'begun' AND generation_id IS NOT NULL) OR (outcome = 'skipped' AND generation_id IS NULL)",
        name="outcome",
    ),
    UniqueConstraint("generation_id"),
)

ranks = Table(
    "ranks",
    metadata,
    _reference("generation_id", "generations.id", primary_key=True),
    _number("rank", primary_key=True, autoincrement=False),
    _text("state"),
    _text("part_name", nullable=True),
    _text("part_digest", nullable=True),
    _number("nbytes", nullable=True),
    Column("stall_seconds", Float(53), nullable=True),
    Column("write_seconds", Float(53), nullable=True),
    _number("retries"),
    _text("error", nullable=True),
    _time("updated_at"),
    _text("staged_tier", nullable=True),
    _number("staged_bytes", nullable=True),
    Column("staged_seconds", Float(53), nullable=True),
    _time("staged_at", nullable=True),
    _time("durable_at", nullable=True),
    _number("replicated_bytes", nullable=True),
    CheckConstraint(_one_of("state", ["writing", "staged", "durable", "failed"]), name="state"),
    CheckConstraint(
        "state <> 'durable' OR (part_name IS NOT NULL AND part_digest IS NOT NULL)",
        name="durable_part",
    ),
)

packs = Table(
    "packs",
    metadata,
    _id(),
    _reference("repository_id", "repositories.id"),
    _text("generation_key"),
    _text("name"),
    _number("rank"),
    _number("nbytes"),
    _text("header_digest"),
    UniqueConstraint("repository_id", "generation_key", "name"),
    sqlite_autoincrement=True,
)

generation_packs = Table(
    "generation_packs",
    metadata,
    _reference("generation_id", "generations.id", primary_key=True),
    _reference("pack_id", "packs.id", primary_key=True),
    Index(None, "pack_id"),
)

tiers = Table(
    "tiers",
    metadata,
    _id(),
    _reference("repository_id", "repositories.id"),
    _text("uuid"),
    _text("role"),
    _text("url"),
    _text("host", nullable=True),
    _time("created_at"),
    _time("forgotten_at", nullable=True),
    CheckConstraint(_one_of("role", ["durable", "stage", "replica"]), name="role"),
    CheckConstraint("role <> 'stage' OR host IS NOT NULL", name="stage_host"),
    UniqueConstraint("repository_id", "uuid"),
    sqlite_autoincrement=True,
)

replicas = Table(
    "replicas",
    metadata,
    _reference("pack_id", "packs.id", primary_key=True),
    _reference("tier_id", "tiers.id", primary_key=True),
    _text("name"),
    _time("verified_at"),
    Index(None, "tier_id"),
)

replicated_generations = Table(
    "replicated_generations",
    metadata,
    _reference("generation_id", "generations.id", primary_key=True),
    _reference("tier_id", "tiers.id", primary_key=True),
    _time("replicated_at"),
    Index(None, "tier_id"),
)

tags = Table(
    "tags",
    metadata,
    _reference("run_id", "runs.id", primary_key=True),
    Column("name", Text(), primary_key=True),
    _reference("generation_id", "generations.id"),
    _time("tagged_at"),
    Index(None, "generation_id"),
)

pins = Table(
    "pins",
    metadata,
    _reference("generation_id", "generations.id", primary_key=True),
    _text("reason"),
    _text("pinned_by"),
    _time("pinned_at"),
)

readers = Table(
    "readers",
    metadata,
    _id(),
    _reference("generation_id", "generations.id"),
    _text("host"),
    _number("pid"),
    _time("opened_at"),
    _time("expires_at"),
    Index(None, "generation_id"),
    sqlite_autoincrement=True,
)

events = Table(
    "events",
    metadata,
    _id(),
    _reference("run_id", "runs.id"),
    _number("seq"),
    _reference("generation_id", "generations.id", nullable=True),
    _time("at"),
    _text("kind"),
    _text("from_state", nullable=True),
    _text("to_state", nullable=True),
    _text("actor"),
    Column("detail", _JSON, nullable=False),
    _text("library"),
    UniqueConstraint("run_id", "seq"),
    Index(None, "generation_id"),
    sqlite_autoincrement=True,
)
