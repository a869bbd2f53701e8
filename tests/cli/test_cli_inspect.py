"""``inspect`` answers "which generation would a resume take, why, and what is in it"."""

from __future__ import annotations

import os
import pty
import re
import shutil
import struct
import subprocess
import sys
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import numpy as np
import pytest
from cli_fixtures import GOLDEN, begin, flip, folder_of, launch, ok, ok_json, read_terminal, run, save_steps, site_of

import ckptfmt

COLUMNS, LINES = 100, 40


def in_terminal(*arguments: object, lines: int = LINES, columns: int = COLUMNS) -> str:
    """What the command prints in a pseudo terminal of this size."""
    leader, follower = pty.openpty()
    ioctl(follower, TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": ""}
    environment.pop("COLUMNS", None)
    command = [sys.executable, "-m", "ckptfmt.cli.main", *map(str, arguments)]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    output = read_terminal(leader)
    assert process.wait() == 0, output
    return output.replace("\r\n", "\n")


def big_state() -> dict[str, object]:
    entries: dict[str, object] = {f"part {i:02}": {"w": np.ones(100 + i, np.float32), "step": i} for i in range(60)}
    return {**entries, "an entry with a very long name that fills the line of a narrow terminal" * 2: 1}


def test_one_screen_answers_which_why_and_what(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    ckptfmt.save(big_state(), tmp_path, run="train", step=30, metadata={"note": "x" * 500}, tags=["best", "t" * 60])
    with site_of(tmp_path) as site:
        held = launch(site)
        aborted = [begin(site, held, 40 + n, n) for n in range(8)]
        for generation_id in aborted[:-1]:
            reason = f"no space left on the device\nwhile writing {'y' * 200}"
            site.sql().abort(generation_id, stage="persist", rank=0, reason=reason, fence=held.fence)
        text = in_terminal("inspect", tmp_path)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = plain.splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert "\x1b[" in text
    assert "run train: a resume takes generation #3, step 30" in plain
    assert "commit 3 of the run is its newest" in plain
    assert f"#{aborted[-1]} step 47 is writing" in plain
    assert "failed (persist, rank 0): no space left on the device while" in plain
    assert "Generation #3 holds 60 tensors" in plain
    assert "48 more entries" in plain


def test_many_runs_fit_one_screen_too(tmp_path: Path) -> None:
    with ckptfmt.open(tmp_path) as repository:
        for number in range(14):
            with repository.checkpointer(f"run {number:02}") as checkpointer:
                pending = checkpointer.save({"w": np.ones(10)}, step=number)
                assert pending is not None
                pending.result()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", in_terminal("inspect", tmp_path))
    assert len(plain.splitlines()) <= LINES
    assert "14 runs" in plain
    assert re.search(r"run 03 +#4 +3 ", plain)
    assert "and 4 more runs" in plain


def test_repository_by_catalog(repository: Path) -> None:
    text = ok("inspect", repository)
    assert "\x1b" not in text
    assert "a resume takes generation #3, step 30" in text
    assert "held by   nobody" in text
    assert re.search(r"model +dict +2 +2.5 kB +float32, float16", text)
    assert re.search(r"epoch +int +- +- += 3", text)
    document = ok_json("inspect", repository)
    (view,) = document["runs"]
    assert view["resume"]["generation"]["id"] == 3
    assert view["resume"]["passed_over"] == []
    assert view["contents"]["tensors"] == 4
    assert view["contents"]["aliases"] == 1
    assert view["metadata"] == {"loss": 1 / 30}
    assert view["space"]["committed_generations"] == 3
    assert view["holder"] is None


def test_after_a_rollback_the_newest_commit_is_taken_not_the_highest_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 900, 1000, 950)
    (view,) = ok_json("inspect", tmp_path)["runs"]
    assert (view["resume"]["generation"]["id"], view["resume"]["generation"]["step"]) == (3, 950)


def test_newer_ones_are_explained(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    with site_of(tmp_path) as site:
        first = launch(site, seconds=60)
        lost = begin(site, first, 30)
        site.sql().close_launch(first.id)
        second = launch(site)
        saving = begin(site, second, 40)
        site.sql().quarantine(2, reason="loss is NaN")
        (view,) = ok_json("inspect", tmp_path)["runs"]
        text = ok("inspect", tmp_path)
    assert view["resume"]["generation"]["id"] == 1
    reasons = {one["id"]: (one["state"], one["reason"]) for one in view["resume"]["passed_over"]}
    assert list(reasons) == [saving, lost, 2]
    assert reasons[saving][1].endswith("is saving it; 0 of 1 ranks durable")
    assert reasons[lost][1].startswith("its launch is gone")
    assert reasons[2] == ("committed", "quarantined: loss is NaN")
    assert view["holder"]["pid"] == os.getpid()
    assert f":{os.getpid()} (training)" in text


def test_a_run_without_commits_says_so(tmp_path: Path) -> None:
    with site_of(tmp_path) as site:
        site.sql().ensure_run("train", "train-116f54c41d")
        begin(site, launch(site), 5)
        text = ok("inspect", tmp_path)
        document = ok_json("inspect", f"{tmp_path}#train")
    assert "run train: nothing to resume from" in text
    assert "starts from scratch" in text
    assert "#1 step 5 is writing" in text
    assert document["run"]["resume"]["generation"] is None
    assert [info["state"] for info in document["generations"]] == ["writing"]


def test_an_empty_repository(tmp_path: Path) -> None:
    ckptfmt.open(tmp_path).close()
    assert "nothing was ever saved here" in ok("inspect", tmp_path)
    assert ok_json("inspect", tmp_path)["runs"] == []


def test_a_damaged_latest_is_shown_as_a_problem(tmp_path: Path) -> None:
    (generation_id,) = save_steps(tmp_path, 10)
    folder = folder_of(tmp_path, generation_id)
    (pack,) = folder.glob("*.safetensors")
    pack.write_bytes(pack.read_bytes()[:-1])
    result = run("inspect", tmp_path)
    assert result.code == 12
    assert "PROBLEM" in result.out
    assert pack.name in result.out
    assert "#1, step 10" in result.out
    (view,) = run("inspect", tmp_path, "--json").json()["runs"]
    assert view["resume"]["problem"]["message"]
    assert view["contents"] is None
    assert run("inspect", f"{tmp_path}#train").code == 12
    assert run("inspect", f"{tmp_path}#train@1").code == 12
    manifest = next(folder.glob("manifest-*"))
    flip(manifest, 10)
    assert run("inspect", f"{tmp_path}#train@1", "--json").json()["problem"]["object"].endswith(manifest.name)


def test_run(repository: Path) -> None:
    text = ok("inspect", f"{repository}#train")
    assert re.search(r"#3 +30 +committed", text)
    assert "durable -> committed" in text
    document = ok_json("inspect", f"{repository}#train")
    assert [info["id"] for info in document["generations"]] == [3, 2, 1]
    assert document["history"][-1]["kind"] == "close"


def test_generation_by_id_step_and_tag(repository: Path, tmp_path: Path) -> None:
    text = ok("inspect", f"{repository}#train@2")
    for expected in ("generation #2 of run train, step 20", "parent", "#1 (", "writing -> durable", "stall", "model.w"):
        assert expected in text
    assert ok_json("inspect", f"{repository}#train@step:20")["generation"]["id"] == 2
    save_steps(tmp_path, 1, 2, tags=["best"])
    assert ok_json("inspect", f"{tmp_path}#train@tag:best")["generation"]["step"] == 2
    document = ok_json("inspect", f"{repository}#train@2")
    assert document["parent_id"] == 1
    assert [item["kind"] for item in document["history"]] == ["begin", "durable", "commit", "prove"]
    assert document["timings"]["commit"] >= document["timings"]["durable"] > 0
    assert document["ranks"][0]["state"] == "durable"
    assert [pack["name"] for pack in document["packs"]] == ["r00000-p000.safetensors"]
    assert sum(line["nbytes"] for line in document["tensors"]) == document["contents"]["nbytes"]


def test_a_generation_that_failed_can_be_looked_at(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    with site_of(tmp_path) as site:
        held = launch(site)
        number = begin(site, held, 20)
        site.sql().abort(number, stage="persist", rank=0, reason="disk on fire", fence=held.fence)
    text = ok("inspect", f"{tmp_path}#train@{number}")
    assert re.search(r"is aborted\n +aborted +persist on rank 0: disk on fire\n", text)
    assert "writing -> aborted" in text
    assert ok_json("inspect", f"{tmp_path}#train@{number}")["contents"] is None


@pytest.mark.parametrize("fate", ["aborted", "quarantined"])
def test_why_a_generation_is_not_taken_is_told_whole_in_a_terminal(tmp_path: Path, fate: str) -> None:
    words = [f"word{number:03}" for number in range(40)]
    (number,) = save_steps(tmp_path, 10)
    with site_of(tmp_path) as site:
        if fate == "quarantined":
            site.sql().quarantine(number, reason=" ".join(words))
        else:
            held = launch(site)
            number = begin(site, held, 20)
            site.sql().abort(number, stage="recover", rank=None, reason=" ".join(words), fence=held.fence)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", in_terminal("inspect", f"{tmp_path}#train@{number}"))
    head, _, _ = plain.partition("History")
    assert re.findall(r"word\d+", head) == words
    assert max(map(len, head.splitlines())) <= COLUMNS


def test_all_tensors_are_listed_on_demand(tmp_path: Path) -> None:
    ckptfmt.save({f"t{i}": np.zeros(i + 1) for i in range(30)}, tmp_path, run="train")
    assert "and 15 more tensors" in ok("inspect", f"{tmp_path}#train@1")
    text = ok("inspect", tmp_path, "--tensors")
    assert all(f"t{i} " in text for i in range(30))
    assert len(ok_json("inspect", f"{tmp_path}#train@1", "--tensors")["tensors"]) == 30


def test_tensor_with_its_chunks(tmp_path: Path) -> None:
    ckptfmt.save(
        {"big": np.arange((17 << 20) // 4, dtype=np.float32), "empty": np.zeros((0, 3))}, tmp_path, run="train"
    )
    document = ok_json("inspect", tmp_path, "--tensor", "big")
    ((box,),) = [stored["boxes"] for stored in document["stored"]]
    assert [chunk["nbytes"] for chunk in box["chunks"]] == [8 << 20, 8 << 20, 1 << 20]
    pack = (tmp_path / box["pack"]).read_bytes()
    import xxhash

    for chunk in box["chunks"]:
        raw = pack[chunk["offset"] : chunk["offset"] + chunk["nbytes"]]
        assert xxhash.xxh3_128_hexdigest(raw) == chunk["digest"]
    text = ok("inspect", tmp_path, "--tensor", "big")
    assert "float32 [4456448], 17.8 MB, replicated" in text
    assert box["chunks"][2]["digest"] in text
    assert ok_json("inspect", tmp_path, "--tensor", "empty")["stored"][0]["nbytes"] == 0


def test_tied_and_unknown_tensors(repository: Path) -> None:
    document = ok_json("inspect", repository, "--tensor", "tied.1")
    assert (document["stored_name"], document["aliases"]) == ("tied.0", ["tied.0"])
    result = run("inspect", repository, "--tensor", "model.v")
    assert result.code == 10
    assert "'model.w'" in result.err


# -- without the database ---------------------------------------------------------------------------
def test_by_proof(repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(repository, copy)
    (copy / "catalog.sqlite").unlink()
    result = run("inspect", copy)
    assert result.code == 15
    assert "--catalog none" in result.err
    text = ok("inspect", copy, "--catalog", "none")
    assert "read by proof" in text
    assert "a resume takes generation #3, step 30" in text
    assert "held by" not in text
    assert ok_json("inspect", f"{copy}#train@2", "--catalog", "none")["generation"]["step"] == 20
    assert "#2" in ok("inspect", f"{copy}#train", "--catalog", "none")


def test_a_generations_folder_by_itself(repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    shutil.copytree(folder_of(repository, 2), folder)
    text = ok("inspect", folder)
    assert "generation #2 of run train, step 20 is committed" in text
    assert "model.w" in text
    assert ok_json("inspect", folder, "--tensor", "model.w")["stored"][0]["shape"] == [20, 30]
    assert "ok" in ok("verify", folder)
    assert run("ls", folder).code == 2
    assert run("inspect", f"{folder}#train").code == 2


@pytest.mark.parametrize("name", ["v1-one-rank", "v1-two-ranks"])
def test_golden_repositories(name: str) -> None:
    text = ok("inspect", GOLDEN / name, "--catalog", "none")
    assert "run golden run: a resume takes generation" in text
    document = ok_json("inspect", GOLDEN / name, "--catalog", "none", "--tensors")
    assert document["tensors_left_out"] == 0
    assert {line["rank"] for line in document["tensors"]} == ({-1} if name == "v1-one-rank" else {-1, 0, 1})
