"""Compares an interrupted training with an uninterrupted one, bit by bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ckptfmt.demo.journal import losses
from ckptfmt.errors import DrillFailed

SHOWN = 10


def compare(reference: list[dict[str, Any]], lives: Sequence[tuple[str, list[dict[str, Any]]]]) -> dict[str, int]:
    """Compare the losses of every life, and all final values, with the uninterrupted run.

    Returns how many values of each part of the state were compared by digest. Raises
    ``DrillFailed`` naming the first differences, or the step that nobody trained.
    """
    expected = losses(reference)
    problems: list[str] = []
    trained: set[int] = set()
    for name, events in lives:
        own = losses(events)
        trained |= own.keys()
        problems += [
            f"{name}: loss of step {step} is {float.fromhex(loss)!r}, uninterrupted it was "
            f"{float.fromhex(expected[step])!r}"
            for step, loss in own.items()
            if expected.get(step) != loss
        ]
    problems += [f"step {step} was trained by no process" for step in sorted(expected.keys() - trained)]
    final, wanted = _digests(lives[-1][1]), _digests(reference)
    problems += [
        f"{path}: differs from the uninterrupted run at the end"
        for path in sorted(final.keys() | wanted.keys())
        if final.get(path) != wanted.get(path)
    ]
    if problems:
        shown = "\n  ".join(problems[:SHOWN])
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise DrillFailed(f"the resumed training differs from the uninterrupted one:\n  {shown}{more}")
    return dict(Counter(path.split("/")[1] for path in wanted))


def _digests(events: list[dict[str, Any]]) -> dict[str, str]:
    found: dict[str, str] = next(event for event in events if event["event"] == "finished")["digests"]
    return found
