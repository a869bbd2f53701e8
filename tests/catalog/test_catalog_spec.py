"""spec/catalog.md says what the code does: picture, rules, tables, views, queries."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ckptfmt.catalog.schema import metadata
from ckptfmt.catalog.triggers import rules
from ckptfmt.catalog.views import VIEWS
from ckptfmt.format.states import INITIAL, TRANSITIONS
from ckptfmt.testing.catalogs import Job, MakeCatalog

SPEC = (Path(__file__).parents[2] / "spec" / "catalog.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", SPEC, re.DOTALL)


def _rows(title: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    section = re.split(rf"^#+ {re.escape(title)}$", SPEC, maxsplit=1, flags=re.MULTILINE)[1]
    lines = re.split(r"^#", section, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    table = [line for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]


def test_the_picture_is_the_transition_table() -> None:
    arrows = re.findall(r"^ +(\S+) --> (\w+)(?:: (\w+)( \(repair\))?)?$", SPEC, re.MULTILINE)
    drawn = {(source, target, name, bool(repair)) for source, target, name, repair in arrows if source != "[*]"}
    assert drawn == {(step.source, step.target, step.name, step.repair) for step in TRANSITIONS}
    assert [target for source, target, *_ in arrows if source == "[*]"] == [INITIAL]


def test_the_rules_are_the_triggers() -> None:
    written = {tuple(row) for row in _rows("Rules that hold for raw SQL too")}
    assert written == {(rule.table, rule.operation, rule.message) for rule in rules()}


@pytest.mark.parametrize("table", sorted(metadata.tables))
def test_every_column_of_a_table_is_told(table: str) -> None:
    rows = _rows(table)
    assert [row[0] for row in rows] == [column.name for column in metadata.tables[table].columns]
    assert all(len(row) == 2 and row[1] for row in rows)


@pytest.mark.parametrize("view", sorted(VIEWS))
def test_every_column_of_a_view_is_told(view: str, database: Path) -> None:
    contract = [[column.name, column.kind, column.meaning] for column in VIEWS[view].columns]
    assert _rows(view) == contract
    assert VIEWS[view].meaning in SPEC
    with closing(sqlite3.connect(database)) as connection:
        found = connection.execute(f"SELECT * FROM {view}").description
    assert [column[0] for column in found] == [column.name for column in VIEWS[view].columns]


@pytest.mark.parametrize("view", sorted(VIEWS))
def test_view_columns_have_the_kind_they_say(view: str, database: Path, make_catalog: MakeCatalog) -> None:
    history(make_catalog)
    types = {"text": str, "integer": int, "real": (int, float), "time": str}
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(f"SELECT * FROM {view}").fetchall()
    assert rows
    for row in rows:
        for column, value in zip(VIEWS[view].columns, row, strict=True):
            assert value is None or isinstance(value, types[column.kind]), (column.name, value)
            if column.kind == "time" and value is not None:
                assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}", value)


def test_the_dashboard_queries_run_on_plain_sqlite(database: Path, make_catalog: MakeCatalog) -> None:
    history(make_catalog)
    assert len(QUERIES) == 7
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        answers = [connection.execute(query).fetchall() for query in QUERIES]
    lag, latest, flight, errors, stalls, space, events = answers
    assert [row[0] for row in lag] == ["quiet"]
    assert [(row[0], row[2]) for row in latest] == [("llama", 2)]
    assert [(row[0], row[2], row[4], row[5]) for row in flight] == [("llama", "writing", "0/1", 0)]
    assert [(row[1], row[2], row[3]) for row in errors] == [("persist", "disk full", 1)]
    assert stalls[0][:4] == ("llama", 1, 0.25, 0.25)
    assert space[0] == ("llama", 1, 1000, 2, 1000)
    assert [row[2] for row in events] == ["begin", "durable", "commit", "prove", "retire"]


def history(make_catalog: MakeCatalog) -> None:
    """A committed, a retired, an aborted and an open generation, and a run that never saved."""
    catalog = make_catalog()
    job = Job.start(catalog)
    retired = job.proven(1)
    job.proven(2)
    catalog.retire(retired.id)
    job.aborted(3)
    job.begin(4)
    catalog.renew_lease(job.launch.id, lease_seconds=60, last_step=5)
    Job.start(catalog, "quiet")
