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
from ckptfmt.demo.digests import digests
from ckptfmt.demo.journal import Journal
from ckptfmt.demo.model import SIZES, Transformer

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
        model = Transformer(self.size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
        self.state: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "rng": ckptfmt.Rng(),
            "tokens": 0,
        }

    def step(self) -> float:
        model, optimizer = self.state["model"], self.state["optimizer"]
        loss = model(self._batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        self.state["scheduler"].step()
        self.state["tokens"] += self.size.batch * self.size.context
        return float(loss.detach())

    def _batch(self) -> torch.Tensor:
        """(batch, context + 1) tokens, each of two consecutive bytes, from random places of the text."""
        length = 2 * (self.size.context + 1)
        starts = [random.randrange(len(self.text) - length) for _ in range(self.size.batch)]
        pairs = torch.stack([self.text[start : start + length] for start in starts]).long().view(self.size.batch, -1, 2)
        return pairs[..., 0] * 256 + pairs[..., 1]

    def digests(self) -> dict[str, str]:
        values = {name: self.state[name].state_dict() for name in ("model", "optimizer", "scheduler")}
        return digests({**values, "rng": self.state["rng"].state(), "tokens": self.state["tokens"]})


def learning_rate_factor(step: int) -> float:
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 + 0.5 * math.cos(math.pi * min(step, DECAY_STEPS) / DECAY_STEPS)


def train_saving(training: Training, journal: Journal, arguments: argparse.Namespace) -> None:
    state = training.state
    with (
        ckptfmt.open(arguments.url) as repo,
        repo.checkpointer(arguments.run, every_steps=arguments.every) as ckpt,
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


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--url", help="repository; without it nothing is saved")
    parser.add_argument("--run", default="demo")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    return parser.parse_args(words)


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
