"""Compares a job that lost a rank, and the smaller one that went on for it, with an uninterrupted one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfmt.demo.comparison import SHOWN
from ckptfmt.demo.journal import losses
from ckptfmt.demo.ranks.job import Events
from ckptfmt.errors import DrillFailed

TOLERANCE = 2e-6
"""Largest relative difference of two losses that only the order of additions may explain.

Losses and gradients are float32 sums: another order changes their last bits (6e-8), which the optimizer passes on from
step to step. A dozen steps made 1e-7 of it. Real faults make more: an optimizer that begins anew 1e-3, a sequence read
twice 7e-3, a scheduler one step late 5e-4, one matrix of the model off by a hundredth 1.5e-5.
"""


@dataclass(frozen=True)
class Findings:
    """What was found equal, and how far losses differ."""

    values: dict[str, int]
    """How many values of each part of the state were compared by digest, after the restore, with what was saved."""
    own_values: int
    """The same for what each rank keeps for itself."""
    resumed_step: int
    resumed_generation: int
    restore_seconds: float
    """Of the slowest rank."""
    amplification: float
    """Bytes read by bytes restored, of the rank with the most."""
    difference_before: float
    """Largest relative difference of losses before the kill, at the same number of ranks."""
    difference_after: float
    """The same for the smaller job."""
    first_loss: float
    last_loss: float


def judge(reference: Sequence[Events], killed: Sequence[Events], resumed: Sequence[Events]) -> Findings:
    """Compare events by rank. ``DrillFailed`` lists what differs.

    ``reference`` has as many ranks as ``killed``, of which ``resumed`` has a part.
    """
    problems: list[str] = []
    expected = numbers(reference[0])
    restored = [_event(events, "resumed") for events in resumed]
    values, own = _restored_values(killed, restored, problems)
    before = _differences("before the kill", expected, numbers(killed[0]), problems)
    after = _differences("after the restart", expected, numbers(resumed[0]), problems)
    first = restored[0]["step"] + 1
    absent = sorted(set(range(first, len(expected))) - set(numbers(resumed[0])))
    absent += sorted(set(range(first)) - set(numbers(killed[0])))
    problems += [f"step {step} was trained by no job" for step in absent]
    problems += _other_batches(reference, killed) + _other_batches(reference, resumed)
    problems += _other_draws(reference, killed, len(killed)) + _other_draws(reference, resumed, len(killed))
    if len(expected) < 2 or not expected[len(expected) - 1] < expected[0]:
        problems.append("the loss of the uninterrupted training does not fall: it proves nothing")
    if problems:
        shown = "\n  ".join(problems[:SHOWN])
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise DrillFailed(f"the training that lost a rank differs from the uninterrupted one:\n  {shown}{more}")
    return Findings(
        values=values,
        own_values=own,
        resumed_step=restored[0]["step"],
        resumed_generation=restored[0]["generation"],
        restore_seconds=max(event["seconds"] for event in restored),
        amplification=max(event["amplification"] for event in restored),
        difference_before=before,
        difference_after=after,
        first_loss=expected[0],
        last_loss=numbers(resumed[0])[len(expected) - 1],
    )


def numbers(events: Events) -> dict[int, float]:
    """Loss per step."""
    return {step: float.fromhex(loss) for step, loss in losses(events).items()}


def _event(events: Events, name: str) -> dict[str, Any]:
    found = next((event for event in events if event["event"] == name), None)
    if found is None:
        raise DrillFailed(f"a rank of the restarted job says nothing of {name!r}: it began afresh")
    return found


def _restored_values(
    killed: Sequence[Events], restored: Sequence[dict[str, Any]], problems: list[str]
) -> tuple[dict[str, int], int]:
    """Every value as a whole, and each rank's own, against what was there when the generation was saved."""
    steps = {(event["step"], event["generation"]) for event in restored}
    if len(steps) > 1:
        raise DrillFailed(f"the ranks restored different generations: {sorted(steps)} (step, generation)")
    step = restored[0]["step"]
    saved = [_saved(events, rank, step) for rank, events in enumerate(killed)]
    problems += _unequal(f"restored step {step}", saved[0]["common"], restored[0]["common"])
    own = 0
    for rank, event in enumerate(restored):
        source = rank * len(killed) // len(restored)
        problems += _unequal(f"own of rank {rank}, from rank {source}", saved[source]["own"], event["own"])
        own += len(event["own"])
    return dict(Counter(path.split("/")[1] for path in saved[0]["common"])), own


def _saved(events: Events, rank: int, step: int) -> dict[str, Any]:
    found = [event for event in events if event["event"] == "saving" and event["step"] == step]
    if not found:
        raise DrillFailed(f"step {step} was restored, and rank {rank} had not saved it")
    return found[-1]


def _unequal(what: str, expected: dict[str, str], found: dict[str, str]) -> Iterable[str]:
    if not expected:
        return [f"{what}: no value was saved"]
    paths = sorted(expected.keys() | found.keys())
    return [f"{what}: {path} is not what was saved" for path in paths if expected.get(path) != found.get(path)]


def _differences(when: str, expected: dict[int, float], found: dict[int, float], problems: list[str]) -> float:
    differences = {step: abs(loss - expected[step]) / abs(expected[step]) for step, loss in found.items()}
    problems += [
        f"{when}: the loss of step {step} is {found[step]!r}, uninterrupted {expected[step]!r}: they differ by "
        f"{difference:.1e} of it, allowed is {TOLERANCE:.0e}"
        for step, difference in differences.items()
        if not difference <= TOLERANCE
    ]
    return max(differences.values(), default=0.0)


def _other_batches(reference: Sequence[Events], job: Sequence[Events]) -> list[str]:
    """Steps whose batch is not the reference's: the union of what the ranks read."""
    expected, found = _batches(reference), _batches(job)
    # A rank that was killed in a step may not have told of it.
    return [
        f"step {step}: {len(job)} ranks read the sequences {sequences}, uninterrupted {expected[step]}"
        for step, sequences in found.items()
        if sequences != expected[step]
    ]


def _batches(job: Sequence[Events]) -> dict[int, list[int]]:
    """Numbers of the sequences that all ranks together read, for each step of which all have told."""
    ranks: list[dict[int, list[int]]] = [
        {event["step"]: event["sequences"] for event in events if event["event"] == "step"} for events in job
    ]
    common = sorted(set.intersection(*(set(steps) for steps in ranks)))
    return {
        step: sorted(number for steps in ranks for number in range(steps[step][0], sum(steps[step]))) for step in common
    }


def _other_draws(reference: Sequence[Events], job: Sequence[Events], saved_by: int) -> list[str]:
    """Random numbers of ranks that do not go on as those of the reference whose place they took."""
    problems = []
    for rank, events in enumerate(job):
        source = rank * saved_by // len(job)
        expected, found = _draws(reference[source]), _draws(events)
        problems += [
            f"step {step}: rank {rank} of {len(job)} drew {float.fromhex(drawn)}, uninterrupted rank {source} drew "
            f"{float.fromhex(expected[step])}"
            for step, drawn in found.items()
            if expected[step] != drawn
        ]
    return problems


def _draws(events: Events) -> dict[int, str]:
    return {event["step"]: event["drawn"] for event in events if event["event"] == "step"}
