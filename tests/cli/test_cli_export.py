"""``export`` writes what other tools read, and says what it wrote."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorstore
from cli_fixtures import ok, ok_json, run

import ckptfmt


def test_references_are_written_and_told(repository: Path, tmp_path: Path) -> None:
    target = tmp_path / "refs.json"
    text = ok("export", f"{repository}#train@1", "--kerchunk", target)
    assert "generation #1 of run 'train'" in text
    assert f'storage_options={{"fo": "{target}"}}' in text
    references = json.loads(target.read_text())["refs"]
    assert {"zarr.json", "model.w/zarr.json", "model.w/c/0/0", "tied.1/c/0/0"} <= set(references)
    again = run("export", f"{repository}#train@1", "--kerchunk", target)
    assert again.code == 11
    assert "is there already" in again.err


def test_the_latest_generation_is_exported_under_another_root(repository: Path, tmp_path: Path) -> None:
    target = tmp_path / "refs.json"
    document = ok_json("export", f"{repository}#train", "--kerchunk", target, "--root", "s3://bucket/ckpts")
    assert document["generation_id"] == 3
    assert document["arrays"] == 5
    url, *_ = json.loads(target.read_text())["refs"]["model.w/c/0/0"]
    assert url.startswith("s3://bucket/ckpts/runs/")


def test_an_export_says_what_to_export(repository: Path) -> None:
    result = run("export", f"{repository}#train")
    assert result.code == 2
    assert "--kerchunk" in result.err


def test_a_database_for_tensorstore_is_written_and_told(repository: Path, tmp_path: Path) -> None:
    root = tmp_path / "r"
    shutil.copytree(repository, root)
    text = ok("export", f"{root}#train@1", "--ocdbt")
    assert "generation #1 of run 'train'" in text
    (call,) = re.findall(r"tensorstore\.open\(.*\)", text)
    opening = call.replace("NAME", "model.w")
    array = eval(opening, {"tensorstore": tensorstore}).result()
    with ckptfmt.open(root, mode="r") as repo:
        assert np.array_equal(array.read().result(), repo.generation(1)["model.w"].read(framework="numpy"))
    again = run("export", f"{root}#train@1", "--ocdbt")
    assert again.code == 11
    assert "has an OCDBT database already" in again.err
    assert run("verify", f"{root}#train@1").code == 0


@pytest.mark.parametrize("option", [["--root", "s3://b"], ["--dtype", "float16"]], ids=["root", "dtype"])
def test_options_of_another_export_are_refused(repository: Path, option: list[str]) -> None:
    result = run("export", f"{repository}#train", "--ocdbt", *option)
    assert result.code == 2
    assert "belongs to" in result.err
