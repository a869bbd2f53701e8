"""Checkpoints of other tools on the command line: imported, looked at, compared, and never called verified."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from cli_fixtures import ok, ok_json, run
from safetensors.torch import load_file, save_file

import ckptfmt
from ckptfmt.format.checksum import hex_digest

TENSORS = {"a.w": torch.arange(12, dtype=torch.float32).reshape(3, 4), "b": torch.arange(5)}
SOURCES = ("w.safetensors", "folder", "w.pt", "dcp", "group.zarr")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tensors in every kind of file."""
    root = tmp_path_factory.mktemp("foreign")
    save_file(TENSORS, root / "w.safetensors", metadata={"format": "pt"})
    (root / "folder").mkdir()
    save_file({"a.w": TENSORS["a.w"]}, root / "folder" / "model-00001-of-00002.safetensors")
    save_file({"b": TENSORS["b"]}, root / "folder" / "model-00002-of-00002.safetensors")
    placed = {"a.w": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (root / "folder" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    torch.save(TENSORS, root / "w.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(TENSORS), checkpoint_id=root / "dcp")
    group = zarr.open_group(root / "group.zarr", mode="w")
    for name, tensor in TENSORS.items():
        group.create_array(name, data=tensor.numpy())
    return root


@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_is_imported_and_is_the_same_afterwards(place: Path, source: str, tmp_path: Path) -> None:
    text = ok("import", place / source, f"{tmp_path / 'r'}#base", "--step", "9", "--tag", "start")
    assert "generation #1 of run 'base', step 9" in text
    with ckptfmt.open(tmp_path / "r", mode="r") as repository:
        generation = repository.latest("base")
        assert (generation.step, generation.tags) == (9, ("start",))
        for name, tensor in TENSORS.items():
            assert torch.equal(torch.as_tensor(generation[name].read()), tensor)
    assert "the two hold the same tensors and values" in ok("diff", place / source, f"{tmp_path / 'r'}#base")
    assert f"imported_from = {{'kind': '{ok_json('inspect', place / source)['kind']}'" in ok("inspect", tmp_path / "r")
    assert ok_json("verify", tmp_path / "r")["ok"]


@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_is_inspected(place: Path, source: str) -> None:
    document = ok_json("inspect", place / source, "--tensors")
    assert {line["name"]: (line["dtype"], line["shape"], line["nbytes"]) for line in document["lines"]} == {
        "a.w": ("float32", [3, 4], 48),
        "b": ("int64", [5], 40),
    }
    text = ok("inspect", place / source)
    assert "2 in 88 B" in text
    assert "none stored" in text
    one = ok_json("inspect", place / source, "--tensor", "b")
    assert [line["digest"] for line in one["lines"]] == [hex_digest(TENSORS["b"].numpy().tobytes())]
    missing = run("inspect", place / source, "--tensor", "c")
    assert missing.code == 10
    assert "has no tensor 'c'" in missing.err


def test_tied_tensors_are_listed_by_their_own_names(tmp_path: Path) -> None:
    torch.save({"embed": TENSORS["a.w"], "head": TENSORS["a.w"]}, tmp_path / "tied.pt")
    document = ok_json("inspect", tmp_path / "tied.pt", "--tensors")
    assert [line["name"] for line in document["lines"]] == ["embed", "head"]
    assert (document["tensors"], document["nbytes"]) == (2, 48)
    (line,) = ok_json("inspect", tmp_path / "tied.pt", "--tensor", "head")["lines"]
    assert line["name"] == "head"


@pytest.mark.parametrize("source", SOURCES)
def test_verify_never_passes_what_has_no_checksums(place: Path, source: str) -> None:
    result = run("verify", place / source)
    assert result.code == 12
    assert "no checksums stored" in result.out
    document = run("verify", place / source, "--json").json()
    assert document["ok"] is False
    assert document["nbytes"] == 88
    assert [problem["kind"] for problem in document["problems"]] == ["unverifiable"]


@pytest.mark.parametrize("source", SOURCES)
def test_any_two_kinds_are_compared(place: Path, source: str) -> None:
    for other in SOURCES:
        assert ok_json("diff", place / source, place / other)["equal"]


def test_differences_are_told(place: Path, tmp_path: Path) -> None:
    changed = TENSORS["a.w"].clone()
    changed[1, 2] += 1
    torch.save({"a.w": changed, "b": TENSORS["b"].to(torch.int32), "c": torch.ones(1), "step": 3}, tmp_path / "new.pt")
    document = ok_json("diff", place / "w.safetensors", tmp_path / "new.pt")
    assert document["counts"] == {"bytes": 1, "dtype": 1, "added": 1}
    assert {one["name"]: one["first_difference"] for one in document["tensors"]} == {"a.w": 26, "b": None, "c": None}
    assert document["values"] == [{"path": "step", "old": None, "new": "3"}]
    text = ok("diff", place / "w.safetensors", tmp_path / "new.pt")
    assert "from byte 26 on" in text
    assert "int64 -> int32" in text


def test_damage_is_a_problem_beside_the_lack_of_checksums(place: Path, tmp_path: Path) -> None:
    for name in ("__0_0.distcp", ".metadata"):
        data = bytearray((place / "dcp" / name).read_bytes())
        if name != ".metadata":
            data[:100] = bytes(100)
        (tmp_path / name).write_bytes(data)
    document = run("verify", tmp_path, "--json").json()
    assert [problem["kind"] for problem in document["problems"]][-1] == "unverifiable"
    assert document["problems"][0]["kind"] == "format"


def test_damage_of_values_and_of_chunks_is_found(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"step": 3}, checkpoint_id=tmp_path / "dcp")
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    zarr.open_group(tmp_path / "z", mode="w").create_array("w", data=TENSORS["b"].numpy())
    (chunk,) = (tmp_path / "z" / "w" / "c").iterdir()
    chunk.write_bytes(b"no zstd frame")
    for name in ("dcp", "z"):
        document = run("verify", tmp_path / name, "--json").json()
        assert [problem["kind"] for problem in document["problems"]] == ["format", "unverifiable"]


def test_what_is_no_checkpoint_is_told(place: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    result = run("inspect", tmp_path / "notes.txt")
    assert result.code == 2
    assert "none of what can be read here: a safetensors file" in result.err
    assert run("import", tmp_path / "nothing", tmp_path / "r").code == 10
    assert run("import", place / "w.pt", f"{tmp_path / 'r'}#run@3").code == 2
    assert run("verify", place / "w.pt", "--all").code == 2
    assert not (tmp_path / "r").exists()


def test_an_export_of_an_import_is_the_same_file_content(place: Path, tmp_path: Path) -> None:
    ok("import", place / "w.pt", tmp_path / "r")
    text = ok("export", tmp_path / "r", "--safetensors", tmp_path / "out")
    assert "model.safetensors" in text
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert run("export", tmp_path / "r", "--safetensors", tmp_path / "out").code == 11
    assert run("export", tmp_path / "r", "--kerchunk", tmp_path / "refs.json", "--dtype", "float16").code == 2
    assert run("export", tmp_path / "r", "--safetensors", tmp_path / "o2", "--root", "s3://b").code == 2


def in_process_without(library: str, code: str) -> subprocess.CompletedProcess[str]:
    block = (
        "import sys, importlib.util\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {library!r}: raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: None if name == {library!r} else find(name, *rest)\n"
    )
    return subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, timeout=60)


def command(*arguments: object) -> str:
    return f"from ckptfmt.cli.main import main\nmain({list(map(str, arguments))!r})"


@pytest.mark.slow
def test_without_torch_what_needs_it_says_so_and_the_rest_works(place: Path, tmp_path: Path) -> None:
    for verb in (["inspect", place / "dcp"], ["inspect", place / "w.safetensors", "--tensor", "b"]):
        done = in_process_without("torch", command(*verb))
        assert done.returncode == 0, done.stderr
    done = in_process_without("torch", command("import", place / "folder", tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    for verb in (["inspect", place / "w.pt"], ["verify", place / "dcp"]):
        done = in_process_without("torch", command(*verb))
        assert done.returncode == 2
        assert "pip install 'ckptfmt[torch]'" in done.stderr


def test_without_zarr_it_says_so(place: Path) -> None:
    done = in_process_without("zarr", command("inspect", place / "group.zarr"))
    assert done.returncode == 2
    assert "pip install 'ckptfmt[zarr]'" in done.stderr


def test_nobody_waits_for_libraries_that_are_not_needed(place: Path) -> None:
    code = command("inspect", place / "w.safetensors").replace("main([", "sys.argv = ['x']\nmain([")
    code = f"import sys, atexit\natexit.register(lambda: print(sorted(sys.modules), file=sys.stderr))\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert not {"torch", "zarr", "sqlalchemy"} & set(eval(done.stderr))
