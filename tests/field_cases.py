"""Tables of what users met elsewhere, with the tests that it does not happen here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import ckptfmt


def assert_every_case_has_tests(table: str | None, cases: Sequence[int]) -> None:
    """``table`` has a row for each of ``cases``, in order, and the tests that it names exist."""
    rows = dict(re.findall(r"^\| (FR-\d+) \|.*\| (test_.*) \|$", table or "", re.MULTILINE))
    assert list(rows) == [f"FR-{number:03d}" for number in cases]
    tests, shipped = Path(__file__).parent, Path(ckptfmt.__file__).parent / "testing"
    written = "\n".join(path.read_text() for folder in (tests, shipped) for path in folder.rglob("*.py"))
    defined = set(re.findall(r"^ *def (test_\w+)\(", written, re.MULTILINE))
    for case, names in rows.items():
        assert set(names.split(", ")) <= defined, (case, set(names.split(", ")) - defined)
