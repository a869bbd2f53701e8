"""Folders of files of torch.save, as Hugging Face's tools write them: alone, or numbered with an index."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fixtures import ok, ok_json, run
from exchange_fixtures import assert_same, random_bits, same
from huggingface_hub import save_torch_state_dict

import ckptfmt
from ckptfmt.errors import CkptError, Conflict, FormatError, InvalidInput, NotFound, UnsupportedValue
from ckptfmt.exchange.foreign import open_foreign
from ckptfmt.exchange.importing import import_checkpoint

INDEX = "pytorch_model.bin.index.json"


def weights(layers: int = 5) -> dict[str, torch.Tensor]:
    """As a model has them, two of them tied."""
    found = {f"layers.{n}.w": random_bits((64, 64), torch.bfloat16, n) for n in range(layers)}
    found |= {f"layers.{n}.norm": random_bits((7,), torch.float32, n) for n in range(layers)}
    found["embed"] = random_bits((100, 16), torch.float32, 99)
    return found | {"head": found["embed"], "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}


def placed(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Several numbered files, by Hugging Face's own writer."""
    path = tmp_path / "hf"
    path.mkdir()
    save_torch_state_dict(weights(), path, max_shard_size="20KB", safe_serialization=False)
    assert len(list(path.glob("pytorch_model-0*.bin"))) > 2
    (path / "config.json").write_text("{}")
    torch.save({"lr": 1e-3}, path / "training_args.bin")
    return path


def test_numbered_files_become_a_generation(folder: Path, tmp_path: Path) -> None:
    report = import_checkpoint(folder, str(tmp_path / "r"), run="base")
    shards = sorted(set(placed(folder).values()))
    assert (report.kind, report.name, report.files) == ("torch_folder", "hf", 1 + len(shards))
    assert report.source_nbytes == sum((folder / name).stat().st_size for name in [INDEX, *shards])
    loaded = ckptfmt.load(tmp_path / "r", run="base")
    assert_same(loaded, weights())
    assert loaded["head"] is loaded["embed"]
    assert report.nbytes == sum(t.nbytes for name, t in weights().items() if name != "head")
    with ckptfmt.open(tmp_path / "r", mode="r") as repository:
        told = repository.latest("base").metadata["imported_from"]
    assert [file["name"] for file in told["files"]] == [INDEX, *shards]


