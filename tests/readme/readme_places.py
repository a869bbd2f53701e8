"""The README's section on other tools: its tables, and the snippets beneath what their rows link to."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from test_readme import README

CKPTS = "/ckpts"
SECTION = re.search(r"^## In other tools\n.*?(?=^## )", README, flags=re.MULTILINE | re.DOTALL)[0]  # type: ignore[index]
PREAMBLE = "in-other-tools"

# A fold with a name, the end of one, a heading (whose name is what GitHub makes of it), a snippet.
_MARKS = re.compile(
    r'^<details id="(?P<fold>[^"]+)">|^(?P<end></details>)'
    r"|^#{2,4} (?P<heading>[^\n]+)$|^```python\n(?P<snippet>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)

ELSEWHERE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ckptfmt":
            raise ImportError("ckptfmt is not there")

sys.meta_path.insert(0, Blocked())
"""


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _places() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    name = heading = PREAMBLE
    for mark in _MARKS.finditer(SECTION):
        if mark["snippet"] is not None:
            found[name].append(mark["snippet"])
            continue
        if mark["heading"]:
            heading = _slug(mark["heading"])
        name = mark["fold"] or heading
        if not mark["end"]:
            assert name not in found, f"two places are called #{name}"
            found[name] = []
    return found


SNIPPETS = _places()
"""Place -> its snippets. A place is a heading or a fold."""


def table(first_column: str) -> list[list[str]]:
    """The rows of the table whose head begins so, without the head."""
    rows = re.search(rf"^\| {first_column} \|.*\n\| ---.*\n((?:\|.*\n)+)", SECTION, flags=re.MULTILINE)
    assert rows is not None, f"there is no table of {first_column}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1].splitlines()]


def place_of(cell: str) -> str:
    """Where its first link leads, within the page."""
    link = re.search(r"\]\(#([^)]+)\)", cell)
    assert link is not None, f"{cell} has no link to its snippet"
    return link[1]


def run(place: str, names: dict[str, Any], ckpts: Path, number: int = 0, **replaced: str) -> dict[str, Any]:
    """Run a snippet of ``place`` where ``names`` are taken for granted, on the repository ``ckpts``; all names it left.
    ``replaced``: parameter -> the value that it has here."""
    code = SNIPPETS[place][number].replace(CKPTS, str(ckpts))
    for name, value in replaced.items():
        code, times = re.subn(rf"\b{name}=\w+", f"{name}={value}", code)
        assert times == 1, f"{name} stands {times} times in the snippet"
    exec(compile(code, f"README.md#{place}", "exec"), names)
    return names


def elsewhere(place: str, ckpts: Path, shown: str, given: str = "") -> str:
    """What the expression ``shown`` comes to after the first snippet of ``place``, in a process without ckptfmt.
    ``given`` makes what the snippet takes for granted."""
    code = "\n".join((ELSEWHERE, given, SNIPPETS[place][0].replace(CKPTS, str(ckpts)), f"print({shown})"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ckpts.parent
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def before(place: str, ckpts: Path) -> None:
    """Run what the table tells to do before a tool opens ``place``, in the folder that holds ``ckpts``."""
    (commands,) = [row[3] for row in table("tool") if place_of(row[0]) == place]
    (command,) = re.findall(r"`ckptfmt ([^`]+)`", commands)
    words = command.replace(CKPTS, str(ckpts)).split()
    command_line = [sys.executable, "-m", "ckptfmt.cli.main", *words]
    subprocess.run(command_line, check=True, cwd=ckpts.parent, capture_output=True)


def snippets_run(tests: Path, *by: str) -> set[tuple[str, int]]:
    """(place, number) of the snippets that the test functions of a file give to one of the functions ``by``."""
    functions = [node for node in ast.parse(tests.read_text()).body if isinstance(node, ast.FunctionDef)]
    found = set()
    for call in [node for one in functions if one.name.startswith("test_") for node in ast.walk(one)]:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in by:
            numbers = [word.value for word in call.keywords if word.arg == "number"] or [ast.Constant(0)]
            found.add((ast.literal_eval(call.args[0]), ast.literal_eval(numbers[0])))
    return found
