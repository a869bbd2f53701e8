"""Accelerate: killed while it saves, a training goes on as if nothing had happened."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_rig import Life, assert_resumes_identically, framework, live

import ckptfmt

accelerate = framework("accelerate")

from ckptfmt.integrations.accelerate import ModelHooks, accelerator_state  # noqa: E402


class Prepared:
    """What a script has after ``prepare``."""

    def __init__(self, accelerator: Any, *, stateful: bool = False) -> None:
        torch.manual_seed(3)
        dropout = torch.nn.Dropout(0.3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), dropout, torch.nn.Linear(8, 1))
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        sched = torch.optim.lr_scheduler.StepLR(opt, 2)
        data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=not stateful)
        self.accelerator = accelerator
        self.model, self.opt, self.sched, self.loader = accelerator.prepare(model, opt, sched, loader)
        torch.manual_seed(10 + accelerator.process_index)

    def train_on(self, batch: Any) -> float:
        x, y = batch
        with self.accelerator.accumulate(self.model):
            loss = (self.model(x) - y).square().mean()
            self.accelerator.backward(loss)
            self.opt.step()
            self.sched.step()
            self.opt.zero_grad()
        return float(loss.item())


class Count:
    """An object that is registered for checkpointing."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def train(life: Life, *, stateful: bool = False, **settings: Any) -> None:
    """Four epochs, saved after each; with ``stateful`` loaders, without random numbers, after every second batch."""
    config = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config, **settings)
    parts = Prepared(accelerator, stateful=stateful)
    if stateful:
        parts.model.eval()
    count = Count()
    accelerator.register_for_checkpointing(count)
    every = 2 if stateful else len(parts.loader)
    with ckptfmt.open(life.place) as repo, repo.checkpointer() as checkpointer:
        checkpointer.restore(into=accelerator_state(accelerator))
        while count.value < 4 * len(parts.loader):
            for batch in parts.loader:
                life.note(count.value, parts.train_on(batch))
                count.value += 1
                if count.value % every == 0:
                    checkpointer.save(accelerator_state(accelerator), step=count.value)


def train_mid_epoch(life: Life) -> None:
    train(life, stateful=True, gradient_accumulation_steps=2)


def train_sharded(life: Life) -> None:
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1
    )
    train(life, fsdp_plugin=plugin)


def test_one_device(tmp_path: Path) -> None:
    assert_resumes_identically(train, tmp_path, kill=(0, 3))


@pytest.mark.slow
def test_stateful_loaders_resume_within_an_epoch(tmp_path: Path) -> None:
    assert_resumes_identically(train_mid_epoch, tmp_path, kill=(0, 6))


@pytest.mark.slow
def test_ddp(tmp_path: Path) -> None:
    assert_resumes_identically(train, tmp_path, world=2, kill=(1, 3))


@pytest.mark.slow
def test_fsdp2(tmp_path: Path) -> None:
    assert_resumes_identically(train_sharded, tmp_path, world=2, kill=(0, 3))


def test_hooks_cover_weights_of_models(tmp_path: Path) -> None:
    def body(life: Life) -> None:
        parts = Prepared(accelerate.Accelerator(cpu=True))
        with ModelHooks(parts.accelerator, life.place):
            parts.train_on(next(iter(parts.loader)))
            parts.accelerator.save_state(str(tmp_path / "folder"))
            saved = [one.clone() for one in parts.model.parameters()]
            with torch.no_grad():
                for one in parts.model.parameters():
                    one.zero_()
            parts.accelerator.load_state(str(tmp_path / "folder"))
            assert all(map(torch.equal, saved, parts.model.parameters()))
            (tmp_path / "empty").mkdir()
            with pytest.raises(ckptfmt.NotFound, match=r"generation\.json"):
                parts.accelerator.load_state(str(tmp_path / "empty"))
        parts.accelerator.save_state(str(tmp_path / "without"))

    live(body, tmp_path, "only")
    names = {one.name for one in (tmp_path / "folder").iterdir()}
    assert {"generation.json", "optimizer.bin", "scheduler.bin"} <= names
    assert "model.safetensors" not in names
    assert (tmp_path / "without" / "model.safetensors").exists()
    with warnings.catch_warnings(), ckptfmt.open(tmp_path / "ckpts", mode="r") as repository:
        assert list(repository.latest()) == [
            "models.0.0.weight",
            "models.0.0.bias",
            "models.0.2.weight",
            "models.0.2.bias",
        ]
