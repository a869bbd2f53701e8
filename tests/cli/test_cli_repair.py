"""``ckptfmt db rebuild``, ``adopt`` and ``hold``: what an operator types and reads."""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from cli_fixtures import ok, ok_json, run, save_steps


def test_a_lost_catalog(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, tags=["best"])
    (tmp_path / "catalog.sqlite").write_bytes(b"no database" * 500)
    lost = run("gc", tmp_path)
    assert lost.code == 15
    assert "ckptfmt db rebuild" in lost.err
    text = ok("db", "rebuild", tmp_path)
    for words in (
        "governs",
        "from epoch 2 on",
        "kept as catalog.sqlite.aside-1",
        "generations: 2 restored",
        "tags and pins",
        f"ckptfmt db hold --clear {tmp_path}",
    ):
        assert words in text
    again = run("db", "rebuild", tmp_path)
    assert (again.code, "--merge" in again.err) == (2, True)
    assert ok("verify", tmp_path)
    assert "on hold: run train" in ok("gc", tmp_path)
    assert "on hold" in ok("db", "hold", tmp_path)
    assert ok_json("db", "hold", tmp_path)["runs"] == [{"run": "train", "held": True}]
    cleared = ok_json("db", "hold", f"{tmp_path}#train", "--clear")
    assert (cleared["cleared"], cleared["runs"]) == (True, [{"run": "train", "held": False}])
    assert ok("gc", tmp_path) == "nothing to remove\n"
    absent = run("db", "hold", f"{tmp_path}#none")
    assert (absent.code, "it has 'train'" in absent.err) == (10, True)
    by_proof = run("db", "hold", tmp_path, "--catalog", "none")
    assert (by_proof.code, "db hold needs the one that governs it" in by_proof.err) == (2, True)


def test_a_catalog_that_was_put_back(tmp_path: Path) -> None:
    root = tmp_path / "ckpts"
    save_steps(root, 10)
    shutil.copy(root / "catalog.sqlite", tmp_path / "old.sqlite")
    save_steps(root, 20)
    shutil.copy(tmp_path / "old.sqlite", root / "catalog.sqlite")
    for arguments in (["gc", root], ["gc", root, "--yes"], ["recover", root]):
        behind = run(*arguments)
        assert behind.code == 11
        assert "run 'train': #2" in behind.err
        assert "ckptfmt db rebuild --merge" in behind.err
    document = ok_json("db", "rebuild", "--merge", root)
    assert [(one["generation_id"], one["action"]) for one in document["rebuild"]["changes"]] == [(2, "restored")]
    assert "#2" in ok("ls", f"{root}#train")


def test_a_copied_root(tmp_path: Path) -> None:
    save_steps(tmp_path / "ckpts", 10)
    shutil.copytree(tmp_path / "ckpts", tmp_path / "copy")
    text = ok("db", "adopt", tmp_path / "copy")
    assert "from epoch 2 on" in text
    assert "generations: 1 as they were" in text
    assert ok("ls", tmp_path / "ckpts")
    assert run("db", "adopt", f"{tmp_path / 'copy'}#train").code == 2
    assert run("db", "rebuild", tmp_path / "nothing").code == 10


@pytest.mark.parametrize(
    ("verb", "takes", "catalog"),
    [("rebuild", "URL", False), ("adopt", "URL", False), ("hold", "URL[#RUN]", False), ("check", "URL", True)],
)
def test_help_tells_what_a_verb_takes(verb: str, takes: str, catalog: bool) -> None:
    text = ok("db", verb, "--help")
    (line,) = re.findall(r"^  (URL\S*) +(.*(?:\n {10,}.*)*)", text, re.MULTILINE)
    assert line[0] == takes
    assert ("sqlite:////path" in line[1]) == catalog


def test_a_users_own_view_is_no_reason_to_set_a_catalog_aside(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as database:
        database.execute("CREATE VIEW mine AS SELECT step FROM generations")
    refused = run("db", "rebuild", tmp_path)
    assert (refused.code, "is sound" in refused.err) == (2, True)
    assert ok("db", "rebuild", "--merge", tmp_path)
    assert not list(tmp_path.glob("*.aside-*"))
    told = run("db", "check", tmp_path)
    assert (told.code, "view mine is none of ckptfmt's" in told.out) == (15, True)


@pytest.mark.parametrize("catalog", ["postgresql", "postgresql+psycopg", "sqlite"])
@pytest.mark.parametrize("command", [["ls"], ["gc"], ["db", "rebuild"]])
def test_a_catalog_that_is_no_url(tmp_path: Path, catalog: str, command: list[str]) -> None:
    save_steps(tmp_path, 10)
    result = run(*command, tmp_path, "--catalog", catalog)
    assert (result.code, f"{catalog!r} is not a catalog URL" in result.err) == (2, True)
