"""The Trainer of transformers: killed while it saves, a training goes on as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_rig import Life, assert_resumes_identically, framework, live, losses

import ckptfmt

transformers = framework("transformers")

from ckptfmt.integrations.transformers import GenerationMixin  # noqa: E402


class Noting(GenerationMixin):
    life: Life

    def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
        loss = super().compute_loss(model, inputs, **more)
        if model.training:
            self.life.note(self.state.global_step, loss.item())
        return loss


class Patience(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):  # type: ignore[misc, name-defined]
    """A callback with a state of its own."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"steps": self.steps}, "attributes": {}}


def model() -> Any:
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def arguments(life: Life, **more: Any) -> Any:
    settings = {"max_steps": 9, "save_steps": 2, "save_strategy": "steps", "logging_steps": 1} | more
    return transformers.TrainingArguments(
        str(life.folder / "out"),
        per_device_train_batch_size=2,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        **settings,
    )


def trainer(life: Life, **more: Any) -> Noting:
    transformers.set_seed(3)
    tokens = torch.randint(0, 16, (20, 8), generator=torch.Generator().manual_seed(1))
    made = Noting(
        model=model(),
        args=arguments(life, **more),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        generations=life.place,
        callbacks=[Patience()],
    )
    made.life = life
    return made


def train(life: Life) -> None:
    """With dropout and shuffled rows, which resume in the middle of an epoch."""
    training = trainer(life, restore_callback_states_from_checkpoint=True)
    training.train(resume_from_checkpoint=True)
    (patience,) = [one for one in training.callback_handler.callbacks if isinstance(one, Patience)]
    assert patience.steps == training.state.global_step == 9
    assert [entry["step"] for entry in training.state.log_history[:9]] == list(range(1, 10))


@pytest.mark.slow
def test_one_device(tmp_path: Path) -> None:
    assert_resumes_identically(train, tmp_path, kill=(0, 3))
    assert not list((tmp_path / "whole").glob("out/checkpoint-*"))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_ddp(tmp_path: Path, victim: int) -> None:
    """Both ranks save: the model is one, random states are each rank's own."""
    assert_resumes_identically(train, tmp_path, world=2, kill=(victim, 2))
    generations = ckptfmt.open(tmp_path / "killed" / "ckpts", mode="r").generations()
    assert {one.world_size for one in generations} == {2}
    assert losses(tmp_path / "whole", "only", 0) != losses(tmp_path / "whole", "only", 1)


def train_sharded(life: Life) -> None:
    """Accelerate's FSDP2."""
    config = {"fsdp_version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1}
    trainer(life, fsdp="full_shard", fsdp_config=config).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_fsdp2(tmp_path: Path) -> None:
    assert_resumes_identically(train_sharded, tmp_path, world=2, kill=(1, 2))
    with ckptfmt.open(tmp_path / "killed" / "ckpts", mode="r") as repository:
        generation = repository.latest()
    assert generation.world_size == 2
    assert generation.step == 9


def test_a_reference_names_what_to_resume_from(tmp_path: Path) -> None:
    def body(life: Life) -> None:
        trainer(life).train()
        whole = losses(life.folder, "only")
        trainer(life).train(resume_from_checkpoint=f"{life.place}@step:4")
        assert losses(life.folder, "only") == whole + whole[4:]
        with pytest.raises(ckptfmt.NotFound):
            trainer(life).train(resume_from_checkpoint=f"{life.place}@step:5")
        with pytest.raises(ckptfmt.InvalidInput, match="reference to"):
            trainer(life).train(resume_from_checkpoint=str(life.folder / "elsewhere"))
        state = json.loads(ckptfmt.open(life.place, mode="r").latest().metadata["trainer_state"])
        assert state["global_step"] == 9

    live(body, tmp_path, "only")


@pytest.mark.parametrize(("name", "value"), [("save_total_limit", 2), ("save_only_model", True), ("push_to_hub", True)])
def test_settings_without_a_meaning_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    def body(life: Life) -> None:
        with pytest.raises(ckptfmt.InvalidInput, match=name):
            trainer(life, **{name: value})

    live(body, tmp_path, "only")
