"""spec/cli-json.md is the contract: fields of the reports and of real output are exactly those that it documents."""

from __future__ import annotations

import dataclasses
import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from cli_fixtures import begin, launch, ok_json, run, save_steps, site_of

import ckptfmt
from ckptfmt.cli import (
    comparison,
    contents,
    database,
    generation_view,
    history,
    listing,
    rebuilt,
    repository_view,
    resume,
    run_view,
    tensor_view,
    upkeep,
    verification,
)
from ckptfmt.doctor import report as diagnosis
from ckptfmt.engine import reports
from ckptfmt.measure import report as bench

SPEC = Path(__file__).parents[2] / "spec" / "cli-json.md"
ROOMS = (
    bench,
    comparison,
    contents,
    database,
    diagnosis,
    generation_view,
    history,
    listing,
    rebuilt,
    repository_view,
    resume,
    run_view,
    tensor_view,
    upkeep,
    verification,
)
FROM_THE_LIBRARY = {
    "GcItem",
    "GcReport",
    "GenerationInfo",
    "Problem",
    "RebuildReport",
    "RebuiltGeneration",
    "RebuiltRun",
    "RecoverAction",
    "RecoverReport",
    "RunInfo",
    "SetApart",
    "VerifyReport",
}


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


def report_classes() -> dict[str, type]:
    found = {
        name: value
        for room in ROOMS
        for name, value in vars(room).items()
        if isinstance(value, type) and issubclass(value, reports.Report) and value.__module__ == room.__name__
    }
    return found | {name: getattr(reports, name) for name in FROM_THE_LIBRARY}


def test_every_report_is_documented_field_by_field_in_order() -> None:
    for name, kind in report_classes().items():
        assert list(SECTIONS.get(name, {})) == [field.name for field in dataclasses.fields(kind)], name


def test_nothing_is_documented_that_is_not_there() -> None:
    assert set(SECTIONS) - report_classes().keys() == {"Errors"}


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


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in which most fields have something to tell."""
    url = tmp_path_factory.mktemp("json") / "ckpts"
    save_steps(url, 10, 20, 30, tags=["best"])
    with site_of(url) as site:
        held = launch(site)
        failed = begin(site, held, 40)
        site.sql().abort(failed, stage="persist", rank=0, reason="disk on fire", fence=held.fence)
        begin(site, held, 50, n=1)
        site.sql().quarantine(3, reason="loss is NaN")
        site.sql().close_launch(held.id)
    with site_of(url) as site:
        launch(site)  # stays alive: nobody else holds the run
    return url


BOTH_WAYS = [
    (["ls", ""], "runs"),
    (["ls", "#train", "--all"], "generations"),
    (["inspect", ""], "repository"),
    (["inspect", "#train"], "run"),
    (["inspect", "#train@2"], "generation"),
    (["inspect", "#train@2", "--tensor", "tied.1"], "tensor"),
    (["verify", "#train", "--all"], "verify"),
    (["diff", "#train@1", "@2"], "diff"),
]
BY_CATALOG = [
    (["inspect", "#train@4"], "generation"),
    (["gc", ""], "gc"),
    (["recover", "", "--dry-run"], "recover"),
    (["db current", ""], "db.current"),
    (["db upgrade", ""], "db.upgrade"),
    (["db check", ""], "db.check"),
    (["db hold", ""], "db.hold"),
]


@pytest.mark.parametrize(
    ("arguments", "report"),
    [*BOTH_WAYS, *BY_CATALOG, *(([*given, "--catalog", "none"], report) for given, report in BOTH_WAYS)],
)
def test_real_output_is_as_documented(eventful: Path, arguments: list[str], report: str) -> None:
    verb, place, *rest = arguments
    document = ok_json(*verb.split(), f"{eventful}{place}", *rest)
    assert document["report"] == report
    check(document, BY_REPORT[report], report)


def test_backup_is_as_documented(eventful: Path, tmp_path: Path) -> None:
    check(ok_json("db", "backup", eventful, tmp_path / "copy"), "Backup", "db.backup")


def test_a_rebuild_is_as_documented(eventful: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(eventful, tmp_path / "copy")
    (copy / "catalog.sqlite").write_bytes(b"no database")
    (next(copy.glob("runs/*/*/COMMIT.json"))).write_bytes(b"")
    check(document := ok_json("db", "rebuild", copy), BY_REPORT["db.rebuild"], "db.rebuild")
    assert document["rebuild"]["changes"]
    assert document["rebuild"]["left_out"]
    check(ok_json("db", "adopt", copy), BY_REPORT["db.adopt"], "db.adopt")
    check(ok_json("db", "hold", copy, "--clear"), BY_REPORT["db.hold"], "db.hold")


def test_what_is_tried_in_a_place_is_as_documented(tmp_path: Path) -> None:
    check(ok_json("doctor", tmp_path), BY_REPORT["doctor"], "doctor")
    check(ok_json("bench", tmp_path, "--bytes", "1M", "--saves", "2"), BY_REPORT["bench"], "bench")


def test_damage_is_as_documented(tmp_path: Path) -> None:
    ckptfmt.save({"w": b"x" * 5000}, tmp_path, run="train")
    next(tmp_path.glob("runs/*/*/r00000-p000.safetensors")).write_bytes(b"")
    document = run("verify", tmp_path, "--json").json()
    check(document, "Verification", "verify")
    assert document["generations"][0]["problems"]


def test_errors_are_as_documented() -> None:
    document = run("ls", "/no/such/place", "--json").json()
    assert list(document) == ["error"]
    check(document["error"], "Errors", "error")


def test_every_exit_code_is_documented() -> None:
    from ckptfmt.cli import exit_codes

    codes = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    rows = re.findall(r"^\| (\d+) \|", SPEC.read_text(), re.MULTILINE)
    assert {int(row) for row in rows} == codes
