"""spec/cli-json.md is the contract: fields of the reports and of real output are exactly those that it documents."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
from cli_fixtures import begin, launch, ok_json, run, save_steps, site_of
from json_contract import BY_REPORT, SECTIONS, SPEC, check, check_report

import ckptfmt
from ckptfmt.cli import (
    comparison,
    contents,
    database,
    foreign_comparison,
    foreign_view,
    generation_view,
    history,
    listing,
    rebuilt,
    replication,
    repository_view,
    resume,
    run_view,
    tensor_view,
    upkeep,
    verification,
)
from ckptfmt.demo import killer, s3_report
from ckptfmt.demo import report as demo
from ckptfmt.demo.ranks import aim
from ckptfmt.demo.ranks import judge as ranks_judge
from ckptfmt.demo.ranks import report as ranks_demo
from ckptfmt.doctor import report as diagnosis
from ckptfmt.engine import reports
from ckptfmt.engine.keep import lag, repair
from ckptfmt.exchange import importing, kerchunk, ocdbt_export, safetensors_export
from ckptfmt.measure import report as bench

ROOMS = (
    bench,
    comparison,
    contents,
    database,
    diagnosis,
    foreign_comparison,
    foreign_view,
    generation_view,
    history,
    lag,
    importing,
    kerchunk,
    ocdbt_export,
    listing,
    rebuilt,
    repair,
    replication,
    repository_view,
    resume,
    run_view,
    safetensors_export,
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
    "VerifiedTier",
    "VerifyReport",
}

OF_A_DEMO: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        demo.Life,
        demo.CommitFigures,
        killer.Kill,
        s3_report.SaveMoments,
        s3_report.Inference,
        aim.RankKill,
        ranks_judge.Findings,
    )
}


def report_classes() -> dict[str, type]:
    found = {
        name: value
        for room in ROOMS
        for name, value in vars(room).items()
        if isinstance(value, type) and issubclass(value, reports.Report) and value.__module__ == room.__name__
    }
    return found | {name: getattr(reports, name) for name in FROM_THE_LIBRARY} | OF_A_DEMO


def test_every_report_is_documented_field_by_field_in_order() -> None:
    for name, kind in report_classes().items():
        assert list(SECTIONS.get(name, {})) == [field.name for field in dataclasses.fields(kind)], name


def test_nothing_is_documented_that_is_not_there() -> None:
    assert set(SECTIONS) - report_classes().keys() == {"Errors", "DemoReport", "S3Report", "RanksReport"}


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
    (["replicate", ""], "replicate"),
    (["replicate", "", "--repair"], "replicate"),
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


def test_an_export_is_as_documented(eventful: Path, tmp_path: Path) -> None:
    document = ok_json("export", f"{eventful}#train@2", "--kerchunk", tmp_path / "refs.json")
    check(document, BY_REPORT["export.kerchunk"], "export.kerchunk")
    document = ok_json("export", f"{eventful}#train@2", "--ocdbt")
    check(document, BY_REPORT["export.ocdbt"], "export.ocdbt")


def test_what_goes_out_and_comes_in_is_as_documented(eventful: Path, tmp_path: Path) -> None:
    place = tmp_path / "out"
    check_report(ok_json("export", f"{eventful}#train@2", "--safetensors", place, "--dtype", "bfloat16"))
    file = place / "model.safetensors"
    check_report(ok_json("import", file, f"{tmp_path / 'r'}#base", "--step", "4", "--tag", "first"))
    check_report(ok_json("inspect", file, "--tensors"))
    check_report(ok_json("inspect", file, "--tensor", "model.w"))
    check_report(ok_json("diff", file, f"{eventful}#train@2"))
    verified = run("verify", file, "--json")
    assert verified.code == 12
    check_report(verified.json())


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


SAVES = demo.CommitFigures(3, 1000, 0.1, 0.2, 0.3, 1e6)


def test_a_demo_is_as_documented() -> None:
    kill = killer.Kill(2, 10, "writing")
    lives = (demo.Life("life-001", None, None, None, 11, True, kill), demo.Life("life-002", 1, 5, 0.5, 9, True, None))
    found = demo.DemoReport("/ckpts", 20, 9.5, lives, 11.0, 10.0, {"model": 12}, SAVES).as_json()
    assert (found["kills"], found["kills_while_writing"], found["resumes"], found["exact_resumes"]) == (1, 1, 1, 1)
    check_report(json.loads(json.dumps(found)))


def test_a_demo_on_an_object_store_is_as_documented() -> None:
    kill = killer.Kill(2, 10, "writing", True)
    life = demo.Life("life-001", None, None, None, 11, True, kill)
    plain = demo.DemoReport("s3://b/demo", 20, 9.5, (life,), 11.0, 10.0, {"model": 12}, SAVES)
    found = s3_report.S3Report.of(
        plain,
        catalog="sqlite:////c",
        stage="/stage",
        moments=[s3_report.SaveMoments(2, 10, None, 1.0, 1.5, "restart")],
        inference=s3_report.Inference("s3://b/demo#demo", 0.5, 1000, 12),
    )
    assert (found.kills_staged, found.kills_while_writing) == (1, 1)
    check_report(json.loads(json.dumps(found.as_json())))


def test_a_demo_of_ranks_is_as_documented() -> None:
    kill = aim.RankKill(3, 4, 3, 9, ("r00003-p000.safetensors",), 9)
    findings = ranks_judge.Findings({"model": 12}, 8, 6, 2, 0.1, 1.5, 0.0, 1e-7, 11.0, 10.0)
    found = ranks_demo.RanksReport(
        "/ckpts", "postgresql://u:***@h/d", 18, 9.5, 4, 2, kill, 0.5, "rank 3 is silent", findings, SAVES
    )
    assert ("aborted because", "rank 3 is silent") in found.rows()
    assert found.steps_lost == 3
    check_report(json.loads(json.dumps(found.as_json())))


def test_errors_are_as_documented() -> None:
    document = run("ls", "/no/such/place", "--json").json()
    assert list(document) == ["error"]
    check(document["error"], "Errors", "error")


def test_every_exit_code_is_documented() -> None:
    from ckptfmt.cli import exit_codes

    codes = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    rows = re.findall(r"^\| (\d+) \|", SPEC.read_text(), re.MULTILINE)
    assert {int(row) for row in rows} == codes
