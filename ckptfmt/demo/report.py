"""What a demo found, as frozen values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ckptfmt import GenerationInfo
from ckptfmt.demo.journal import losses
from ckptfmt.demo.killer import Kill


@dataclass(frozen=True)
class Life:
    """One training process: what it resumed from, what it did, what ended it."""

    name: str
    resumed_generation: int | None
    """None: nothing was committed yet, and it began at step 0."""
    resumed_step: int | None
    restore_seconds: float | None
    steps: int
    """Steps it finished; 0 proves nothing about the resume."""
    exact: bool
    """Every loss equals that of the uninterrupted run, to the last bit."""
    kill: Kill | None
    """None: it came to its end."""

    @classmethod
    def of(cls, name: str, events: Sequence[dict[str, Any]], reference: dict[int, str], kill: Kill | None) -> Life:
        resumed = next((event for event in events if event["event"] == "resumed"), None)
        own = losses(list(events))
        return cls(
            name=name,
            resumed_generation=resumed["generation"] if resumed else None,
            resumed_step=resumed["step"] if resumed else None,
            restore_seconds=resumed["seconds"] if resumed else None,
            steps=len(own),
            exact=all(reference[step] == loss for step, loss in own.items()),
            kill=kill,
        )


@dataclass(frozen=True)
class CommitFigures:
    """Medians over the committed generations, as the catalog recorded them."""

    commits: int
    state_bytes: int
    stall_seconds: float
    longest_stall_seconds: float
    commit_seconds: float
    """From the beginning of the save in the catalog to the commit record."""
    bytes_per_second: float
    """State bytes by the time until they were durable."""

    @classmethod
    def of(cls, generations: Sequence[GenerationInfo]) -> CommitFigures:
        stalls = [one.stall_seconds for one in generations if one.stall_seconds is not None]
        commits, rates = [], []
        for one in generations:
            if one.created_at and one.durable_at and one.committed_at and one.nbytes:
                commits.append((one.committed_at - one.created_at).total_seconds())
                rates.append(one.nbytes / max((one.durable_at - one.created_at).total_seconds(), 1e-3))
        return cls(
            commits=len(generations),
            state_bytes=max((one.nbytes or 0 for one in generations), default=0),
            stall_seconds=median(stalls),
            longest_stall_seconds=max(stalls),
            commit_seconds=median(commits),
            bytes_per_second=median(rates),
        )


@dataclass(frozen=True)
class DemoReport:
    """A finished demo: everything in it was found equal to the uninterrupted run."""

    url: str
    steps: int
    seconds: float
    lives: tuple[Life, ...]
    first_loss: float
    last_loss: float
    values: dict[str, int]
    """How many values of each part of the state (model, optimizer, scheduler, rng, tokens) were compared by digest."""
    saves: CommitFigures

    @property
    def kills(self) -> int:
        return sum(life.kill is not None for life in self.lives)

    @property
    def kills_while_writing(self) -> int:
        return sum(life.kill is not None and life.kill.state == "writing" for life in self.lives)

    @property
    def resumes(self) -> int:
        """Lives that had something to resume and finished at least one step."""
        return sum(life.resumed_generation is not None and life.steps > 0 for life in self.lives)

    @property
    def exact_resumes(self) -> int:
        return sum(life.resumed_generation is not None and life.steps > 0 and life.exact for life in self.lives)

    def as_json(self) -> dict[str, Any]:
        """As spec/cli-json.md has it."""
        counts = ("kills", "kills_while_writing", "resumes", "exact_resumes")
        return {"report": "demo", **dataclasses.asdict(self), **{name: getattr(self, name) for name in counts}}
