"""What spec/cli-json.md documents, and whether a JSON document is as it says."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

SPEC = Path(__file__).parents[1] / "spec" / "cli-json.md"


def documented() -> dict[str, dict[str, str]]:
    """Section -> field -> type, as the page has it."""
    sections: dict[str, dict[str, str]] = {}
    name = ""
    for line in SPEC.read_text().splitlines():
        if line.startswith("#"):
            name = line.lstrip("# ")
        elif found := re.match(r"\| `(\w+)` \| ([^|]+) \|", line):
            sections.setdefault(name, {})[found[1]] = re.sub(r"\[(\w+)\]\(#\w+\)", r"\1", found[2].strip())
    return sections


SECTIONS = documented()


def sections_by_report() -> dict[str, str]:
    """Value of the field `report` -> section."""
    found = {}
    name = ""
    for line in SPEC.read_text().splitlines():
        if line.startswith("#"):
            name = line.lstrip("# ")
        elif line.startswith("| `report` |"):
            found |= dict.fromkeys(re.findall(r"`([\w.]+)`", line)[1:], name)
    return found


BY_REPORT = sections_by_report()


def check(value: Any, kind: str, where: str) -> None:
    """Assert that a JSON value is of a documented type."""
    if kind.endswith(" or null"):
        if value is not None:
            check(value, kind.removesuffix(" or null"), where)
    elif kind.startswith("list of "):
        assert isinstance(value, list), where
        for number, item in enumerate(value):
            check(item, kind.removeprefix("list of "), f"{where}[{number}]")
    elif kind.startswith("map of "):
        assert isinstance(value, dict), where
        for key, item in value.items():
            check(item, kind.removeprefix("map of "), f"{where}.{key}")
    elif kind in SECTIONS:
        assert isinstance(value, dict), where
        assert list(value) == list(SECTIONS[kind]), where
        for key, item in value.items():
            check(item, SECTIONS[kind][key], f"{where}.{key}")
    elif kind == "time":
        assert isinstance(value, str), where
        assert value.endswith("Z"), where
        assert datetime.fromisoformat(value).tzinfo is not None, where
    elif kind != "any":
        kinds = {"text": str, "integer": int, "real": (int, float), "boolean": bool}[kind]
        assert isinstance(value, kinds), (where, value)
        assert kind == "boolean" or not isinstance(value, bool), where


def check_report(document: dict[str, Any]) -> None:
    """Assert that a whole document is as the section of its ``report`` says."""
    check(document, BY_REPORT[document["report"]], document["report"])
