"""Conditional create, tried for real: threads race for one name, and exactly one may win."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ckptfmt.doctor.report import Finding
from ckptfmt.errors import CkptError, Conflict
from ckptfmt.ports.backend import Backend

ROUNDS: Final = 10
RACERS: Final = 8
_NAME: Final = "conditional create"


def conditional_create(make_backend: Callable[[Path], Backend], folder: Path) -> Finding:
    """Let ``RACERS`` threads create one key with other bytes each, ``ROUNDS`` times."""
    backend = make_backend(folder)
    wrong = [problem for number in range(ROUNDS) if (problem := _race(backend, f"race{number}")) is not None]
    facts = {"races": ROUNDS, "wrong": len(wrong)}
    if wrong:
        consequence = "two writers can both believe that they committed: a repository here is not safe"
        fix = "keep repositories on another file system; the driver or server of this one breaks create-if-absent"
        return Finding(_NAME, "bad", f"{len(wrong)} of {ROUNDS} races went wrong: {wrong[0]}", consequence, fix, facts)
    consequence = "of two writers of one record exactly one wins, and the other is told"
    return Finding(_NAME, "good", f"{ROUNDS} races of {RACERS} threads had one winner each", consequence, None, facts)


def _race(backend: Backend, key: str) -> str | None:
    """What went wrong, None if one racer won, all others were told so, and its bytes are there."""
    start = threading.Barrier(RACERS)
    winners: list[int] = []
    problems: list[str] = []

    def run(number: int) -> None:
        start.wait()
        try:
            backend.create(key, _bytes_of(number))
            winners.append(number)
        except Conflict:
            pass
        except CkptError as error:
            problems.append(str(error))

    racers = [threading.Thread(target=run, args=(number,)) for number in range(RACERS)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    if problems:
        return problems[0]
    if len(winners) != 1:
        return f"{len(winners)} of {RACERS} threads were told that they had created one name"
    if backend.read(key, limit=1 << 16) != _bytes_of(winners[0]):
        return "the name holds other bytes than its creator wrote"
    return None


def _bytes_of(number: int) -> bytes:
    return bytes([number]) * (1000 + number)
