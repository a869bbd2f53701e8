"""The rules that hold even for raw SQL, generated from ``ckptfmt.format.states``.

One list of rules is rendered for both databases: SQLite gets one trigger per rule, PostgreSQL one
plpgsql function per table with a trigger on it. ``spec/catalog.md`` states the rules in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ckptfmt.errors import InvalidInput
from ckptfmt.format.states import INITIAL, TRANSITIONS, Transition

Operation = Literal["INSERT", "UPDATE", "DELETE"]

IDENTITY_COLUMNS: Final = (
    "id",
    "repository_id",
    "run_id",
    "launch_id",
    "save_number",
    "key",
    "step",
    "fence",
    "world_size",
    "created_at",
)
"""Columns of a generation that never change."""

VERDICT_COLUMNS: Final = (
    "epoch",
    "commit_seq",
    "committed_at",
    "commit_fence",
    "parent_key",
    "manifest_name",
    "manifest_digest",
    "manifest_bytes",
    "nbytes",
    "tiers",
)
"""Columns of a generation that never change once it has been committed."""


@dataclass(frozen=True)
class Rule:
    """``condition`` (over OLD and NEW) says when ``operation`` on ``table`` is refused.

    ``{ne}`` in it is the null-safe "differs" of the database.
    """

    name: str
    table: str
    operation: Operation
    condition: str
    message: str


def _pair(step: Transition) -> str:
    pair = f"OLD.state = '{step.source}' AND NEW.state = '{step.target}'"
    if step.repair:
        # The evidence must come with the very statement that makes the repair.
        pair += " AND OLD.adopted_at IS NULL AND NEW.adopted_at IS NOT NULL AND NEW.adopted_by IS NOT NULL"
    return f"({pair})"


def _changed(columns: tuple[str, ...]) -> str:
    return " OR ".join(f'NEW."{name}" {{ne}} OLD."{name}"' for name in columns)


def rules() -> tuple[Rule, ...]:
    """Return every rule, in the order in which they are created."""
    return (*_generation_rules(), *_event_rules(), *_run_rules(), *_tier_rules(), *_replica_rules())


def _generation_rules() -> tuple[Rule, ...]:
    steps = " OR ".join(dict.fromkeys(_pair(step) for step in TRANSITIONS))
    return (
        Rule(
            "start",
            "generations",
            "INSERT",
            f"NEW.state <> '{INITIAL}' OR NEW.commit_seq IS NOT NULL OR NEW.adopted_at IS NOT NULL",
            f"a generation starts in state {INITIAL}",
        ),
        Rule(
            # INSERT OR REPLACE deletes the old row without firing delete triggers.
            "replace",
            "generations",
            "INSERT",
            "EXISTS (SELECT 1 FROM generations AS g WHERE g.id = NEW.id OR (g.launch_id = NEW.launch_id"
            ' AND g.save_number = NEW.save_number) OR (g.repository_id = NEW.repository_id AND g."key" = NEW."key"))',
            "a generation row is never replaced",
        ),
        Rule(
            "transition",
            "generations",
            "UPDATE",
            f"NEW.state <> OLD.state AND NOT ({steps})",
            "the state of a generation does not allow this transition",
        ),
        Rule(
            "identity",
            "generations",
            "UPDATE",
            _changed(IDENTITY_COLUMNS),
            "id, key, step and origin of a generation never change",
        ),
        Rule(
            "verdict",
            "generations",
            "UPDATE",
            f"OLD.commit_seq IS NOT NULL AND ({_changed(VERDICT_COLUMNS)})",
            "what was committed never changes",
        ),
        Rule(
            # UPDATE OR REPLACE would delete the committed row that has this number.
            "commit_seq",
            "generations",
            "UPDATE",
            "OLD.commit_seq IS NULL AND NEW.commit_seq IS NOT NULL AND EXISTS (SELECT 1 FROM generations AS g"
            " WHERE g.run_id = NEW.run_id AND g.epoch = NEW.epoch AND g.commit_seq = NEW.commit_seq)",
            "this commit_seq belongs to another generation",
        ),
        Rule("keep", "generations", "DELETE", "1 = 1", "a generation row is never deleted"),
    )


def _event_rules() -> tuple[Rule, ...]:
    return (
        Rule(
            "replace",
            "events",
            "INSERT",
            "EXISTS (SELECT 1 FROM events AS e WHERE e.id = NEW.id OR (e.run_id = NEW.run_id AND e.seq = NEW.seq))",
            "events are append-only",
        ),
        Rule("frozen", "events", "UPDATE", "1 = 1", "events are append-only"),
        Rule("keep", "events", "DELETE", "1 = 1", "events are append-only"),
    )


def _run_rules() -> tuple[Rule, ...]:
    return (
        Rule(
            "counters",
            "runs",
            "UPDATE",
            "NEW.fence < OLD.fence OR NEW.next_commit_seq < OLD.next_commit_seq",
            "fence and next_commit_seq of a run never go down",
        ),
        Rule("keep", "runs", "DELETE", "1 = 1", "a run row is never deleted"),
    )


def _tier_rules() -> tuple[Rule, ...]:
    return (
        Rule(
            "replace",
            "tiers",
            "INSERT",
            "EXISTS (SELECT 1 FROM tiers AS t WHERE t.id = NEW.id"
            " OR (t.repository_id = NEW.repository_id AND t.uuid = NEW.uuid))",
            "a tier row is never replaced",
        ),
        Rule(
            "identity",
            "tiers",
            "UPDATE",
            _changed(("id", "repository_id", "uuid", "role", "host", "created_at")),
            "uuid, role and host of a tier never change",
        ),
        Rule("keep", "tiers", "DELETE", "1 = 1", "a tier row is never deleted"),
    )


def _replica_rules() -> tuple[Rule, ...]:
    uses = "generation_packs AS u JOIN generations AS g ON g.id = u.generation_id"
    return (
        Rule(
            "kept",
            "replicas",
            "INSERT",
            f"NOT EXISTS (SELECT 1 FROM {uses} WHERE u.pack_id = NEW.pack_id AND g.state IN ('durable', 'committed'))",
            "a replica is one of a pack of a durable or committed generation",
        ),
        Rule(
            "identity",
            "replicas",
            "UPDATE",
            _changed(("pack_id", "tier_id")),
            "pack and tier of a replica never change",
        ),
        Rule(
            "whole",
            "replicas",
            "DELETE",
            "EXISTS (SELECT 1 FROM generation_packs AS u JOIN replicated_generations AS w"
            " ON w.generation_id = u.generation_id WHERE u.pack_id = OLD.pack_id AND w.tier_id = OLD.tier_id)",
            "a tier that holds a generation whole holds its packs",
        ),
        Rule(
            "whole",
            "replicated_generations",
            "INSERT",
            "NOT EXISTS (SELECT 1 FROM generations AS g WHERE g.id = NEW.generation_id AND g.state = 'committed')"
            " OR EXISTS (SELECT 1 FROM generation_packs AS u WHERE u.generation_id = NEW.generation_id AND NOT EXISTS"
            " (SELECT 1 FROM replicas AS x WHERE x.pack_id = u.pack_id AND x.tier_id = NEW.tier_id))",
            "a tier holds a committed generation whole once it holds its packs",
        ),
        Rule(
            "identity",
            "replicated_generations",
            "UPDATE",
            _changed(("generation_id", "tier_id")),
            "generation and tier of a whole replica never change",
        ),
    )


def trigger_sql(dialect: str) -> dict[str, str]:
    """Return ``{name: CREATE statement}`` in creation order, for ``sqlite`` or ``postgresql``."""
    if dialect == "sqlite":
        return {f"ckptfmt_{rule.table}_{rule.name}_{rule.operation.lower()}": _sqlite(rule) for rule in rules()}
    if dialect == "postgresql":
        return _postgresql()
    raise InvalidInput(f"no catalog triggers for the database {dialect!r}: use sqlite or postgresql")


def _sqlite(rule: Rule) -> str:
    condition = rule.condition.format(ne="IS NOT")
    name = f"ckptfmt_{rule.table}_{rule.name}_{rule.operation.lower()}"
    return (
        f"CREATE TRIGGER {name} BEFORE {rule.operation} ON {rule.table}\n"
        f"WHEN {condition}\n"
        f"BEGIN SELECT RAISE(ABORT, 'ckptfmt: {rule.message}'); END"
    )


def _postgresql() -> dict[str, str]:
    statements: dict[str, str] = {}
    for table in dict.fromkeys(rule.table for rule in rules()):
        name = f"ckptfmt_{table}_guard"
        statements[f"{name}()"] = _postgresql_function(name, table)
        statements[name] = (
            f"CREATE TRIGGER {name} BEFORE INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION {name}()"
        )
        statements[f"{name}_truncate"] = (
            f"CREATE TRIGGER {name}_truncate BEFORE TRUNCATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION {name}()"
        )
    return statements


def _postgresql_function(name: str, table: str) -> str:
    lines = [f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $ckptfmt$", "BEGIN"]
    lines += [
        "  IF TG_OP = 'TRUNCATE' THEN",
        f"    RAISE EXCEPTION 'ckptfmt: {table} is never truncated' USING ERRCODE = 'integrity_constraint_violation';",
        "  END IF;",
    ]
    for operation in ("INSERT", "UPDATE", "DELETE"):
        lines.append(f"  IF TG_OP = '{operation}' THEN")
        for rule in rules():
            # PostgreSQL has no REPLACE: unique constraints say it already, and "id" is unset before identity.
            if rule.table != table or rule.operation != operation or rule.name == "replace":
                continue
            lines += [
                f"    IF {rule.condition.format(ne='IS DISTINCT FROM')} THEN",
                f"      RAISE EXCEPTION 'ckptfmt: {rule.message}' USING ERRCODE = 'integrity_constraint_violation';",
                "    END IF;",
            ]
        lines += [f"    RETURN {'OLD' if operation == 'DELETE' else 'NEW'};", "  END IF;"]
    return "\n".join([*lines, "  RETURN NULL;", "END", "$ckptfmt$"])
