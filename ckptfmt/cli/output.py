"""Text or JSON of one frozen report; plain where nobody looks, aligned and coloured on a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

from ckptfmt.engine.reports import Report

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
# Inside a page a style is one private-use character, so that text from files can never carry an escape sequence.
_MARKS = {name: chr(0xE001 + number) for number, name in enumerate(_CODES)}
_END = "\ue000"
_SEQUENCES = {_END: "\x1b[0m", **{mark: f"\x1b[{_CODES[name]}m" for name, mark in _MARKS.items()}}
_ANY_MARK = re.compile(f"[{''.join(_SEQUENCES)}]")

Render = Callable[["Page"], None]


def emit(report: Report, render: Render, *, as_json: bool) -> None:
    """Print one report: as a JSON document, or as the page that ``render`` writes."""
    if as_json:
        write_json(report.as_json())
        return
    page = Page(sys.stdout)
    render(page)
    page.flush()


def write_json(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def is_terminal(stream: IO[str]) -> bool:
    return stream.isatty()


def coloured(stream: IO[str]) -> bool:
    """Colour only on a terminal that has it, and unless NO_COLOR says no (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Page:
    """Lines of text. On a terminal they are cut to its width; in a pipe they are whole and without colour."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._colour = coloured(stream)
        self._width = shutil.get_terminal_size().columns if is_terminal(stream) else None
        self._lines: list[str] = []

    @property
    def width(self) -> int | None:
        """Columns of the terminal, None in a pipe."""
        return self._width

    def line(self, *parts: str) -> None:
        """One line. Control characters in it are shown, not sent."""
        text = "".join(parts).rstrip()
        if self._width is not None:
            text = crop(text, self._width)
        self._lines.append(_ANY_MARK.sub(self._sequence, clean(text)))

    def _sequence(self, mark: re.Match[str]) -> str:
        return _SEQUENCES[mark[0]] if self._colour else ""

    def blank(self) -> None:
        self._lines.append("")

    def heading(self, text: str) -> None:
        self.line(style(text, "bold"))

    def facts(self, pairs: Iterable[tuple[str, str]], indent: int = 2) -> None:
        """Aligned ``name  value`` lines; a value of several lines is continued under itself."""
        rows = [(name, value) for name, value in pairs if value]
        column = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            for number, part in enumerate(value.split("\n")):
                label = style(f"{name if number == 0 else '':<{column}}", "dim")
                self.line(" " * indent, label, "  ", part)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], indent: int = 0) -> None:
        """Aligned columns; a heading that begins with ``>`` is a column of numbers, aligned right."""
        right = [name.startswith(">") for name in columns]
        names = [style(name.lstrip(">"), "dim") for name in columns]
        columns_of_text = [[clean(cell) for cell in column] for column in zip(names, *rows, strict=True)]
        padded = [_padded(column, at) for column, at in zip(columns_of_text, right, strict=True)]
        for cells in zip(*padded, strict=True):
            self.line(" " * indent, "  ".join(cells))

    def paragraph(self, text: str, *names: str, beside: int = 16) -> str:
        """Text that must be read whole: wrapped on a terminal to what ``beside`` columns leave, in a pipe one line."""
        lines = [" ".join(text.split())]
        if self._width is not None:
            lines = textwrap.wrap(text, max(20, self._width - beside)) or lines
        return "\n".join(style(line, *names) for line in lines)

    def flush(self) -> None:
        self._stream.write("".join(f"{line}\n" for line in self._lines))
        self._lines.clear()


def _padded(column: Sequence[str], right: bool) -> list[str]:
    """All cells as wide as the widest."""
    widths = [displayed(cell) for cell in column]
    widest = max(widths)
    spaces = [" " * (widest - width) for width in widths]
    return [space + cell if right else cell + space for cell, space in zip(column, spaces, strict=True)]


def style(text: str, *names: str) -> str:
    """``text`` in a style: bold, dim, red, green, yellow, cyan. Pages without colour drop it."""
    return f"{''.join(_MARKS[name] for name in names)}{text}{_END}" if text and names else text


def clean(text: str) -> str:
    """Names and reasons come from files: control characters and lone surrogates are shown as escapes."""
    if text.isprintable() or _ANY_MARK.sub("", text).isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in _SEQUENCES else c.encode("unicode_escape").decode("ascii") for c in text
    )


def displayed(text: str) -> int:
    """Columns that a line takes on a terminal."""
    text = _ANY_MARK.sub("", text)
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(character: str) -> int:
    if character in _SEQUENCES or unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def crop(line: str, width: int) -> str:
    """Cut a line to ``width`` columns, ending in an ellipsis."""
    if displayed(line) <= width:
        return line
    kept, used = [], 0
    for character in line:
        if used + _columns(character) > width - 1:
            break
        kept.append(character)
        used += _columns(character)
    return f"{''.join(kept)}…{_END}"
