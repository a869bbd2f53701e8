"""The README's examples for other tools run, each beside what ckptfmt itself reads."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import in_child
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


def _framework(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed: pip install 'ckptfmt[{name}]'")


def _run_twice(code: str, tmp_path: Path, made: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The example in a fork, with what it takes for granted, and once more; the names it left."""
    names: dict[str, Any] = {}
    warnings.simplefilter("ignore")
    for _ in range(2):
        names = made()
        exec(code.replace("/ckpts", str(tmp_path / "ckpts")), names)
    return names


def _steps(tmp_path: Path) -> list[int]:
    with ckptfmt.open(tmp_path / "ckpts", mode="r") as repository:
        return [one.step for one in repository.generations(run="llama")]


def _lightning_model(lightning: Any) -> Any:
    class Regression(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)

    return Regression()


def _settings(tmp_path: Path) -> dict[str, Any]:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return {**quiet, "accelerator": "cpu", "max_epochs": 2, "default_root_dir": tmp_path}


def test_lightning(tmp_path: Path) -> None:
    lightning = _framework("lightning")
    code = example("GenerationIO")

    def made() -> dict[str, Any]:
        settings = _settings(tmp_path)
        return {"Trainer": lightning.Trainer, "model": _lightning_model(lightning), "settings": settings}

    def body() -> None:
        names = _run_twice(code, tmp_path, made)
        assert names["io"].latest() == f"{tmp_path / 'ckpts'}#llama"
        names["io"].teardown()

    in_child(body)
    assert _steps(tmp_path) == [8, 4]  # the second start had nothing left to do


def test_lightning_on_several_ranks(tmp_path: Path) -> None:
    """On one rank here: tests/integrations has two."""
    lightning = _framework("lightning")
    code = example("GenerationCallback").replace("every_steps=500", "every_steps=3")

    def made() -> dict[str, Any]:
        settings = _settings(tmp_path)
        model = _lightning_model(lightning)
        return {"Trainer": lightning.Trainer, "strategy": "auto", "model": model, "settings": settings}

    in_child(lambda: _run_twice(code, tmp_path, made) and None)
    assert _steps(tmp_path) == [6, 3]  # the second start went from 6 to 8


def test_transformers(tmp_path: Path) -> None:
    transformers = _framework("transformers")
    code = example("GenerationMixin")

    def made() -> dict[str, Any]:
        config = transformers.GPT2Config(
            vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
        )
        rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), max_steps=6, save_steps=2, disable_tqdm=True, report_to=[], use_cpu=True
        )
        settings = {"model": transformers.GPT2LMHeadModel(config), "args": arguments, "train_dataset": rows}
        return {"Trainer": transformers.Trainer, "settings": settings}

    in_child(lambda: _run_twice(code, tmp_path, made) and None)
    assert _steps(tmp_path) == [6, 4, 2]


def test_accelerate(tmp_path: Path) -> None:
    accelerate = _framework("accelerate")
    code = example("accelerator_state")

    def body() -> None:
        warnings.simplefilter("ignore")
        accelerator = accelerate.Accelerator(cpu=True)
        model = torch.nn.Linear(4, 1)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        with ckptfmt.open(tmp_path / "ckpts") as repo, repo.checkpointer("llama") as ckpt:
            exec(code, {"accelerator": accelerator, "ckpt": ckpt, "step": 5})

    in_child(body)
    assert _steps(tmp_path) == [5]
