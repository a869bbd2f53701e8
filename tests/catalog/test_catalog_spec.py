"""spec/catalog.md says what the code does: picture, rules, tables, views, queries."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ckptfmt.catalog.schema import metadata
from ckptfmt.catalog.triggers import rules
from ckptfmt.catalog.views import VIEWS
from ckptfmt.format.states import INITIAL, TRANSITIONS
from ckptfmt.testing.catalog_views import history
from ckptfmt.testing.catalogs import MakeCatalog

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


def test_the_dashboard_queries_run_on_plain_sqlite(database: Path, make_catalog: MakeCatalog) -> None:
    history(make_catalog)
    assert len(QUERIES) == 8
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        answers = [connection.execute(query).fetchall() for query in QUERIES]
    assert_answers(answers)


def assert_answers(answers: list[list[Any]]) -> None:
    """Those of the dashboard's queries to what ``history`` leaves, from any database."""
    lag, latest, flight, errors, stalls, space, behind, events = answers
    assert [row[0] for row in lag] == ["quiet"]
    assert [(row[0], row[2]) for row in latest] == [("llama", 2)]
    assert [(row[0], row[2], row[4], row[5]) for row in flight] == [("llama", "writing", "0/1", 0)]
    assert [(row[1], row[2], row[3]) for row in errors] == [("persist", "disk full", 1)]
    assert stalls[0][:2] == ("llama", 1)
    assert [float(seconds) for seconds in stalls[0][2:4]] == [0.25, 0.25]
    assert behind == []
    assert space[0] == ("llama", 1, 1000, 2, 1000)
    assert [row[2] for row in events] == ["begin", "durable", "commit", "prove", "retire"]
