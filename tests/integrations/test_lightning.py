"""Lightning: killed while it saves, a training goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from framework_rig import Life, assert_resumes_identically, framework, live, losses

import ckptfmt

lightning = framework("lightning")

from ckptfmt.integrations.lightning import GenerationCallback, GenerationIO  # noqa: E402

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


class Regression(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, life: Life, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.life = life
        self.net = net()
        self.dropout = torch.nn.Dropout(dropout)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = (self.net(self.dropout(x)) - y).square().mean()
        self.life.note(self.global_step, loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        opt = torch.optim.AdamW(self.parameters(), lr=0.1)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.StepLR(opt, 2)}


def loader(rows: int = 12) -> Any:
    made = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(rows, 4, generator=made), torch.randn(rows, 1, generator=made))
    return torch.utils.data.DataLoader(data, batch_size=2)


def fit(life: Life, *, epochs: int = 5, **more: Any) -> Any:
    """ModelCheckpoint saves at the end of each epoch."""
    torch.manual_seed(3)
    io = GenerationIO(life.place)
    saves = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=life.folder / "names")
    trainer = lightning.Trainer(
        **QUIET, max_epochs=epochs, plugins=io, callbacks=[saves], default_root_dir=life.folder, **more
    )
    trainer.fit(Regression(life), loader(), ckpt_path=io.latest())
    return trainer


@pytest.mark.slow
def test_one_device(tmp_path: Path) -> None:
    assert_resumes_identically(fit, tmp_path, kill=(0, 3))
    assert not (tmp_path / "whole" / "names").exists() or not list((tmp_path / "whole" / "names").iterdir())


def fit_on_two(life: Life) -> None:
    fit(life, strategy="ddp", devices=2)


@pytest.mark.slow
def test_ddp(tmp_path: Path) -> None:
    """Only rank 0 saves."""
    assert_resumes_identically(fit_on_two, tmp_path, world=2, kill=(0, 3))
    generations = ckptfmt.open(tmp_path / "killed" / "ckpts", mode="r").generations()
    assert [one.step for one in generations] == [15, 12, 9, 6, 3]
    assert {one.world_size for one in generations} == {1}


def test_names_of_checkpoints_are_tags(tmp_path: Path) -> None:
    """ "best" is found, a removed checkpoint loses its tag and nothing else, a reference leads to any generation."""

    def body(life: Life) -> None:
        trainer = fit(life, epochs=3)
        trained = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        (saves,) = trainer.checkpoint_callbacks
        assert saves.best_model_path.endswith("epoch=2-step=18.ckpt")
        with ckptfmt.open(life.place, mode="r") as repository:
            tags = {one.step: one.tags for one in repository.generations()}
        assert tags == {18: ("epoch=2-step=18.ckpt",), 12: (), 6: ()}
        fresh = Regression(life)
        trainer.strategy._lightning_module = fresh
        for path, same in ((saves.best_model_path, True), (f"{life.place}@step:6", False), (life.place, True)):
            found = trainer.strategy.load_checkpoint(path)
            assert found["global_step"] == (18 if same else 6)
            assert same == all(torch.equal(found["state_dict"][name], value) for name, value in trained.items())
        with pytest.raises(ckptfmt.NotFound, match=r"epoch=0-step=6\.ckpt"):
            trainer.strategy.load_checkpoint(life.folder / "names" / "epoch=0-step=6.ckpt")

    live(body, tmp_path, "only")


def test_two_paths_with_one_name_are_refused(tmp_path: Path) -> None:
    io = GenerationIO(tmp_path / "ckpts")
    try:
        io.save_checkpoint({"state_dict": {}, "global_step": 1}, tmp_path / "a" / "last.ckpt")
        with pytest.raises(ckptfmt.InvalidInput, match="one tag"):
            io.save_checkpoint({"state_dict": {}, "global_step": 1}, tmp_path / "b" / "last.ckpt")
        with pytest.raises(TypeError, match="open_with"):
            io.save_checkpoint({}, tmp_path / "c.ckpt", storage_options={})
    finally:
        io.teardown()
    assert io.latest() == f"{tmp_path / 'ckpts'}#default"
    io.teardown()


def test_a_run_that_never_committed_starts_afresh(tmp_path: Path) -> None:
    io = GenerationIO(tmp_path / "ckpts")
    assert io.latest() is None
    assert not (tmp_path / "ckpts").exists()


class Sharded(Regression):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class Counting(lightning.Callback):  # type: ignore[misc, name-defined]
    """Another callback with a state."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def fit_sharded(life: Life) -> None:
    """In the middle of epochs, with a loader that knows where it is and dropout that differs by rank."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(3)
    counting = Counting()
    saving = GenerationCallback(life.place, every_steps=2)
    strategy = ModelParallelStrategy(data_parallel_size=life.world, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        **QUIET,
        max_epochs=3,
        strategy=strategy,
        devices=life.world,
        callbacks=[counting, saving],
        enable_checkpointing=False,
        default_root_dir=life.folder,
        use_distributed_sampler=False,
    )
    model = Sharded(life, dropout=0.3)
    torch.manual_seed(10 + life.rank)
    trainer.fit(model, StatefulDataLoader(loader().dataset, batch_size=4))
    assert counting.batches == trainer.global_step == 9


@pytest.mark.slow
def test_fsdp2(tmp_path: Path) -> None:
    assert_resumes_identically(fit_sharded, tmp_path, world=2, kill=(1, 2))
    generations = ckptfmt.open(tmp_path / "killed" / "ckpts", mode="r").generations()
    assert {one.world_size for one in generations} == {2}
    assert losses(tmp_path / "whole", "only", 0) != losses(tmp_path / "whole", "only", 1)
