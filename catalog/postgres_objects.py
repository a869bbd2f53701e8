"""Triggers, functions, views and constraints of a PostgreSQL catalog, compared with what they should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg

from ckptfmt.catalog.database import Problem
from ckptfmt.catalog.snapshot import Session, Snapshot
from ckptfmt.catalog.triggers import trigger_sql
from ckptfmt.catalog.view_sql import view_sql

if TYPE_CHECKING:
    from ckptfmt.catalog.postgres import PostgresSessions

_FUNCTIONS: Final = """
SELECT proname::text, prosrc FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
"""
_TRIGGERS: Final = """
SELECT t.tgname::text, c.relname::text, p.proname::text, t.tgtype, t.tgenabled::text,
       t.tgqual IS NULL AND t.tgattr::text = ''
FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid JOIN pg_proc AS p ON p.oid = t.tgfoid
WHERE c.relnamespace = current_schema()::regnamespace AND NOT t.tgisinternal ORDER BY t.tgname
"""
_VIEWS: Final = "SELECT viewname::text FROM pg_views WHERE schemaname = current_schema() ORDER BY viewname"
_CONSTRAINTS: Final = """
SELECT conname::text, convalidated FROM pg_constraint WHERE connamespace = current_schema()::regnamespace
"""
# https://www.postgresql.org/docs/current/catalog-pg-trigger.html; the bits are those of include/catalog/pg_trigger.h:
# 1 for each row, 2 before, 4 insert, 8 delete, 16 update, 32 truncate.
_ROW_GUARD: Final = 1 | 2 | 4 | 8 | 16
_TRUNCATE_GUARD: Final = 2 | 32


class _Trigger(NamedTuple):
    table: str
    function: str
    type: int
    enabled: str
    always: bool


def examined(snapshot: Snapshot, sessions: PostgresSessions) -> Iterator[Problem]:
    """What differs. ``sessions`` are for what cannot be asked in the transaction of ``snapshot``."""
    yield from _constraints(snapshot)
    yield from _guards(snapshot)
    yield from _views(snapshot, sessions)


def _constraints(snapshot: Snapshot) -> Iterator[Problem]:
    from ckptfmt.catalog.schema import metadata

    found: dict[str, bool] = dict(snapshot.rows(_CONSTRAINTS))
    for table in metadata.tables.values():
        for constraint in table.constraints:
            name = str(constraint.name)
            if name not in found:
                yield Problem(f"the constraint {name} of table {table.name} is missing; restore a backup")
            elif not found[name]:
                yield Problem(f"the constraint {name} of table {table.name} was never validated; restore a backup")


def _guards(snapshot: Snapshot) -> Iterator[Problem]:
    wanted = trigger_sql("postgresql")
    sources: dict[str, str] = dict(snapshot.rows(_FUNCTIONS))
    found = {name: _Trigger(*facts) for name, *facts in snapshot.rows(_TRIGGERS)}
    for name, sql in wanted.items():
        function = name.removesuffix("()")
        if function == name:
            yield from _guard(name, found.get(name))
        elif function not in sources:
            yield Problem(f"the function {name} is missing; restore a backup")
        elif sources[function] != sql.split("$ckptfmt$")[1]:
            yield Problem(f"the function {name} was changed; restore a backup")
    for name in sorted(set(found) - set(wanted)):
        yield Problem(f"the trigger {name} is none of ckptfmt's; drop it", foreign=True)


def _guard(name: str, found: _Trigger | None) -> Iterator[Problem]:
    function = name.removesuffix("_truncate")
    table = function.removeprefix("ckptfmt_").removesuffix("_guard")
    kind = _ROW_GUARD if function == name else _TRUNCATE_GUARD
    if found is None:
        yield Problem(f"the trigger {name} is missing; restore a backup")
    elif found not in {_Trigger(table, function, kind, enabled, True) for enabled in "OA"}:
        yield Problem(f"the trigger {name} was changed or disabled; restore a backup")


def _views(snapshot: Snapshot, sessions: PostgresSessions) -> Iterator[Problem]:
    found = {name for (name,) in snapshot.rows(_VIEWS)}
    wanted = view_sql("postgresql")
    for name in wanted:
        if name not in found:
            yield Problem(f"the view {name} is missing; restore a backup")
    for name in sorted(found - set(wanted)):
        yield Problem(f"the view {name} is none of ckptfmt's; drop it", foreign=True)
    try:
        with sessions.trial() as session:
            for name in sorted(found & set(wanted)):
                yield from _view(session, name, wanted[name])
    except (psycopg.errors.ReadOnlySqlTransaction, psycopg.errors.InsufficientPrivilege) as error:
        yield Problem(
            f"the views could not be compared ({error.diag.message_primary}): check the primary, as one who may make "
            "temporary views",
            foreign=True,
        )


def _view(session: Session, name: str, sql: str) -> Iterator[Problem]:
    """The server tells a view in words of its own: so it is asked to tell the one that should be, too."""
    session.execute("SAVEPOINT view")
    try:
        session.execute(sql.replace(f"CREATE VIEW {name} ", f"CREATE TEMPORARY VIEW ckptfmt_wanted_{name} "))
        same = "SELECT pg_get_viewdef(:found::regclass) = pg_get_viewdef(:wanted::regclass)"
        ((equal,),) = session.rows(same, found=name, wanted=f"ckptfmt_wanted_{name}")
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):  # told by the other checks
        equal = False
    session.execute("ROLLBACK TO SAVEPOINT view")
    if not equal:
        yield Problem(f"the view {name} was changed; restore a backup")
