"""The damage matrix in the log of the tests, made of their results."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_LETTERS = {
    "caught": "C",
    "fell back": "F",
    "not read": "-",
    "older": "o",
    "older, told": "O",
    "opened": "R",
    "made again": "M",
}
_rows: dict[tuple[str, str], dict[str, str]] = {}


@pytest.fixture
def record_damage() -> Callable[[str, str, str, str], None]:
    def record(thing: str, kind: str, path: str, word: str) -> None:
        _rows.setdefault((thing, kind), {})[path] = word

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _rows:
        return
    write = terminalreporter.write_line
    paths = list(dict.fromkeys(path for row in _rows.values() for path in row))
    terminalreporter.write_sep("=", "damage matrix")
    for number, path in enumerate(paths):
        write(f"{' ' * 46}{'| ' * number}{path}")
    for (thing, kind), row in _rows.items():
        write(f"{thing:<26}{kind:<20}{' '.join(_LETTERS.get(row.get(path, ''), '!') for path in paths)}")
    counts: dict[str, int] = {}
    for row in _rows.values():
        for word in row.values():
            counts[word] = counts.get(word, 0) + 1
    meaning = {
        "caught": "an error or report that names the object (and, in packs, the offset)",
        "fell back": "the older generation on request, logged and reported",
        "not read": "the right bytes; nothing of the damaged ones was looked at",
        "older": "the generation before, as the format's rules have it",
        "older, told": "the same, and a warning names the object",
        "made again": "a writer made it again, byte for byte",
        "opened": "the right bytes of a generation whose tombstone is gone",
    }
    for word, count in sorted(counts.items(), key=lambda item: -item[1]):
        write(f"{_LETTERS.get(word, '!')} {word}: {count} ({meaning.get(word, 'A FAULT')})")
