"""Kills a training process at a random moment while one of its generations is ``writing``, perhaps staged already."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import median

from ckptfmt import GenerationInfo, Repository
from ckptfmt.demo.attempt import RUN, Attempt
from ckptfmt.errors import DrillFailed
from ckptfmt.ports.catalog import Catalog

POLL_SECONDS = 0.002
FIRST_GUESS_SECONDS = 0.3
"""How long a generation is ``writing``, until the catalog can tell."""

COPY_SECONDS = 0.1
"""Less than a copy from the stage to the durable tier takes."""

PATIENCE_SECONDS = 120


@dataclass(frozen=True)
class Kill:
    """What a SIGKILL hit. ``generation`` and ``step`` are those in flight, None where none was.

    ``state`` and ``staged`` are read from the catalog after the death of the process.
    """

    generation: int | None
    step: int | None
    state: str | None
    staged: bool = False
    """All of it was on the stage, and not acknowledged as durable."""


class Killer:
    def __init__(self, repo: Repository, catalog: Catalog, rng: random.Random) -> None:
        self._repo = repo
        self._catalog = catalog
        self._rng = rng

    def kill_while_writing(self, attempt: Attempt, within_seconds: float | None = None) -> Kill | None:
        """Let some saves pass, then kill within the time that a save takes. None if the attempt ended first.

        With ``within_seconds`` it is so long at most after a save began.
        A save can be through before the signal arrives: then the next one is waited for.
        """
        if not attempt.wait_for_training():
            return None  # until it trains, a row that is writing is one that an earlier process left
        passed: set[int] = set()
        spared = self._rng.randrange(3)
        patience = time.monotonic() + PATIENCE_SECONDS
        while not attempt.ended():
            if time.monotonic() > patience:
                raise DrillFailed(f"{attempt.name}: no save came into sight for {PATIENCE_SECONDS} s")
            target = self._writing(passed)
            if target is not None and spared:
                passed.add(target.id)
                spared -= 1
            elif target is not None:
                # Early moments are likelier: a save begins with the flush, which is what a kill should hit.
                time.sleep(self._rng.triangular(0, within_seconds or self._writing_seconds(), 0))
                if self._state_of(target.id) == "writing":
                    return self._kill(attempt, target)
                passed.add(target.id)
            time.sleep(POLL_SECONDS)
        return None

    def kill_staged(self, attempt: Attempt) -> Kill | None:
        """Kill while a save is copied from the stage to the durable tier. None if the attempt ended first.

        The copy can be through before the signal arrives: ``Kill.staged`` tells.
        """
        if not attempt.wait_for_training():
            return None
        passed: set[int] = set()
        spared = self._rng.randrange(2)
        patience = time.monotonic() + PATIENCE_SECONDS
        while not attempt.ended():
            if time.monotonic() > patience:
                raise DrillFailed(f"{attempt.name}: no staged save came into sight for {PATIENCE_SECONDS} s")
            target = self._writing(passed)
            if target is not None and self._is_staged(target.id):
                if not spared:
                    time.sleep(self._rng.uniform(0, COPY_SECONDS))
                    if self._is_staged(target.id):
                        return self._kill(attempt, target)
                spared = 0
                passed.add(target.id)
            time.sleep(POLL_SECONDS)
        return None

    def kill_any_time(self, attempt: Attempt, within_seconds: float) -> Kill | None:
        """Kill at a random moment after training began. None if the attempt ended first."""
        if not attempt.wait_for_training():
            return None
        time.sleep(self._rng.uniform(0, within_seconds))
        return self._kill(attempt, self._writing(set()))

    def _kill(self, attempt: Attempt, target: GenerationInfo | None) -> Kill | None:
        if not attempt.kill():
            return None
        if target is None:
            return Kill(None, None, None)
        state = self._state_of(target.id)
        return Kill(target.id, target.step, state, state == "writing" and self._is_staged(target.id))

    def _writing(self, passed: set[int]) -> GenerationInfo | None:
        return next((one for one in self._repo.generations(run=RUN, state="writing") if one.id not in passed), None)

    def _is_staged(self, generation: int) -> bool:
        ranks = self._catalog.ranks(generation)
        return bool(ranks) and all(rank.state == "staged" for rank in ranks)

    def _state_of(self, generation: int) -> str | None:
        everything = self._repo.generations(run=RUN, state=None)
        return next((one.state for one in everything if one.id == generation), None)

    def _writing_seconds(self) -> float:
        times = [
            (one.durable_at - one.created_at).total_seconds()
            for one in self._repo.generations(run=RUN, limit=5)
            if one.durable_at and one.created_at
        ]
        return median(times) if times else FIRST_GUESS_SECONDS
