"""Lightning: ``GenerationIO`` where one rank holds all of the state (one device, DDP), ``GenerationCallback`` where it
is spread over ranks (FSDP2, tensor parallel). ``pip install 'ckptfmt[lightning]'``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer

from ckptfmt.engine.load.ranks import RankMap
from ckptfmt.errors import CkptError, InvalidInput, NotFound
from ckptfmt.integrations.open_run import OpenRun
from ckptfmt.integrations.random_state import LateRng
from ckptfmt.leaves import PerRank
from ckptfmt.pending import PendingSave
from ckptfmt.rank_here import rank_here
from ckptfmt.reference import parse_reference

_LOADERS = "combined_loader"


class GenerationIO(CheckpointIO):
    """Lightning's checkpoints as generations of one run: ``Trainer(plugins=GenerationIO("/ckpts#llama"))``.

    ``ModelCheckpoint`` decides when to save, as ever. The name at the end of its path (``epoch=0-step=100.ckpt``)
    becomes a tag of the generation, so ``ckpt_path="best"`` finds it; nothing is written under that path. A save
    returns when the state is frozen, and a failure is raised by the next save or at the end of the training.
    ``ckpt_path=`` takes references, and ``latest()`` for whatever was committed last.

    ``open_with`` are arguments of ``ckptfmt.open``, ``options`` those of ``Repository.checkpointer``.
    """

    def __init__(
        self, place: str | os.PathLike[str], *, open_with: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        # Lightning calls one rank to save, and that rank has everything: a launch of one, whatever ranks there are.
        self._run = OpenRun(place, open_with, {**options, "rank": 0, "world_size": 1})
        self._paths: dict[str, str] = {}
        self._pending: dict[str, PendingSave] = {}

    def latest(self) -> str | None:
        """A reference to the run for ``ckpt_path=``, or None (a fresh start) if nothing of it was ever committed.

        On a single process the launch begins here, so that what a killed job had staged is finished first.
        """
        if rank_here() == (0, 1) and self._run.exists():
            _ = self._run.checkpointer
        return self._run.reference if self._run.has_committed() else None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save on the rank that Lightning calls. ``SaveFailed`` of an earlier save, ``UnsupportedValue`` by path."""
        if storage_options is not None:
            raise TypeError("save_checkpoint(storage_options=...): pass open_with={'storage_options': ...} instead")
        name = os.path.basename(path)
        if self._paths.setdefault(name, os.fspath(path)) != os.fspath(path):
            raise InvalidInput(
                f"run {self._run.name!r}: {os.fspath(path)} and {self._paths[name]} would have one tag, {name!r}: give "
                "each ModelCheckpoint a filename of its own"
            )
        step = int(checkpoint.get("global_step", 0))
        pending = self._run.checkpointer.save(checkpoint, step=step, tags=[name])
        if pending is not None:
            self._pending[name] = pending

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Build the checkpoint that a reference names, or a path of ``save_checkpoint``; the same one on all ranks.

        There is no pickle in it, so ``weights_only`` changes nothing. ``NotFound``, ``Corrupt``, ...
        """
        if not (map_location is None or isinstance(map_location, str | torch.device)):
            raise InvalidInput(f"map_location={map_location!r}: give a device")
        run, chosen = self._chosen(os.fspath(path))
        loaded = run.find(chosen).load(device=map_location)
        if not isinstance(loaded, dict):
            raise InvalidInput(f"{run.reference}@{chosen}: it holds a {type(loaded).__name__}, no Lightning checkpoint")
        return loaded

    def _chosen(self, path: str) -> tuple[OpenRun, int]:
        """The run and the generation's id, looked up once and told to all ranks."""
        reference = parse_reference(path)
        run = self._run
        if reference.run is not None:
            run = OpenRun(path, self._run.open_with if reference.url == self._run.url else None, {})
        told: list[Any] = [None, None]
        if not _several_ranks() or dist.get_rank() == 0:
            try:
                self._run.settle()
                told[0] = run.find(reference.at if reference.run is not None else f"tag:{os.path.basename(path)}").id
            except CkptError as error:
                if not _several_ranks():
                    raise
                told[1] = error
        if _several_ranks():
            dist.broadcast_object_list(told)
        if told[1] is not None:
            raise told[1]
        return run, told[0]

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Take the tag away. The generation stays: it may be the one to resume from."""
        name = os.path.basename(path)
        self._paths.pop(name, None)
        pending = self._pending.pop(name, None)
        try:
            if pending is not None:
                self._run.repository.untag(pending.result().id, name)
            else:
                self._run.repository.untag(self._run.find(f"tag:{name}").id, name)
        except NotFound:
            pass  # it has moved to a newer save of the same name, or is gone already

    def teardown(self) -> None:
        """Wait for the saves in flight and end the launch. A later save begins a new one."""
        self._pending.clear()
        self._run.close()


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class GenerationCallback(Callback):
    """Saves and restores a training of ``ModelParallelStrategy`` (FSDP2, tensor parallel), whatever its ranks hold:
    ``Trainer(callbacks=GenerationCallback("/ckpts#llama", every_steps=500), enable_checkpointing=False)``.

    ``fit`` begins with what was committed last, or what the reference names (``#llama@step:900``), at any number of
    ranks; a run that never committed starts afresh. Saved are the module, optimizers, schedulers, the loops' progress,
    other callbacks' and the precision plugin's state, random states, and the position of loaders that have
    ``state_dict``. The latter two are each rank's own: at another number of ranks ``map`` says whose a rank gets.

    ``options`` are those of ``Repository.checkpointer``, ``every_steps`` (optimizer steps) above all;
    ``preempt_signals`` end the training after a save.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        map: RankMap | None = None,
        open_with: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._run = OpenRun(place, open_with, options)
        self._map = map
        self._rng = LateRng()
        self._step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = self._state(trainer, pl_module)
        self._run.checkpointer.restore(state, at=self._run.at, map=self._map)
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._rng.apply()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # gradients are still being accumulated
        self._step = trainer.global_step
        checkpointer = self._run.checkpointer
        if checkpointer.should_save(self._step):
            checkpointer.save(self._state(trainer, pl_module), step=self._step)
        if checkpointer.preempted:
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._run.close(exception)

    def _state(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return {
            "model": pl_module,
            "optimizers": list(trainer.optimizers),
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "loop": _Loop(trainer),
            "callbacks": _Callbacks(trainer, self),
            "precision": trainer.precision_plugin,
            "rng": self._rng,
        }


class _Loop:
    """The progress of ``fit``, with what is each rank's own marked so."""

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = self._loop.state_dict()
        own = dict(saved["state_dict"])
        if _LOADERS in own:
            own[_LOADERS] = PerRank(own[_LOADERS])
        return {**saved, "state_dict": own}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        own = dict(saved["state_dict"])
        if isinstance(loaders := own.get(_LOADERS), PerRank):
            own[_LOADERS] = loaders.value
        self._loop.load_state_dict({**saved, "state_dict": own})


class _Callbacks:
    """The states of the other callbacks, by Lightning's keys for them."""

    def __init__(self, trainer: Trainer, besides: Callback) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._callbacks = {one.state_key: one for one in callbacks if one is not besides}

    def state_dict(self) -> dict[str, Any]:
        states = {key: one.state_dict() for key, one in self._callbacks.items()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for key, one in self._callbacks.items():
            if key in saved:
                one.load_state_dict(saved[key])