def test_one_file_alone_keeps_its_structure(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    tensors = weights()
    torch.save({"model": tensors, "step": 3}, tmp_path / "hf" / "pytorch_model.bin")
    torch.save({"lr": 1e-3}, tmp_path / "hf" / "training_args.bin")
    torch.save({"state": {}}, tmp_path / "hf" / "optimizer.pt")
    report = import_checkpoint(tmp_path / "hf", str(tmp_path / "r"))
    assert (report.kind, report.name, report.files, report.values) == ("torch_folder", "hf", 1, 1)
    loaded = ckptfmt.load(tmp_path / "r")
    assert_same(loaded["model"], tensors)
    assert loaded["model"]["head"] is loaded["model"]["embed"]
    assert loaded["step"] == 3


@pytest.mark.parametrize("name", ["pytorch_model.fp16.bin", "diffusion_pytorch_model.bin", "adapter_model.bin"])
def test_other_names_of_one_file(tmp_path: Path, name: str) -> None:
    torch.save({"w": torch.arange(6)}, tmp_path / name)
    with open_foreign(tmp_path) as foreign:
        assert (foreign.kind, list(foreign.tensors), [file.name for file in foreign.files]) == (
            "torch_folder",
            ["w"],
            [name],
        )


def test_a_variant_with_an_index_of_its_name(folder: Path, tmp_path: Path) -> None:
    for old in sorted(set(placed(folder).values())):
        (folder / old).rename(folder / old.replace(".bin", ".fp16.bin"))
    index = {name: file.replace(".bin", ".fp16.bin") for name, file in placed(folder).items()}
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin.index.fp16.json").write_text(json.dumps({"weight_map": index}))
    import_checkpoint(folder, str(tmp_path / "r"))
    assert_same(ckptfmt.load(tmp_path / "r"), weights())


def test_safetensors_are_taken_where_both_are(folder: Path) -> None:
    save_torch_state_dict(weights(), folder)
    with open_foreign(folder) as foreign:
        assert foreign.kind == "safetensors_folder"


def test_files_of_a_cache_are_links(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(tmp_path / f"blob{number}")
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blob{number}")
    import_checkpoint(tmp_path / "snapshot", str(tmp_path / "r"))
    assert_same(ckptfmt.load(tmp_path / "r"), weights())


def test_the_command_line_takes_them(folder: Path, tmp_path: Path) -> None:
    document = ok_json("inspect", folder, "--tensors")
    assert document["kind"] == "torch_folder"
    assert {line["name"]: line["file"] for line in document["lines"]} == placed(folder)
    assert "a folder of pytorch_model files" in ok("inspect", folder)
    assert "imported" not in ok("import", folder, f"{tmp_path / 'r'}#base")
    assert "the two hold the same tensors and values" in ok("diff", folder, f"{tmp_path / 'r'}#base")
    verified = run("verify", folder, "--json")
    assert verified.code == 12
    assert verified.json()["nbytes"] == sum(tensor.nbytes for tensor in weights().values())
    assert [problem["kind"] for problem in verified.json()["problems"]] == ["unverifiable"]
    changed = placed(folder)["layers.3.w"]
    state = torch.load(folder / changed, weights_only=True)
    state["layers.3.w"].view(torch.int16)[5, 6] ^= 1
    torch.save(state, folder / changed)
    differs = ok_json("diff", folder, f"{tmp_path / 'r'}#base")
    assert {one["name"]: one["change"] for one in differs["tensors"] if one["change"] != "unchanged"} == {
        "layers.3.w": "bytes"
    }


# -- what does not go together ----------------------------------------------------------------------
def _lost(folder: Path) -> None:
    (folder / placed(folder)["embed"]).unlink()


def _not_in_its_file(folder: Path) -> None:
    write_index(folder, placed(folder) | {"gone": placed(folder)["embed"]})


def _in_another_file(folder: Path) -> None:
    write_index(folder, placed(folder) | {"embed": placed(folder)["layers.0.w"]})


def _in_two_files(folder: Path) -> None:
    other = folder / placed(folder)["layers.0.w"]
    torch.save(torch.load(other, weights_only=True) | {"embed": torch.ones(2)}, other)


def _out_of_the_folder(folder: Path) -> None:
    write_index(folder, placed(folder) | {"embed": "../elsewhere.bin"})


def _no_tensor(folder: Path) -> None:
    other = folder / placed(folder)["embed"]
    torch.save(torch.load(other, weights_only=True) | {"step": 3}, other)


def _nested(folder: Path) -> None:
    other = folder / placed(folder)["embed"]
    torch.save({"model": torch.load(other, weights_only=True)}, other)


def _a_list(folder: Path) -> None:
    torch.save([torch.ones(2)], folder / placed(folder)["embed"])


def _sparse(folder: Path) -> None:
    other = folder / placed(folder)["embed"]
    torch.save(torch.load(other, weights_only=True) | {"eye": torch.eye(3).to_sparse()}, other)


def _damaged(folder: Path) -> None:
    (folder / placed(folder)["embed"]).write_bytes(b"PK\x03\x04 and no more")


def _code(folder: Path) -> None:
    torch.save({"embed": torch.ones(2), "c": Fraction(1, 2)}, folder / placed(folder)["embed"])


def _no_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def _empty_index(folder: Path) -> None:
    write_index(folder, {})


def _two_indices(folder: Path) -> None:
    (folder / "other.bin.index.json").write_bytes((folder / INDEX).read_bytes())


def _a_whole_one_beside(folder: Path) -> None:
    torch.save(weights(), folder / "pytorch_model.bin")


def _a_pipe(folder: Path) -> None:
    _lost(folder)
    os.mkfifo(folder / placed(folder)["embed"])


CASES: list[tuple[Callable[[Path], None], type[CkptError], str]] = [
    (
        _lost,
        NotFound,
        r"{embed} is not there, and pytorch_model\.bin\.index\.json places tensor '.*' and 9 more in it: get that file",
    ),
    (_not_in_its_file, FormatError, "index.json places tensor 'gone' in {embed}, which does not have it"),
    (_in_another_file, FormatError, "index.json places tensor 'embed' in {layers.0.w}, which does not have it"),
    (_in_two_files, FormatError, "'embed' stands in .*, too"),
    (_out_of_the_folder, FormatError, "index.json: tensor 'embed' does not lie in a file beside it"),
    (_no_tensor, FormatError, "{embed}: 'step' is a int"),
    (_nested, FormatError, "{embed}: 'model' is a dict"),
    (_a_list, FormatError, "{embed} holds a list"),
    (_sparse, UnsupportedValue, "{embed}: eye"),
    (_damaged, FormatError, "{embed} is not what torch.save writes"),
    (_code, InvalidInput, "{embed} holds a fractions.Fraction"),
    (_no_index, NotFound, "no index"),
    (_empty_index, FormatError, "index.json places no tensor"),
    (_two_indices, InvalidInput, "has 2 indices"),
    (_a_whole_one_beside, InvalidInput, r"several checkpoints \(pytorch_model\.bin, pytorch_model\.bin\.index\.json\)"),
    (_a_pipe, InvalidInput, "{embed} is no regular file"),
]


@pytest.mark.parametrize(("spoil", "error", "message"), CASES, ids=[case[0].__name__[1:] for case in CASES])
def test_what_does_not_go_together_is_told(
    folder: Path, tmp_path: Path, spoil: Callable[[Path], None], error: type[CkptError], message: str
) -> None:
    for name in ("embed", "layers.0.w"):
        message = message.replace(f"{{{name}}}", re.escape(placed(folder)[name]))
    spoil(folder)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=message):
        import_checkpoint(folder, str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    for verb in ("inspect", "verify"):
        told = run(verb, folder)
        assert told.code not in (0, 1)
        assert re.search(message, told.err), told.err


def test_a_file_that_is_replaced_while_it_is_read(folder: Path) -> None:
    with open_foreign(folder) as foreign:
        other = folder / placed(folder)["embed"]
        torch.save({"embed": torch.ones(2)}, other)
        assert foreign.changed() == other.name
        list(foreign.tensors["layers.0.w"].pieces())
        with pytest.raises(Conflict, match=rf"{other.name}: 'embed' is no longer what it was"):
            list(foreign.tensors["embed"].pieces())


# -- memory -------------------------------------------------------------------------------------------
def mapped(folder: Path) -> set[str]:
    """Files of the folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if str(folder) in line}


def test_one_file_is_mapped_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptfmt.torch import weights_only

    load, opened = weights_only.load_file, []

    def counted(path: Path) -> Any:
        assert not mapped(folder)
        opened.append(path.name)
        return load(path)

    monkeypatch.setattr(weights_only, "load_file", counted)
    with open_foreign(folder) as foreign:
        for tensor in foreign.tensors.values():
            for _ in tensor.pieces():
                assert mapped(folder) <= {str(folder / tensor.file)}
        files = sorted(set(placed(folder).values()))
        assert opened == [*files, *files]  # once to learn what there is, once to read
    assert not mapped(folder)


@pytest.mark.slow
def test_files_from_before_torch_1_6_are_in_memory_one_at_a_time(tmp_path: Path) -> None:
    """Five files of 64 MiB; torch itself is there before."""
    (tmp_path / "hf").mkdir()
    weight_map: dict[str, str] = {}
    for number in range(5):
        file = f"pytorch_model-{number + 1:05}-of-00005.bin"
        state = {f"w{number}.{half}": torch.full((8 << 20,), number, dtype=torch.float32) for half in "ab"}
        torch.save(state, tmp_path / "hf" / file, _use_new_zipfile_serialization=False)
        weight_map |= dict.fromkeys(state, file)
    write_index(tmp_path / "hf", weight_map)
    code = (
        "import sys, torch; from pathlib import Path\n"
        "import ckptfmt.torch.weights_only, ckptfmt.catalog.open\n"
        "from ckptfmt.exchange.importing import import_checkpoint\n"
        "def most():\n"
        "    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "before = most()\n"
        "import_checkpoint(Path(sys.argv[1]), sys.argv[2], host_bytes_max=64 << 20)\n"
        "print(most() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "hf", tmp_path / "r"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert int(done.stdout) << 10 < 240 << 20, done.stdout  # a file and the window, and what they leave behind
    assert same(ckptfmt.load(tmp_path / "r", keys="w3.b")["w3.b"], torch.full((8 << 20,), 3, dtype=torch.float32))
