"""Each tool that the README names opens what its table says, by the snippet that the row links to, beside what ckptfmt
itself reads; where the table says that no ckptfmt is needed, in a process that cannot import it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import in_child
from readme_places import PREAMBLE, SNIPPETS, before, elsewhere, place_of, run, snippets_run, table
from test_readme import blocks

import ckptfmt

NAME = "model.embed.weight"


@pytest.fixture
def weight() -> torch.Tensor:
    """The tensor that the snippets read."""
    return torch.randn(32, 4)


@pytest.fixture
def ckpts(tmp_path: Path, weight: torch.Tensor) -> Path:
    """The repository where it was saved."""
    ckptfmt.save({"model": {"embed": {"weight": weight}}}, tmp_path / "ckpts", run="llama")
    return tmp_path / "ckpts"


@pytest.fixture
def opened(ckpts: Path) -> Iterator[dict[str, Any]]:
    """The names that the snippets begin with."""
    names = run(PREAMBLE, {}, ckpts)
    yield names
    names["repo"].close()


def _given(opened: dict[str, Any]) -> str:
    """For a process of its own."""
    return f"folder = {opened['folder']!r}"


def _numbers(shown: str) -> str:
    """An expression for all numbers of an array, in order, as JSON."""
    return f"__import__('json').dumps(__import__('numpy').asarray({shown}).ravel().tolist())"


def _model() -> torch.nn.Module:
    model = torch.nn.Sequential()
    model.add_module("embed", torch.nn.Embedding(32, 4))
    return model


# The model that snippets take for granted, in a process of its own.
MODEL = """
import torch
model = torch.nn.Sequential()
model.add_module("embed", torch.nn.Embedding(32, 4))
"""


# -- the table --------------------------------------------------------------------------------------
def test_every_tool_has_a_snippet_and_every_snippet_is_run() -> None:
    """Where the table says that ckptfmt is not needed, by a process without it."""
    here, there = snippets_run(Path(__file__), "run", "run_twice"), snippets_run(Path(__file__), "elsewhere")
    written = {(place, number) for place, snippets in SNIPPETS.items() for number in range(len(snippets))}
    assert here | there == written
    for tool, _, needs_ckptfmt, *_ in table("tool"):
        place = place_of(tool)
        assert SNIPPETS.get(place), f"{tool}: there is no snippet at #{place}"
        needed = needs_ckptfmt != "no"
        assert needed == needs_ckptfmt.startswith("`ckptfmt[")
        assert ((place, 0) in here, (place, 0) in there) == (needed, not needed), tool


def test_links_lead_somewhere() -> None:
    pages = {link for row in table("tool") for cell in row for link in re.findall(r"\]\(([^)]+)\)", cell)}
    for link in pages:
        assert link.removeprefix("#") in SNIPPETS or (Path(__file__).parents[2] / link).is_file(), link


def test_what_the_snippets_begin_with(ckpts: Path) -> None:
    names = run("in-other-tools", {}, ckpts)
    assert names["generation"].step == 0
    assert Path(names["folder"], "COMMIT.json").is_file()
    names["repo"].close()


# -- generations, as they are -----------------------------------------------------------------------
def test_zarr(ckpts: Path, opened: dict[str, Any], weight: torch.Tensor) -> None:
    assert np.array_equal(run("zarr-python", opened, ckpts)["column"], weight[:, 0].numpy())


def test_xarray(ckpts: Path, opened: dict[str, Any], weight: torch.Tensor) -> None:
    names = run("xarray", opened, ckpts)
    assert np.array_equal(names["column"], weight[:, 0].numpy())
    assert names["data"][NAME].dims == (f"{NAME}/0", f"{NAME}/1")


def test_dask(ckpts: Path, opened: dict[str, Any], weight: torch.Tensor) -> None:
    names = run("dask", opened, ckpts)
    assert np.isclose(names["norm"], float(weight.square().sum()))
    elsewhere_too = names["weight"].sum(axis=1).compute(scheduler="processes", num_workers=1)
    assert np.allclose(elsewhere_too, weight.numpy().sum(axis=1))


def test_tensorstore(ckpts: Path, opened: dict[str, Any], weight: torch.Tensor) -> None:
    assert np.array_equal(run("tensorstore", opened, ckpts)["rows"], weight[:16].numpy())


# -- without ckptfmt --------------------------------------------------------------------------------
def test_references(ckpts: Path, weight: torch.Tensor) -> None:
    before("references", ckpts)
    found = elsewhere("references", ckpts, _numbers(f"[rows, data[{NAME!r}].data.compute()[:16]]"))  # dask's
    assert json.loads(found) == weight[:16].flatten().tolist() * 2


def test_tensorstore_without_ckptfmt(ckpts: Path, opened: dict[str, Any], weight: torch.Tensor) -> None:
    before("ocdbt", ckpts)
    assert json.loads(elsewhere("ocdbt", ckpts, _numbers("rows"), _given(opened))) == weight[:16].flatten().tolist()


def test_a_database_with_each_save(tmp_path: Path) -> None:
    state = {"model": {"embed": {"weight": np.arange(32.0)}}}
    run("ocdbt", {"ckptfmt": ckptfmt, "state": state, "step": 1}, tmp_path / "ckpts", number=1)
    with ckptfmt.open(tmp_path / "ckpts", mode="r") as repo:
        given = _given({"folder": repo.latest("llama").url.removeprefix("file://")})
    assert json.loads(elsewhere("ocdbt", tmp_path / "ckpts", _numbers("rows"), given)) == list(range(16))


def test_packs_in_safetensors(ckpts: Path, opened: dict[str, Any], weight: torch.Tensor) -> None:
    found = elsewhere("packs", ckpts, _numbers("weight"), _given(opened))
    assert json.loads(found) == weight.flatten().tolist()


def test_files_of_safetensors(ckpts: Path, weight: torch.Tensor) -> None:
    before("files", ckpts)
    found = elsewhere("files", ckpts, _numbers("model.embed.weight.detach()"), MODEL)
    assert json.loads(found) == weight.flatten().tolist()


@pytest.mark.slow
def test_files_in_transformers(tmp_path: Path) -> None:
    transformers = _framework("transformers")
    config = _gpt2(transformers)
    model = transformers.GPT2LMHeadModel(config)
    ckptfmt.save({"model": model}, tmp_path / "ckpts", run="llama")
    before("transformers", tmp_path / "ckpts")
    model.config.save_pretrained(tmp_path / "llama")
    found = elsewhere("transformers", tmp_path / "ckpts", _numbers("model.transformer.wte.weight.detach()"))
    assert json.loads(found) == model.transformer.wte.weight.flatten().tolist()


def test_packs_in_torchs_reader(ckpts: Path, opened: dict[str, Any], weight: torch.Tensor) -> None:
    given = MODEL + _given(opened)
    found = elsewhere("torchs-reader", ckpts, _numbers("model.embed.weight.detach()"), given)
    assert json.loads(found) == weight.flatten().tolist()


def test_the_catalog_in_sql(ckpts: Path, opened: dict[str, Any]) -> None:
    ((name, step, at),) = json.loads(elsewhere("sql", ckpts, "__import__('json').dumps(latest)"))
    (info,) = opened["repo"].generations()
    assert (name, step) == ("llama", 0)
    assert datetime.fromisoformat(at) == info.committed_at.astimezone(UTC).replace(tzinfo=None)


def test_numpy(ckpts: Path, opened: dict[str, Any], weight: torch.Tensor) -> None:
    found = elsewhere("numpy", ckpts, _numbers("weight"), _given(opened))
    assert json.loads(found) == weight.flatten().tolist()


# -- what saves and loads ---------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints(tmp_path: Path) -> None:
    saved, model = _model(), _model()
    ckpts = tmp_path / "ckpts"
    names = {"model": saved, "step": 3, "opt": torch.optim.AdamW(saved.parameters())}
    names = run("coming-from-torchdistributedcheckpoint", names, ckpts)
    names |= {"model": model, "opt": torch.optim.AdamW(model.parameters())}
    run("coming-from-torchdistributedcheckpoint", names, ckpts, number=1)
    assert torch.equal(model.state_dict()["embed.weight"], saved.state_dict()["embed.weight"])
    assert ckptfmt.open(f"{ckpts}#llama", mode="r").latest("llama").step == 3


@pytest.mark.slow
def test_imports(tmp_path: Path, weight: torch.Tensor) -> None:
    """Each line that the README shows, on a file of its kind."""
    import torch.distributed.checkpoint as dcp
    import zarr
    from safetensors.torch import save_file

    state = {"w": weight}
    save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "checkpoint.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), checkpoint_id=tmp_path / "dcp-folder")
    (tmp_path / "hub-folder").mkdir()
    torch.save(state, tmp_path / "hub-folder" / "pytorch_model.bin")
    zarr.open_group(tmp_path / "arrays.zarr", mode="w").create_array("w", data=weight.numpy())
    (block,) = [block for block in blocks("sh") if block.startswith("ckptfmt import")]
    lines = [line.partition(" # ")[0].split() for line in block.splitlines()]
    assert len(lines) == 5
    for _, *words in lines:
        place = [word.replace("/ckpts", str(tmp_path / "imported")) for word in words]
        subprocess.run(
            [sys.executable, "-m", "ckptfmt.cli.main", *place], check=True, cwd=tmp_path, capture_output=True
        )
    with ckptfmt.open(tmp_path / "imported", mode="r") as repository:
        found = repository.generations(run="base")
        assert [one.step for one in found] == [0, 0, 0, 1000, 0]
        for one in found:
            assert np.array_equal(np.asarray(repository.generation(one.id)["w"]), weight.numpy())


def _framework(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed: pip install 'ckptfmt[{name}]'")


def _gpt2(transformers: Any) -> Any:
    return transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )


def run_twice(place: str, made: Callable[[], dict[str, Any]], ckpts: Path, **others: Any) -> dict[str, Any]:
    """``run`` with what ``made`` makes, and once more, as after a restart; the names it left."""
    warnings.simplefilter("ignore")
    run(place, made(), ckpts, **others)
    return run(place, made(), ckpts, **others)


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

    def made() -> dict[str, Any]:
        settings = _settings(tmp_path)
        return {"Trainer": lightning.Trainer, "model": _lightning_model(lightning), "settings": settings}

    def body() -> None:
        names = run_twice("lightning", made, tmp_path / "ckpts")
        assert names["io"].latest() == f"{tmp_path / 'ckpts'}#llama"
        names["io"].teardown()

    in_child(body)
    assert _steps(tmp_path) == [8, 4]  # the second start had nothing left to do


def test_lightning_on_several_ranks(tmp_path: Path) -> None:
    """On one rank here: tests/integrations has two."""
    lightning = _framework("lightning")

    def made() -> dict[str, Any]:
        settings = _settings(tmp_path)
        model = _lightning_model(lightning)
        return {"Trainer": lightning.Trainer, "strategy": "auto", "model": model, "settings": settings}

    in_child(lambda: run_twice("lightning", made, tmp_path / "ckpts", number=1, every_steps="3") and None)
    assert _steps(tmp_path) == [6, 3]  # the second start went from 6 to 8


def test_transformers(tmp_path: Path) -> None:
    transformers = _framework("transformers")

    def made() -> dict[str, Any]:
        config = _gpt2(transformers)
        rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), max_steps=6, save_steps=2, disable_tqdm=True, report_to=[], use_cpu=True
        )
        settings = {"model": transformers.GPT2LMHeadModel(config), "args": arguments, "train_dataset": rows}
        return {"Trainer": transformers.Trainer, "settings": settings}

    in_child(lambda: run_twice("the-trainer-of-transformers", made, tmp_path / "ckpts") and None)
    assert _steps(tmp_path) == [6, 4, 2]


def test_accelerate(tmp_path: Path) -> None:
    accelerate = _framework("accelerate")

    def body() -> None:
        warnings.simplefilter("ignore")
        accelerator = accelerate.Accelerator(cpu=True)
        model = torch.nn.Linear(4, 1)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        with ckptfmt.open(tmp_path / "ckpts") as repo, repo.checkpointer("llama") as ckpt:
            run("accelerate", {"accelerator": accelerator, "ckpt": ckpt, "step": 5}, tmp_path / "ckpts")

    in_child(body)
    assert _steps(tmp_path) == [5]
