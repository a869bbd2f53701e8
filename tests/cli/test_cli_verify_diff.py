"""``verify`` finds all damage, and names it; ``diff`` tells by digest what changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from cli_fixtures import flip, folder_of, ok, ok_json, run, save_steps

import ckptfmt


def test_whole_generations_verify(repository: Path) -> None:
    document = ok_json("verify", f"{repository}#train", "--all")
    assert document["ok"] is True
    assert [one["generation_id"] for one in document["generations"]] == [3, 2, 1]
    assert all(one["nbytes"] > 0 and one["chunks"] > 0 for one in document["generations"])
    assert [one["generation_id"] for one in ok_json("verify", repository)["generations"]] == [3]
    assert [one["generation_id"] for one in ok_json("verify", f"{repository}#train@1")["generations"]] == [1]
    assert "ok" in ok("verify", repository)
    assert run("verify", f"{repository}#train@1", "--all").code == 2
    assert run("verify", f"{repository}#nope").code == 10


def test_all_damage_is_listed_with_object_tensor_and_offset(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    stored = ok_json("inspect", f"{tmp_path}#train@2", "--tensors")["tensors"]
    for name in ("model.w", "frozen"):
        assert name in [line["name"] for line in stored]
        (copy,) = ok_json("inspect", f"{tmp_path}#train@2", "--tensor", name)["stored"]
        flip(tmp_path / copy["boxes"][0]["pack"], copy["boxes"][0]["offset"])
    gone = folder_of(tmp_path, 1)
    shutil.rmtree(gone)
    result = run("verify", tmp_path, "--all", "--json")
    assert result.code == 12
    document = result.json()
    found = {one["generation_id"]: one["problems"] for one in document["generations"]}
    assert found[3] == []
    assert {problem["tensor"] for problem in found[2]} == {"model.w", "frozen"}
    assert all(problem["kind"] == "corrupt" and problem["offset"] >= 4096 for problem in found[2])
    assert len(found[1]) == 1
    assert document["ok"] is False
    text = run("verify", tmp_path, "--all")
    assert text.code == 12
    assert "model.w" in text.out
    assert "damaged: #2, #1" in text.out
    assert ok("verify", tmp_path)


def test_diff_by_digest(repository: Path) -> None:
    document = ok_json("diff", f"{repository}#train@1", "@3")
    changes = {one["name"]: one["change"] for one in document["tensors"]}
    assert changes == {
        "model.w": "bytes",
        "model.b": "unchanged",
        "tied.0": "bytes",
        "tied.1": "bytes",
        "frozen": "unchanged",
    }
    assert document["counts"] == {"bytes": 3, "unchanged": 2}
    values = {one["path"]: (one["old"], one["new"]) for one in document["values"]}
    assert values == {
        "epoch": ("1", "3"),
        "schedule.lr": (repr(0.1 / 10), repr(0.1 / 30)),
        "(metadata).loss": ("0.1", repr(1 / 30)),
    }
    assert document["unchanged_values"] == 2
    text = ok("diff", f"{repository}#train@1", f"{repository}#train@3")
    assert "5 tensors: 3 changed, 2 unchanged" in text
    assert "1 of 1 chunk" in text
    assert "frozen" not in text
    assert "frozen" in ok("diff", f"{repository}#train@1", "@3", "--unchanged")


def test_equal_generations(repository: Path) -> None:
    assert ok_json("diff", f"{repository}#train@2", "#train@step:20")["equal"] is True
    assert "the two hold the same state" in ok("diff", f"{repository}#train@2", "@2")


def test_diff_across_repositories_names_every_kind_of_change(tmp_path: Path) -> None:
    chunk = (8 << 20) // 8
    big = np.zeros(3 * chunk)
    old = {"big": big, "gone": np.ones(3), "dtype": np.ones(3, np.float32), "shape": np.ones((2, 3)), "n": 1, "v": [1]}
    changed = big.copy()
    changed[chunk + 5] = 1
    new = {"big": changed, "came": np.ones(3), "dtype": np.ones(3), "shape": np.ones((3, 2)), "n": 1.0, "v": (1,)}
    ckptfmt.save(old, tmp_path / "a", run="x")
    ckptfmt.save(new, tmp_path / "b", run="y")
    document = ok_json("diff", f"{tmp_path}/a#x", f"{tmp_path}/b#y")
    tensors = {one["name"]: one for one in document["tensors"]}
    assert {name: one["change"] for name, one in tensors.items()} == {
        "big": "bytes",
        "came": "added",
        "gone": "removed",
        "dtype": "dtype",
        "shape": "shape",
    }
    assert (tensors["big"]["changed_chunks"], tensors["big"]["chunks"]) == (1, 3)
    values = {one["path"]: (one["old"], one["new"]) for one in document["values"]}
    assert values["n"] == ("1", "1.0")
    assert values["v"] == ("list", "tuple")
    assert "float32 -> float64" in ok("diff", f"{tmp_path}/a#x", f"{tmp_path}/b#y")


def test_diff_reads_no_pack(tmp_path: Path) -> None:
    """Packs of zeros of the right length change nothing about the answer."""
    save_steps(tmp_path, 10, 20)
    before = ok_json("diff", f"{tmp_path}#train@1", "@2")
    for number in (1, 2):
        for pack in folder_of(tmp_path, number).glob("*.safetensors"):
            pack.write_bytes(bytes(pack.stat().st_size))
    assert ok_json("diff", f"{tmp_path}#train@1", "@2") == before


def test_diff_needs_a_run_for_a_bare_id(repository: Path) -> None:
    result = run("diff", repository, "@2")
    assert result.code == 2
    assert "needs a run" in result.err
