"""``ls`` lists runs, and the generations of a run."""

from __future__ import annotations

import re
from pathlib import Path

from cli_fixtures import begin, launch, ok, ok_json, run, save_steps, site_of

import ckptfmt


def test_runs(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, run="b")
    save_steps(tmp_path, 5, run="a")
    text = ok("ls", tmp_path)
    assert re.search(r"^RUN +LATEST +STEP", text)
    assert re.search(r"\na +#3 +5 .*\nb +#2 +20 ", text)
    document = ok_json("ls", tmp_path)
    assert [(one["name"], one["committed"], one["latest"]["step"]) for one in document["runs"]] == [
        ("a", 1, 5),
        ("b", 2, 20),
    ]
    assert document["runs"][1]["nbytes"] > 2 * 2500


def test_generations_and_their_states(repository: Path, tmp_path: Path) -> None:
    text = ok("ls", f"{repository}#train")
    assert [line.split()[0] for line in text.splitlines()] == ["ID", "#3", "#2", "#1"]
    save_steps(tmp_path, 10)
    with site_of(tmp_path) as site:
        held = launch(site)
        number = begin(site, held, 20)
        site.sql().abort(number, stage="persist", rank=0, reason="disk on fire", fence=held.fence)
        begin(site, held, 30, n=1)
        every = ok("ls", f"{tmp_path}#train", "--all")
        assert ok("ls", f"{tmp_path}#train").count("\n") == 2
        assert f"{held.host}:{held.pid}" in ok("ls", tmp_path)
    assert re.search(r"#2 +20 +aborted .*persist on rank 0: disk on fire", every)
    assert re.search(r"#3 +30 +writing", every)


def test_of_a_run_without_a_commit_the_others_are_pointed_at(tmp_path: Path) -> None:
    with ckptfmt.open(tmp_path) as repository:
        repository.checkpointer("train").close()
    with site_of(tmp_path) as site:
        begin(site, launch(site), 10)
    assert ok("ls", f"{tmp_path}#train") == "run train: none is committed; all: --all\n"
    assert "#1" in ok("ls", f"{tmp_path}#train", "--all")


def test_limit(repository: Path) -> None:
    document = ok_json("ls", f"{repository}#train", "--limit", "2")
    assert [info["id"] for info in document["generations"]] == [3, 2]
    assert document["more"] is True
    assert "and older ones" in ok("ls", f"{repository}#train", "--limit", "2")
    assert ok_json("ls", f"{repository}#train", "--limit", "3")["more"] is False
    assert len(ok_json("ls", f"{repository}#train", "--limit", "0")["generations"]) == 3
    assert run("ls", f"{repository}#train", "--limit", "-1").code == 2


def test_tags_and_names_are_shown_harmlessly(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, run="重み", tags=["a\x1b[31mb"])
    text = ok("ls", f"{tmp_path}#重み")
    assert "\x1b" not in text
    assert "a\\x1b[31mb" in text
    assert "重み" in ok("ls", tmp_path)


def test_nothing_to_list(tmp_path: Path) -> None:
    ckptfmt.open(tmp_path).close()
    assert ok("ls", tmp_path) == "no runs\n"
    result = run("ls", f"{tmp_path}#train")
    assert result.code == 10
    assert "'train'" in result.err


def test_by_proof(repository: Path) -> None:
    document = ok_json("ls", repository, "--catalog", "none")
    assert document["read_by"] == "proof"
    assert document["runs"][0]["committed"] == 3
    assert ok_json("ls", f"{repository}#train", "--catalog", "none")["generations"][0]["id"] == 3
