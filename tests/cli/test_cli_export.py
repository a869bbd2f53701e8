"""``export`` writes what other tools read, and says what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

from cli_fixtures import ok, ok_json, run


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
