"""The README's examples for other tools run, each beside what ckptfmt itself reads."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_readme import blocks

import ckptfmt


@pytest.fixture
def saved(tmp_path: Path) -> torch.Tensor:
    """The weight that the examples read, in ``tmp_path/ckpts``."""
    weight = torch.randn(32, 4)
    ckptfmt.save({"model": {"embed": {"weight": weight}}}, tmp_path / "ckpts", run="llama")
    return weight


def example(beginning: str) -> str:
    (found,) = [block for block in blocks("python") if beginning in block]
    return found


def test_zarr(tmp_path: Path, saved: torch.Tensor) -> None:
    names: dict[str, Any] = {}
    exec(example("zarr_group()").replace("/ckpts", str(tmp_path / "ckpts")), names)
    assert np.array_equal(names["column"], saved[:, 0].numpy())


def test_references(tmp_path: Path, saved: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        sys.executable,
        "-m",
        "ckptfmt.cli.main",
        "export",
        f"{tmp_path / 'ckpts'}#llama",
        "--kerchunk",
        "refs.json",
    ]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example("reference://"), names)
    assert np.array_equal(names["rows"], saved[:16].numpy())


def _model() -> torch.nn.Module:
    model = torch.nn.Sequential()
    model.add_module("embed", torch.nn.Embedding(32, 4))
    return model


def test_safetensors(tmp_path: Path, saved: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    code = example("load_file")
    words = code.partition("# of: ckptfmt ")[2].splitlines()[0].replace("/ckpts", str(tmp_path / "ckpts")).split()
    subprocess.run([sys.executable, "-m", "ckptfmt.cli.main", *words], check=True, cwd=tmp_path, capture_output=True)
    monkeypatch.chdir(tmp_path)
    model = _model()
    exec(code, {"model": model})
    assert torch.equal(model.state_dict()["embed.weight"], saved)


@pytest.mark.filterwarnings("ignore")
def test_packs_in_torchs_reader(tmp_path: Path, saved: torch.Tensor) -> None:
    model = _model()
    with ckptfmt.open(tmp_path / "ckpts", mode="r") as repository:
        folder = repository.latest("llama").url.removeprefix("file://")
    exec(example("HuggingFaceStorageReader(folder)"), {"model": model, "folder": folder})
    assert torch.equal(model.state_dict()["embed.weight"], saved)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints(tmp_path: Path) -> None:
    saved, model = _model(), _model()
    code = example("GenerationWriter").replace("/ckpts", str(tmp_path / "ckpts"))
    save, _, load = code.partition("# Later")
    names: dict[str, Any] = {"model": saved, "step": 3, "opt": torch.optim.AdamW(saved.parameters())}
    exec(save, names)
    names |= {"model": model, "opt": torch.optim.AdamW(model.parameters())}
    exec(load.partition("\n")[2], names)
    assert torch.equal(model.state_dict()["embed.weight"], saved.state_dict()["embed.weight"])
    assert ckptfmt.open(f"{tmp_path / 'ckpts'}#llama", mode="r").latest("llama").step == 3


def test_imports(tmp_path: Path, saved: torch.Tensor) -> None:
    """Each line that the README shows, on a file of its kind."""
    import torch.distributed.checkpoint as dcp
    import zarr
    from safetensors.torch import save_file

    state = {"w": saved}
    save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "checkpoint.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), checkpoint_id=tmp_path / "dcp-folder")
    zarr.open_group(tmp_path / "arrays.zarr", mode="w").create_array("w", data=saved.numpy())
    (block,) = [block for block in blocks("sh") if block.startswith("ckptfmt import")]
    lines = [line.partition(" # ")[0].split() for line in block.splitlines()]
    assert len(lines) == 4
    for _, *words in lines:
        place = [word.replace("/ckpts", str(tmp_path / "imported")) for word in words]
        subprocess.run(
            [sys.executable, "-m", "ckptfmt.cli.main", *place], check=True, cwd=tmp_path, capture_output=True
        )
    with ckptfmt.open(tmp_path / "imported", mode="r") as repository:
        found = repository.generations(run="base")
        assert [one.step for one in found] == [0, 0, 1000, 0]
        for one in found:
            assert np.array_equal(np.asarray(repository.generation(one.id)["w"]), saved.numpy())


def test_tensorstore_without_ckptfmt(tmp_path: Path, saved: torch.Tensor) -> None:
    command = [sys.executable, "-m", "ckptfmt.cli.main", "export", f"{tmp_path / 'ckpts'}#llama", "--ocdbt", "--json"]
    done = subprocess.run(command, check=True, capture_output=True)
    names: dict[str, Any] = {"folder": json.loads(done.stdout)["base"]}
    exec(example("tensorstore.open"), names)
    assert np.array_equal(names["rows"], saved[:16].numpy())


def test_a_database_with_each_save(tmp_path: Path) -> None:
    state = {"model": {"embed": {"weight": np.arange(32.0)}}}
    with ckptfmt.open(tmp_path / "ckpts") as repo:
        exec(example("index_when_committed"), {"repo": repo, "state": state, "step": 1})
        names = {"folder": f"{repo.latest('llama').url}/"}
    exec(example("tensorstore.open"), names)
    assert list(names["rows"]) == list(range(16))
