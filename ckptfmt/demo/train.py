"""The training process: ``python -m ckptfmt.demo.train``, a loop as in the README.

It knows nothing of kills: it restores what is there, trains and saves.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckptfmt
from ckptfmt.demo.attempt import RUN
from ckptfmt.demo.digests import digests
from ckptfmt.demo.journal import Journal
from ckptfmt.demo.model import SIZES, Size, Transformer

WARMUP_STEPS, DECAY_STEPS = 10, 1000
"""Fixed, not taken from the number of steps asked for: runs of different length agree on their common steps."""


class Training:
    """Model, optimizer, scheduler, random numbers and a counter, and one step of them all."""

    def __init__(self, corpus: Path, *, size: str, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.size = SIZES[size]
        self.text = torch.from_numpy(np.fromfile(corpus, dtype=np.uint8))
        self.state = training_state(Transformer(self.size), fused=True)

    def step(self) -> float:
        length = 2 * (self.size.context + 1)
        starts = [random.randrange(len(self.text) - length) for _ in range(self.size.batch)]
        return float(train_step(self.state, tokens_at(self.text, starts, self.size), self.size))

    def digests(self) -> dict[str, str]:
        values = {name: self.state[name].state_dict() for name in ("model", "optimizer", "scheduler")}
        return digests({**values, "rng": self.state["rng"].state(), "tokens": self.state["tokens"]})


def training_state(model: torch.nn.Module, **options: Any) -> dict[str, Any]:
    """All that is saved: ``model``, its optimizer with these ``options`` and its scheduler, and what counts along."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, **options)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor),
        "rng": ckptfmt.Rng(),
        "tokens": 0,
    }


def train_step(state: dict[str, Any], batch: torch.Tensor, size: Size) -> torch.Tensor:
    """The loss of ``batch``, which is the whole one of a step or this rank's share of it, after a step with it."""
    model, optimizer = state["model"], state["optimizer"]
    loss: torch.Tensor = model(batch)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    state["scheduler"].step()
    state["tokens"] += size.batch * size.context
    return loss.detach()


def tokens_at(text: torch.Tensor, starts: Sequence[int], size: Size) -> torch.Tensor:
    """(len(starts), context + 1) tokens, each of two consecutive bytes, from these places of the text."""
    length = 2 * (size.context + 1)
    pairs = torch.stack([text[start : start + length] for start in starts]).long().view(len(starts), -1, 2)
    return pairs[..., 0] * 256 + pairs[..., 1]


def learning_rate_factor(step: int) -> float:
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 + 0.5 * math.cos(math.pi * min(step, DECAY_STEPS) / DECAY_STEPS)


def train_saving(training: Training, journal: Journal, arguments: argparse.Namespace) -> None:
    state = training.state
    with (
        ckptfmt.open(arguments.url, stage=arguments.stage) as repo,
        repo.checkpointer(RUN, every_steps=arguments.every) as ckpt,
    ):
        done = ckpt.restore(into=state)
        if done is None:
            journal.tell("started")
        else:
            journal.tell("resumed", generation=done.generation_id, step=done.step, seconds=done.seconds)
        for step in range(done.step + 1 if done else 0, arguments.steps):
            tell_step(training, journal, step)
            if ckpt.should_save(step):
                ckpt.save(state, step=step)


def train_plain(training: Training, journal: Journal, arguments: argparse.Namespace) -> None:
    journal.tell("started")
    for step in range(arguments.steps):
        tell_step(training, journal, step)


def tell_step(training: Training, journal: Journal, step: int) -> None:
    began = time.perf_counter()
    loss = training.step()
    journal.tell("step", step=step, loss=loss.hex(), seconds=time.perf_counter() - began)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments of every training process (``ckptfmt.demo.place.Place.arguments``)."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--corpus", type=Path, required=True)
    made.add_argument("--journal", type=Path, required=True, help="several ranks write one each, beside it")
    made.add_argument("--url", help="repository; without it nothing is saved")
    made.add_argument("--steps", type=int, required=True)
    made.add_argument("--every", type=int, default=5)
    made.add_argument("--seed", type=int, required=True)
    return made


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    wanted = parser(__doc__)
    wanted.add_argument("--size", choices=sorted(SIZES), required=True)
    wanted.add_argument("--threads", type=int, required=True)
    wanted.add_argument("--stage", help="folder on a fast disk that saves are written to first")
    return wanted.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    # The same for every process of a comparison: sums in another order are other sums.
    torch.set_num_threads(arguments.threads)
    journal = Journal(arguments.journal)
    training = Training(arguments.corpus, size=arguments.size, seed=arguments.seed)
    if arguments.url:
        train_saving(training, journal, arguments)
    else:
        train_plain(training, journal, arguments)
    journal.tell("finished", digests=training.digests())


if __name__ == "__main__":
    main()
