"""Boxes of many parts are brought into one order by strips, as they would be one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.format import merge_order
from ckptfmt.format.alike import Alike
from ckptfmt.format.merge_order import BoxOrder

TALL = merge_order._TALL
MANY = merge_order._STRIPS_FROM


def order(tables: list[list[int]], rows_of: list[list[int]]) -> BoxOrder:
    parts: Any = [SimpleNamespace(boxes=SimpleNamespace(tensor=table)) for table in tables]
    return BoxOrder(parts, rows_of)


def assert_ordered(found: BoxOrder, tables: list[list[int]], rows_of: list[list[int]]) -> None:
    flat = [rows[row] for table, rows in zip(tables, rows_of, strict=True) for row in table]
    assert found.at == sorted(range(len(flat)), key=lambda box: (flat[box], box))
    assert found.rows == sorted(flat)
    column = [f"box {number}" for number in range(len(flat))]
    assert found.taken(column) == [column[box] for box in found.at]


def test_parts_that_are_alike_make_one_strip_and_what_each_has_for_itself_is_none() -> None:
    height = TALL + 3
    tables = [list(range(height + 1))] * MANY
    rows_of = [[*range(height), height + rank] for rank in range(MANY)]
    found = order(tables, rows_of)
    assert [(strip.height, len(strip.at)) for strip in found._strips] == [(height, MANY), (1, MANY)]
    assert_ordered(found, tables, rows_of)


def test_low_strips_are_taken_box_by_box() -> None:
    tables = [list(range(TALL - 1))] * MANY
    found = order(tables, tables)
    assert found._strips == []
    assert_ordered(found, tables, tables)


def test_many_parts_without_any_boxes() -> None:
    tables: list[list[int]] = [[]] * MANY
    assert_ordered(order(tables, tables), tables, tables)


def test_what_was_changed_is_taken_as_it_is_now() -> None:
    tables = [list(range(TALL))] * MANY
    found = order(tables, tables)
    assert found._strips
    boxes = [rank * TALL for rank in range(MANY)]
    assert found.at[:MANY] == boxes
    found.change(0, 0, MANY, boxes[:1:-1])
    assert found.rows[: MANY - 1] == [0] * (MANY - 2) + [1]
    column = list(range(TALL * MANY))
    assert found.taken(column) == found.at
    assert found.at[: MANY - 2] == boxes[:1:-1]


@given(
    st.lists(
        st.lists(st.integers(0, 2 * TALL), unique=True).map(sorted) | st.just(list(range(2 * TALL))),
        min_size=MANY,
        max_size=MANY + 3,
    )
)
@settings(max_examples=60, deadline=None)
def test_parts_of_any_boxes(tables: list[list[int]]) -> None:
    rows_of = [list(range(2 * TALL + 1))] * len(tables)
    assert_ordered(order(tables, rows_of), tables, rows_of)


@given(st.lists(st.lists(st.integers(0, 60), max_size=2), max_size=200))
def test_answers_of_values_lately_met_are_those_of_the_values(values: list[list[int]]) -> None:
    made = []

    def total(value: list[int]) -> int:
        made.append(value)
        return sum(value)

    answer = Alike(total)
    assert [answer(value) for value in values] == [sum(value) for value in values]
    if len({tuple(value) for value in values}) <= 16:
        assert len(made) == len({tuple(value) for value in values})
