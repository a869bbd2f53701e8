"""The Trainer of transformers: a mixin, since no callback can change how it resumes.

``pip install 'ckptfmt[transformers]'``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from ckptfmt.engine.load.ranks import RankMap
from ckptfmt.errors import InvalidInput
from ckptfmt.integrations.open_run import OpenRun
from ckptfmt.integrations.random_state import LateRng
from ckptfmt.integrations.wrapped import plain_optimizer
from ckptfmt.reference import At, parse_reference

_TRAINER_STATE = "trainer_state"
_REFUSED = {
    "save_only_model": "a generation holds all that a resume needs; to publish weights, `ckptfmt export --safetensors`",
    "load_best_model_at_end": "restore it afterwards: ckptfmt.restore({'model': model}, '<url>#<run>@step:N', ...)",
    "save_total_limit": "generations of the Trainer are not removed as it goes on; leave it out",
    "push_to_hub": "to publish weights, `ckptfmt export --safetensors`",
    "auto_find_batch_size": "a second try would begin a second launch; set the batch size",
}


class GenerationMixin(Trainer):
    """Makes a Trainer save generations, and resume from them: ``class MyTrainer(GenerationMixin, Seq2SeqTrainer)``.

    ``MyTrainer(..., generations="/ckpts#llama")`` saves when ``TrainingArguments`` say, without waiting for the disk.
    ``train(resume_from_checkpoint=True)`` goes on from what was committed last, or starts afresh if the run never
    committed; a reference (``"/ckpts#llama@step:900"``) names another one. Saved are model, optimizer, scheduler,
    gradient scaler, the trainer's and its callbacks' state, and each rank's random states. With DDP and FSDP2 all ranks
    save together; at another number of ranks ``map`` says whose random state a rank gets.

    ``open_with`` are arguments of ``ckptfmt.open``, ``launch_options`` those of ``Repository.checkpointer``.
    ``InvalidInput`` for settings of ``TrainingArguments`` that it cannot keep.
    """

    def __init__(
        self,
        *args: Any,
        generations: str | os.PathLike[str],
        map: RankMap | None = None,
        open_with: Mapping[str, Any] | None = None,
        launch_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._run = OpenRun(generations, open_with, launch_options or {})
        self._rank_map = map
        self._late_rng = LateRng()
        self._chosen: int | None = None
        settings = kwargs.get("args", args[1] if len(args) > 1 else None)
        for name, instead in _REFUSED.items():  # before Trainer acts on them
            if getattr(settings, name, None):
                raise InvalidInput(f"TrainingArguments({name}=...) has no meaning for generations: {instead}")
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise InvalidInput("DeepSpeed keeps its state to itself, so that no generation can hold it: use FSDP2")

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer.train``; on return everything is committed. ``SaveFailed``, ``NotFound``, ``Mismatch``, ..."""
        error: BaseException | None = None
        try:
            with tempfile.TemporaryDirectory() as folder:
                resume = self._prepare_resume(resume_from_checkpoint, Path(folder))
                return super().train(resume, *args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._chosen = None
            self._run.close(error)

    def _prepare_resume(self, wanted: str | bool | None, folder: Path) -> str | None:
        """The folder to resume from, as far as Trainer reads one: its own state, a small JSON document."""
        if wanted is None or wanted is False:
            return None
        at = self._wanted(wanted)
        _ = self._run.checkpointer  # settles what a killed job left, before anybody looks
        if at is None and not self._run.has_committed():
            return None
        found = self._run.find(at)
        document = (found.metadata or {}).get(_TRAINER_STATE)
        if document is None:
            raise InvalidInput(
                f"run {found.run!r} #{found.id} was not saved by a Trainer: restore it with ckptfmt.restore"
            )
        (folder / TRAINER_STATE_NAME).write_text(document)
        self._chosen = found.id
        return str(folder)

    def _wanted(self, wanted: str | bool) -> At:
        if isinstance(wanted, bool):
            return self._run.at
        reference = parse_reference(wanted)
        if (reference.url, reference.run) != (self._run.url, self._run.name):
            raise InvalidInput(
                f"resume_from_checkpoint={wanted!r}: give True or a reference to {self._run.reference}, the run that "
                "is saved to; weights from elsewhere go into the model before: ckptfmt.restore({'model': model}, ...)"
            )
        return reference.at

    # -- what Trainer calls to save and to resume ------------------------------------------------
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is not None:
            raise InvalidInput("a search for hyperparameters saves many trainings at one step: give each trial its run")
        self.store_flos()
        self._note_callbacks()
        metadata = {_TRAINER_STATE: self._state_document()}
        self._run.checkpointer.save(self._whole_state(), step=self.state.global_step, metadata=metadata)

    def _note_callbacks(self) -> None:
        states: Any = self.state.stateful_callbacks  # by name, whatever its annotation says
        for one in [*self.callback_handler.callbacks, self.control]:
            if isinstance(one, ExportableState):
                name, state = type(one).__name__, one.state()
                if isinstance(states[name], list):
                    states[name].append(state)
                else:
                    states[name] = state

    def _state_document(self) -> str:
        """What ``TrainerState.save_to_json`` writes."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, TRAINER_STATE_NAME)
            self.state.save_to_json(path)
            return Path(path).read_text()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing yet: all is restored at once, when the optimizer is there."""
        if self._chosen is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._chosen is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._run.checkpointer.restore(self._whole_state(), at=self._chosen, map=self._rank_map)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._chosen is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._chosen is None:
            super()._load_rng_state(checkpoint)
        else:
            self._late_rng.apply()

    def _whole_state(self) -> dict[str, Any]:
        state = {
            "model": self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False),
            "optimizer": plain_optimizer(self.optimizer),
            "scheduler": self.lr_scheduler,
            "rng": self._late_rng,
        }
        scaler = getattr(self.accelerator, "scaler", None)
        return state if scaler is None else {**state, "scaler": scaler}
