"""Accelerate: what an ``Accelerator`` has prepared, as a state to save and restore; and its hooks, which cover the
weights of models alone. ``pip install 'ckptfmt[accelerate]'``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from ckptfmt.errors import InvalidInput, NotFound
from ckptfmt.integrations.open_run import OpenRun
from ckptfmt.integrations.wrapped import plain_optimizer, plain_scheduler
from ckptfmt.leaves import PerRank
from ckptfmt.reference import parse_reference
from ckptfmt.rng import Rng

GENERATION_FILE: Final = "generation.json"
"""Written by the hooks into the folder of ``save_state``: which generation holds the models of that folder."""

_OWN_FORMATS = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def accelerator_state(accelerator: Accelerator) -> dict[str, Any]:
    """All that ``save_state`` would save, as a live state for ``Checkpointer.save`` and ``restore``, on every rank.

    Models, optimizers and schedulers that were prepared, the gradient scaler, objects registered for checkpointing,
    each data loader's epoch, shuffling and, if it is a stateful one, position, the count of micro-steps, and random
    states. Positions and random states are each rank's own. Call it after ``prepare``.
    ``InvalidInput`` with DeepSpeed and Megatron-LM, which keep their state to themselves.
    """
    if accelerator.distributed_type in _OWN_FORMATS:
        raise InvalidInput(
            f"{accelerator.distributed_type.value} writes its own checkpoints: no generation can hold its state"
        )
    state: dict[str, Any] = {
        "models": _plain_models(accelerator, accelerator._models),
        "optimizers": [plain_optimizer(one) for one in accelerator._optimizers],
        "schedulers": [plain_scheduler(one) for one in accelerator._schedulers],
        "objects": list(accelerator._custom_objects),
        "progress": _Progress(accelerator),
        "rng": Rng(),
    }
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state


class _Progress:
    """Counters of the accelerator, and where its data loaders stand."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._loaders = list(accelerator._dataloaders)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self._accelerator.step,
            "epochs": [getattr(one, "iteration", None) for one in self._loaders],
            # With several ranks the order of a shuffled epoch comes from a generator that they share.
            "generators": [None if (found := _generator(one)) is None else found.get_state() for one in self._loaders],
            "positions": PerRank([one.state_dict() if _is_stateful(one) else None for one in self._loaders]),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        kept = saved["positions"]
        positions = kept.value if isinstance(kept, PerRank) else kept
        if len(positions) != len(self._loaders):
            raise InvalidInput(
                f"{len(positions)} data loaders were saved, this accelerator has prepared {len(self._loaders)}: "
                "prepare the same ones"
            )
        self._accelerator.step = saved["step"]
        for one, epoch, state, position in zip(
            self._loaders, saved["epochs"], saved["generators"], positions, strict=True
        ):
            if epoch is not None:
                one.iteration = epoch
            generator = _generator(one)
            if generator is not None and state is not None:
                generator.set_state(state)
            if position is not None and _is_stateful(one):
                one.load_state_dict(position)


def _generator(loader: Any) -> torch.Generator | None:
    found: torch.Generator | None = getattr(loader, "synchronized_generator", None)
    return found


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


class ModelHooks:
    """``ModelHooks(accelerator, "/ckpts#llama")``: ``save_state`` and ``load_state`` with models in generations.

    Accelerate's hooks reach model weights and nothing else: optimizers, schedulers and random states are still its own
    files in the folder. ``save_state`` waits until the weights are committed, then notes their reference in the folder.
    A process that is killed meanwhile leaves a folder that lacks files or, where it was used before, mixes two saves:
    which folder is whole stays yours to tell. Where that matters, ``accelerator_state``. For one device and DDP:
    ``InvalidInput`` for others, whose models the hooks never see.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        place: str | os.PathLike[str],
        *,
        open_with: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if accelerator.distributed_type in (*_OWN_FORMATS, DistributedType.FSDP):
            raise InvalidInput(
                f"{accelerator.distributed_type.value}: Accelerate gives its hooks no models; use accelerator_state"
            )
        self._accelerator = accelerator
        self._run = OpenRun(place, open_with, options)
        self._handles = (
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._load),
        )

    def _save(self, models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        state = {"models": _plain_models(self._accelerator, models)}
        pending = self._run.checkpointer.save(state, step=self._accelerator.save_iteration)
        if pending is None:
            raise AssertionError("a save that waits was skipped")
        saved = pending.result()
        if self._accelerator.is_main_process:
            document = {"generation": f"{self._run.reference}@{saved.id}"}
            Path(output_dir, GENERATION_FILE).write_text(json.dumps(document))
        weights.clear()  # so that Accelerate writes none

    def _load(self, models: list[nn.Module], input_dir: str) -> None:
        path = Path(input_dir, GENERATION_FILE)
        if not path.exists():
            raise NotFound(f"{path} does not exist: save_state did not come to its end, or ran without these hooks")
        reference = parse_reference(json.loads(path.read_text())["generation"])
        state = {"models": _plain_models(self._accelerator, models)}
        self._run.find(reference.at).restore(state)
        models.clear()

    def close(self) -> None:
        """End the launch and take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._run.close()

    def __enter__(self) -> ModelHooks:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._run.close(error)


def _plain_models(accelerator: Accelerator, models: list[nn.Module]) -> list[nn.Module]:
    return [accelerator.unwrap_model(one, keep_torch_compile=False) for one in models]
