"""Text for people: widths, colours, quantities; and nothing of a file reaches the terminal as a command."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest

from ckptfmt.cli import output
from ckptfmt.cli import quantities as q
from ckptfmt.cli.contents import json_value


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def page_text(stream: io.StringIO, *parts: str) -> str:
    page = output.Page(stream)
    page.line(*parts)
    page.flush()
    return stream.getvalue()


def test_styles_are_sent_to_a_terminal_only(terminal: Terminal) -> None:
    text = output.style("ok", "bold", "green")
    assert page_text(terminal, text, " then") == "\x1b[1m\x1b[32mok\x1b[0m then\n"
    assert page_text(io.StringIO(), text, " then") == "ok then\n"


def test_no_color_is_obeyed(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert page_text(terminal, output.style("ok", "red")) == "ok\n"


def test_lines_are_cut_to_the_terminal_and_whole_in_a_pipe(terminal: Terminal) -> None:
    long = "x" * 60
    assert page_text(io.StringIO(), long) == f"{long}\n"
    cut = page_text(terminal, output.style(long, "red"))
    assert cut == f"\x1b[31m{'x' * 39}…\x1b[0m\n"


def test_wide_characters_count_as_two_columns(terminal: Terminal) -> None:
    assert page_text(terminal, "重" * 20) == f"{'重' * 20}\n"
    assert page_text(Terminal(), "重" * 21) == f"{'重' * 19}…\x1b[0m\n"
    assert output.displayed("重み") == 4
    assert output.displayed("e\u0301") == 1


def test_control_characters_are_shown_and_not_sent(terminal: Terminal) -> None:
    text = page_text(terminal, "a\x1b]0;title\x07b\r\nc")
    assert text == "a\\x1b]0;title\\x07b\\r\\nc\n"
    assert page_text(io.StringIO(), "lone \ud800") == "lone \\ud800\n"


def test_tables_are_aligned_with_styles_and_numbers_to_the_right() -> None:
    stream = io.StringIO()
    page = output.Page(stream)
    page.table(("NAME", ">SIZE", ""), [(output.style("a", "bold"), "1.0 kB", ""), ("重み", "20 B", "note")])
    page.flush()
    assert stream.getvalue() == "NAME    SIZE\na     1.0 kB\n重み    20 B  note\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0000123, "12 us"),
        (0.0842, "84 ms"),
        (0.9996, "1.0 s"),
        (4.21, "4.2 s"),
        (12.4, "12 s"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (5 * 3600 + 720, "5 h 12 min"),
        (76 * 3600, "3 d 4 h"),
        (-5, "-5.0 s"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert q.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "just now"),
        (5, "5 s ago"),
        (59.7, "1 min ago"),
        (3599, "1 h ago"),
        (7300, "2 h ago"),
        (90000, "1 d ago"),
        (-30, "in 30 s"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    now = datetime(2026, 3, 1, tzinfo=UTC)
    assert q.age(now - timedelta(seconds=seconds), now) == text


def test_counts_and_shapes() -> None:
    assert [q.count(1, "run"), q.count(12345, "run"), q.count(2, "entry", "entries")] == [
        "1 run",
        "12,345 runs",
        "2 entries",
    ]
    assert [q.shape(()), q.shape((3, 4))] == ["[]", "[3, 4]"]
    assert [q.size(None), q.size(1_700_000_000), q.rate(10, 0), q.rate(2e6, 2)] == ["-", "1.7 GB", "-", "1.0 MB/s"]


def test_values_that_json_lacks_become_text() -> None:
    value = {"a": float("nan"), "b": -float("inf"), 3: (1, 2.5), "c": {1j}, "d": b"x", "e": [None, True]}
    assert json_value(value) == {"a": "nan", "b": "-inf", "3": [1, 2.5], "c": "{1j}", "d": "b'x'", "e": [None, True]}


def test_what_must_be_read_whole_is_wrapped(terminal: Terminal) -> None:
    page = output.Page(terminal)
    page.facts([("PROBLEM", page.paragraph("some words and more of them, for a narrow terminal", "red")), ("why", "x")])
    page.flush()
    lines = terminal.getvalue().splitlines()
    assert len(lines) == 4
    assert all("some words" not in line or "PROBLEM" in line for line in lines)
    assert "".join(lines).count("\x1b[31m") == 3
    assert output.Page(io.StringIO()).paragraph("a\n b") == "a b"
