"""Golden repositories: their generator, the second reader and our own code agree byte for byte."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import golden_fixtures as golden
import numpy as np
import pytest
import zstandard

from ckptfmt.format import layout, tree, verdict
from ckptfmt.format.manifest import decode_manifest
from ckptfmt.format.part import decode_part

GENERATE = golden.module(golden.GOLDEN / "generate.py")
SECOND = golden.module(golden.TESTS / "second_reader.py")
ZSTD_OF_GOLDEN = (1, 5, 7)


def files(root: pathlib.Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", sorted(GENERATE.REPOSITORIES))
def test_writing_again_gives_the_same_bytes(name: str, tmp_path: pathlib.Path) -> None:
    GENERATE.REPOSITORIES[name](tmp_path)
    old, new = files(golden.GOLDEN / name), files(tmp_path)
    if zstandard.ZSTD_VERSION != ZSTD_OF_GOLDEN:  # another zstd packs equal JSON into other bytes
        old, new = map(without_zstd, (old, new))
    assert sorted(old) == sorted(new)
    assert [key for key in old if old[key] != new[key]] == []


def without_zstd(objects: dict[str, bytes]) -> dict[str, bytes]:
    plain = {}
    for key, data in objects.items():
        if key.endswith(".zst"):
            plain[key.rsplit("/", 1)[0] + "/manifest"] = zstandard.ZstdDecompressor().decompress(data)
        elif key.endswith(layout.COMMIT):
            commit = verdict.decode_commit(data)
            plain[key] = repr([getattr(commit, f) for f in commit.__struct_fields__ if f != "manifest"]).encode()
        else:
            plain[key] = data
    return plain


def comparable(value: Any) -> Any:
    """Encode exactly, with every array as its type-less bytes."""

    def leaf(path: str, item: Any) -> Any:
        if isinstance(item, np.ndarray):
            return {"array": [item.tobytes().hex()]}
        if isinstance(item, tree.Foreign):
            return {"foreign": path}
        return None

    return tree.encode(value, leaf)


@pytest.mark.parametrize(("name", "rank"), [("v1-one-rank", 0), ("v1-two-ranks", 0), ("v1-two-ranks", 1)])
def test_second_reader_agrees(name: str, rank: int) -> None:
    root = golden.GOLDEN / name
    commit, state, arrays = golden.read_with_ckptfmt(root, GENERATE.RUN, rank=rank)
    other_commit, other_state, other_arrays = SECOND.read_latest(root, GENERATE.RUN, rank=rank)
    assert commit.id == other_commit["id"]
    assert sorted(arrays) == sorted(other_arrays)
    for key, value in arrays.items():
        assert value.tobytes() == other_arrays[key].tobytes(), key
        assert value.shape[:-1] == other_arrays[key].shape, key
    theirs = other_state.pop("torch", None)
    state.pop("torch", None)
    assert comparable(state) == comparable(other_state)
    if theirs is not None:  # what the second reader can't rebuild it hands out as it stands
        expected = GENERATE.torch_nodes()
        expected["stateful"] = {"n": 1}
        assert theirs == expected


def test_content_is_what_was_saved() -> None:
    commit, state, arrays = golden.read_with_ckptfmt(golden.GOLDEN / "v1-one-rank", GENERATE.RUN)
    assert (commit.step, commit.commit_seq) == (250, 3), "the latest is the last commit, not the highest step"
    assert comparable(state["scalars"]) == comparable(GENERATE.scalars())
    saved = GENERATE.arrays()
    assert state["arrays"]["bytes"] == saved["bytes"]
    assert state["arrays"]["bytearray"] == saved["bytearray"]
    for name in ("matrix", "strided", "scalar", "empty"):
        raw = np.ascontiguousarray(saved[name])
        assert arrays[f"arrays.{name}"].tobytes() == raw.tobytes()
    assert arrays["arrays.big endian"].tobytes() == saved["big endian"].astype("<u2").tobytes()
    assert state["arrays"]["tied"]["head"].tobytes() == saved["tied"]["emb"].tobytes()


def test_every_tag_is_in_a_golden_repository() -> None:
    from ckptfmt.format import tree_decoder, tree_scalars

    found: set[str] = set()

    def collect(node: Any) -> None:
        if isinstance(node, list):
            for item in node:
                collect(item)
        elif isinstance(node, dict):
            for tag, payload in node.items():
                found.add(tag)
                collect(payload)

    for path in golden.GOLDEN.glob("*/runs/*/*/*.zst"):
        trees = decode_manifest(path.read_bytes()).trees
        collect([trees.common, *(node for slots in trees.per_rank.values() for node in slots.values())])
    known = {*tree_scalars.DECODERS, *tree_decoder.REBUILDERS, *tree.REFERENCE_TAGS, "per_rank"}
    assert known - found == set()


def test_parts_of_golden_repositories_decode() -> None:
    paths = sorted(golden.GOLDEN.glob("*/runs/*/*/*.part.json"))
    assert len(paths) == 4
    assert {decode_part(path.read_bytes()).world_size for path in paths} == {1, 2}


def test_second_reader_is_small_and_stands_alone() -> None:
    text = (golden.TESTS / "second_reader.py").read_text()
    assert len(text.splitlines()) < 150
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert not [line for line in imports if "ckptfmt" in line or "torch" in line or "msgspec" in line]


@pytest.mark.parametrize("damage", ["flip", "cut", "missing pack", "manifest", "commit"])
def test_second_reader_refuses_damage(damage: str, tmp_path: pathlib.Path) -> None:
    shutil.copytree(golden.GOLDEN / "v1-two-ranks", tmp_path, dirs_exist_ok=True)
    patterns = {"manifest": "*.zst", "commit": "COMMIT.json"}
    (target, *_) = sorted(tmp_path.glob(f"runs/*/*/{patterns.get(damage, '*.safetensors')}"))
    data = bytearray(target.read_bytes())
    if damage == "missing pack":
        target.unlink()
    elif damage == "cut":
        target.write_bytes(data[:-1])
    else:
        data[-60 if damage == "commit" else -1] ^= 1
        target.write_bytes(data)
    with pytest.raises((AssertionError, OSError)):
        SECOND.read_latest(tmp_path, GENERATE.RUN)


def test_folder_of_a_retired_generation_is_skipped_and_an_aborted_one_never_found(tmp_path: pathlib.Path) -> None:
    shutil.copytree(golden.GOLDEN / "v1-one-rank", tmp_path, dirs_exist_ok=True)
    folder = tmp_path / layout.run_folder(layout.run_key(GENERATE.RUN))
    hint = layout.commit_hint(layout.run_key(GENERATE.RUN), 1, 9, GENERATE.key_of(1))
    (tmp_path / hint).touch()  # a hint that lies: the generation was aborted
    (folder / GENERATE.key_of(3) / layout.RETIRED).write_bytes(
        verdict.encode_retired(
            verdict.Retired(
                repository=GENERATE.REPOSITORY,
                run=GENERATE.RUN,
                id=4,
                key=GENERATE.key_of(3),
                retired_at=GENERATE.CREATED,
            )
        )
    )
    commit, state, _ = SECOND.read_latest(tmp_path, GENERATE.RUN)
    assert commit["id"] == 3
    assert state["w"].tolist() == [1, 2, 3, 4]
