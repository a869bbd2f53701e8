"""``gc``, ``recover`` and ``db``: plans first, nothing created by a typing error, everything told."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from cli_fixtures import begin, launch, ok, ok_json, run, save_steps, site_of

import ckptfmt


def leave_garbage(url: Path) -> Path:
    """An aborted generation with a pack; returns its folder."""
    with site_of(url) as site:
        held = launch(site)
        number = begin(site, held, 99)
        row = site.sql().abort(number, stage="persist", rank=0, reason="disk on fire", fence=held.fence)
        site.sql().close_launch(held.id)
    folder = url / "runs" / row.run_key / row.key
    folder.mkdir()
    (folder / "r00000-p000.safetensors").write_bytes(b"x" * 5000)
    return folder


def test_gc_shows_the_plan_and_acts_only_with_yes(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    folder = leave_garbage(tmp_path)
    unknown = folder.parent / ("f" * 32)
    unknown.mkdir()
    text = ok("gc", tmp_path)
    assert "would remove 1 object, 5.0 kB of 1 generation" in text
    assert "disk on fire" in text
    assert f"unknown: runs/{folder.parent.name}/{unknown.name}" in text
    assert (folder / "r00000-p000.safetensors").exists()
    plan = ok_json("gc", tmp_path)
    assert (plan["gc"]["dry_run"], plan["nbytes"]) == (True, 5000)
    assert "removed 1 object, 5.0 kB" in ok("gc", tmp_path, "--yes")
    assert not (folder / "r00000-p000.safetensors").exists()
    assert unknown.exists()
    assert "nothing to remove" in ok("gc", tmp_path)
    assert ok("verify", tmp_path)


@pytest.mark.slow
def test_gc_takes_leftovers_of_no_generation(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    for place in (tmp_path, tmp_path / "catalogs"):
        (place / ".ckptfmt-tmp-1-00ff").write_bytes(bytes(500))
    assert "would remove 2 objects, 1.0 kB; to do it" in ok("gc", tmp_path)
    found = ok_json("gc", tmp_path)["gc"]["items"]
    assert [(item["generation_id"], item["run"], item["object"]) for item in found] == [
        (0, "", ".ckptfmt-tmp-1-00ff"),
        (0, "", "catalogs/.ckptfmt-tmp-1-00ff"),
    ]
    assert "removed 2 objects, 1.0 kB" in ok("gc", tmp_path, "--yes")
    assert "nothing to remove" in ok("gc", tmp_path)


def test_recover_settles_what_a_crash_left(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    with site_of(tmp_path) as site:
        held = launch(site)
        number = begin(site, held, 20)
        site.sql().close_launch(held.id)
    plan = ok_json("recover", tmp_path, "--dry-run")
    assert [(one["generation_id"], one["action"]) for one in plan["recover"]["actions"]] == [(number, "aborted")]
    assert "WOULD BE" in ok("recover", tmp_path, "--dry-run")
    assert ok_json("ls", f"{tmp_path}#train", "--all")["generations"][-1]["state"] == "writing"
    result = run("recover", f"{tmp_path}#train")
    assert result.code == 0
    assert "aborted" in result.out
    assert ok_json("ls", f"{tmp_path}#train", "--all")["generations"][-1]["state"] == "aborted"
    assert ok("recover", tmp_path) == "nothing to recover\n"


def test_recover_checks_its_run(repository: Path) -> None:
    assert run("recover", repository, "--run", "nope", "--dry-run").code == 10
    assert run("recover", f"{repository}#train", "--run", "other", "--dry-run").code == 2
    assert run("recover", f"{repository}#train@3", "--dry-run").code == 2


@pytest.mark.parametrize("verb", [["gc", "--yes"], ["recover"], ["gc"], ["db", "current"]])
def test_a_typing_error_creates_no_repository(tmp_path: Path, verb: list[str]) -> None:
    result = run(*verb, tmp_path / "typo")
    assert result.code == 10
    assert not (tmp_path / "typo").exists()


def test_upkeep_needs_the_catalog(repository: Path) -> None:
    for verb in ("gc", "recover"):
        result = run(verb, repository, "--catalog", "none", *(["--dry-run"] if verb == "recover" else []))
        assert result.code == 2
        assert "--catalog URL" in result.err


def test_db(tmp_path: Path) -> None:
    url = tmp_path / "ckpts"
    save_steps(url, 10)
    current = ok_json("db", "current", url)
    assert current["revision"] == current["expected"]
    assert "as this ckptfmt expects" in ok("db", "current", f"sqlite:///{url}/catalog.sqlite")
    assert "was there already" in ok("db", "upgrade", url)
    assert ok_json("db", "check", url)["problems"] == []
    document = ok_json("db", "backup", url, tmp_path / "copy.sqlite")
    assert document["nbytes"] == (tmp_path / "copy.sqlite").stat().st_size
    assert run("db", "backup", url, tmp_path / "copy.sqlite").code == 2
    assert "sound" in ok("db", "check", f"sqlite:///{tmp_path}/copy.sqlite")
    with sqlite3.connect(tmp_path / "copy.sqlite") as connection:
        connection.execute("DROP VIEW stalls")
    connection.close()
    result = run("db", "check", f"sqlite:///{tmp_path}/copy.sqlite")
    assert result.code == 15
    assert "stalls" in result.out


def test_db_of_a_repository_without_an_embedded_catalog(tmp_path: Path) -> None:
    catalog = f"sqlite:///{tmp_path}/elsewhere.sqlite"
    ckptfmt.open(tmp_path / "ckpts", catalog=catalog).close()
    result = run("db", "current", tmp_path / "ckpts")
    assert result.code == 2
    assert "--catalog URL" in result.err
    assert ok("db", "current", tmp_path / "ckpts", "--catalog", catalog)


def test_upkeep_does_not_make_a_second_catalog(tmp_path: Path) -> None:
    url, catalog = tmp_path / "ckpts", f"sqlite:///{tmp_path}/elsewhere.sqlite"
    ckptfmt.open(url, catalog=catalog).close()
    for verb in (["gc", "--yes"], ["recover"]):
        result = run(*verb, url)
        assert result.code == 2
        assert "--catalog URL" in result.err
        assert not (url / "catalog.sqlite").exists()
        assert ok(*verb, url, "--catalog", catalog)
