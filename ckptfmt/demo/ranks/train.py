"""The training process of one rank: ``torchrun -m ckptfmt.demo.ranks.train``, a loop as in the README.

The batch of a step is the same for any number of ranks, each of which takes its share of it. What differs is the
order in which gradients and losses are added up.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptfmt
from ckptfmt import exits
from ckptfmt.demo.attempt import RUN
from ckptfmt.demo.digests import digests
from ckptfmt.demo.journal import Journal, rank_journal
from ckptfmt.demo.model import SIZES, Transformer
from ckptfmt.demo.train import parser, tokens_at, train_step, training_state

STRIDE = 1_000_003
"""Prime, so that consecutive sequences come from places of the text far apart, and no place comes twice."""


class Training:
    """A sharded model with its optimizer and scheduler, and what this rank keeps for itself."""

    def __init__(self, corpus: Path, *, seed: int) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.size = SIZES["ranks"]
        self.share = self.size.batch // self.ranks
        self.text = torch.from_numpy(np.fromfile(corpus, dtype=np.uint8))
        torch.manual_seed(seed)  # the same weights on all ranks, however many
        model = Transformer(self.size)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        for sow in (random.seed, np.random.seed, torch.manual_seed):
            sow(1000 * seed + self.rank)  # other random numbers on each
        self.loader = {"position": self.rank * self.share}
        self.state = training_state(model) | {"loader": ckptfmt.PerRank(self.loader)}

    def step(self) -> float:
        """The loss of the whole batch, equal on all ranks."""
        total = train_step(self.state, self._batch(), self.size).double()
        dist.all_reduce(total)
        return float(total) / self.ranks

    def _batch(self) -> torch.Tensor:
        """(share, context + 1) tokens of two bytes each: this rank's sequences of the step, from its position on.

        All ranks together read ``size.batch`` sequences without a gap. So the first of several neighbours can go on
        for all of them: its position is where the larger share begins.
        """
        length = 2 * (self.size.context + 1)
        first, places = self.loader["position"], len(self.text) - length
        self.loader["position"] += self.size.batch
        starts = [number * STRIDE % places for number in range(first, first + self.share)]
        return tokens_at(self.text, starts, self.size)

    def digests(self) -> tuple[dict[str, str], dict[str, str]]:
        """(of all values as wholes, of this rank's own). Every rank has to call it: wholes are gathered."""
        model, optimizer = self.state["model"], self.state["optimizer"]
        names = {parameter: name for name, parameter in model.named_parameters()}
        wholes = {
            "model": {name: whole(value) for name, value in model.state_dict().items()},
            "optimizer": {
                names[parameter]: {key: whole(value) for key, value in values.items()}
                for parameter, values in optimizer.state.items()
            },
            "settings": [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups],
            "scheduler": self.state["scheduler"].state_dict(),
            "tokens": self.state["tokens"],
        }
        common = digests(wholes) if self.rank == 0 else {}
        return common, digests({"rng": self.state["rng"].state(), "loader": self.loader})


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train_saving(training: Training, journal: Journal, arguments: argparse.Namespace) -> None:
    state = training.state
    saved_by, ranks = arguments.saved_by or training.ranks, training.ranks
    with (
        ckptfmt.open(arguments.url) as repo,
        repo.checkpointer(RUN, every_steps=arguments.every) as ckpt,
    ):
        # Of the saved ranks that this one replaces, the first one's own values.
        done = ckpt.restore(into=state, map=lambda rank: rank * saved_by // ranks)
        if done is not None:
            report = {"generation": done.generation_id, "step": done.step, "seconds": done.seconds}
            tell_values(training, journal, "resumed", **report, amplification=done.amplification)
        for step in range(done.step + 1 if done else 0, arguments.steps):
            tell_step(training, journal, step)
            if ckpt.should_save(step):
                tell_values(training, journal, "saving", step=step)
                ckpt.save(state, step=step)


def train_plain(training: Training, journal: Journal, arguments: argparse.Namespace) -> None:
    for step in range(arguments.steps):
        tell_step(training, journal, step)


def tell_step(training: Training, journal: Journal, step: int) -> None:
    position, drawn = training.loader["position"], random.random()
    loss = training.step()
    journal.tell("step", step=step, loss=loss.hex(), sequences=[position, training.share], drawn=drawn.hex())


def tell_values(training: Training, journal: Journal, event: str, **fields: Any) -> None:
    common, own = training.digests()
    journal.tell(event, **fields, common=common, own=own)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    wanted = parser(__doc__)
    wanted.add_argument("--saved-by", type=int, help="number of ranks that saved what is restored (default: as here)")
    return wanted.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    torch.set_num_threads(1)  # sums keep their order, and the ranks share the machine
    dist.init_process_group("gloo")
    journal = Journal(rank_journal(arguments.journal, dist.get_rank()))
    journal.tell("began", pid=os.getpid(), ranks=dist.get_world_size())
    training = Training(arguments.corpus, seed=arguments.seed)
    if arguments.url:
        train_saving(training, journal, arguments)
    else:
        train_plain(training, journal, arguments)
    journal.tell("finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Where there is a sharded model, torch keeps gloo's threads past the destruction of the group, and one of them that
    # lets go of a tensor while the interpreter shuts down aborts the process (pytorch/pytorch#179291).
    exits.end_now(0)
