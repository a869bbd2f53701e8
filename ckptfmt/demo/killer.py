"""Kills a training process at a random moment while one of its generations is ``writing``."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import median

from ckptfmt import GenerationInfo, Repository
from ckptfmt.demo.attempt import RUN, Attempt
from ckptfmt.errors import DrillFailed

POLL_SECONDS = 0.002
FIRST_GUESS_SECONDS = 0.3
"""How long a generation is ``writing``, until the catalog can tell."""

PATIENCE_SECONDS = 120


@dataclass(frozen=True)
class Kill:
    """What a SIGKILL hit. ``generation`` and ``step`` are those in flight, None where none was.

    ``state`` is read from the catalog after the death of the process.
    """

    generation: int | None
    step: int | None
    state: str | None


class Killer:
    def __init__(self, repo: Repository, rng: random.Random) -> None:
        self._repo = repo
        self._rng = rng

    def kill_while_writing(self, attempt: Attempt) -> Kill | None:
        """Let some saves pass, then kill within the time that a save takes. None if the attempt ended first.

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
                time.sleep(self._rng.triangular(0, self._writing_seconds(), 0))
                if self._state_of(target.id) == "writing":
                    return self._kill(attempt, target)
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
        return Kill(target.id, target.step, self._state_of(target.id))

    def _writing(self, passed: set[int]) -> GenerationInfo | None:
        return next((one for one in self._repo.generations(run=RUN, state="writing") if one.id not in passed), None)

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
