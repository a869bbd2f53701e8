"""The tables and goals of ``benchmarks.ranks``. Each figure is the lowest of all rounds of its case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

from benchmarks.columns import Row, aligned

Sample = dict[str, Any]
STEPS: Final = ("C1", "C2", "C3", "C4", "C5")
_COMMITTING: Final = ("mark_durable", "commit")
LARGE_SECONDS: Final = 5.0
COMMIT_SECONDS: Final = 0.1
OPEN_SECONDS: Final = 0.5
STEADY: Final = 1.2
"""What a rank costs at a larger size may be so many times what it costs at the next smaller one, measured."""


def best(samples: Sequence[Sample], pick: Callable[[Sample], float]) -> float:
    return min(map(pick, samples))


def by_name(samples: Sequence[Sample], group: str, kind: str = "simulated") -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample["group"] == group and sample["kind"] == kind:
            found.setdefault(sample["name"], []).append(sample)
    return found


def _total(sample: Sample, what: str, steps: Sequence[str] = STEPS) -> float:
    return sum(float(sample["steps"][step][what]) for step in steps)


def goals_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Every goal whose figures were measured in this run: text, figure, limit, unit and whether it is met."""
    goals: list[dict[str, Any]] = []

    def goal(text: str, found: float, limit: float, unit: str, cpu: float | None = None) -> None:
        goals.append({"text": text, "found": found, "limit": limit, "unit": unit, "met": found <= limit, "cpu": cpu})

    largest = max((sample["ranks"] for sample in samples if sample["group"] == "large"), default=0)
    for name, rounds in by_name(samples, "large").items():
        if rounds[0]["ranks"] == largest:
            seconds = best(rounds, lambda sample: _total(sample, "wall", ("C3", "C4")))
            cpu = best(rounds, lambda sample: _total(sample, "cpu", ("C3", "C4")))
            goal(f"C3 and C4 of {name}", seconds, LARGE_SECONDS, "s", cpu)
            seconds = best(rounds, lambda sample: float(sample["steps"]["C4"]["database"]))
            goal(f"database time of the commit (C4) of {name}", seconds, COMMIT_SECONDS, "s")
            seconds = best(rounds, lambda sample: sum(sample["each"]["database"][call] for call in _COMMITTING))
            goal(f"mark_durable (C3) and commit (C4) of {name}, in the database", seconds, COMMIT_SECONDS, "s")
    for name, rounds in by_name(samples, "reader").items():
        seconds = best(rounds, lambda sample: float(sample["reader"]["open"] + sample["reader"]["share"]))
        cpu = best(rounds, lambda sample: float(sample["reader"]["open_cpu"] + sample["reader"]["share_cpu"]))
        goal(f"one rank opens {rounds[0]['reader']['boxes']} boxes ({name})", seconds, OPEN_SECONDS, "s", cpu)
    curve = [
        (rounds[0]["ranks"], best(rounds, lambda sample: _total(sample, "wall") / sample["ranks"]))
        for rounds in by_name(samples, "curve").values()
    ]
    for (fewer, less), (more, each) in pairwise(curve):
        goal(f"cost of a rank, of {more} beside of {fewer}", each / less, STEADY, "")
    return goals


def text_of(document: dict[str, Any], *, tiny: bool) -> str:
    """All tables as one text."""
    samples, machine = document["samples"], document["machine"]
    head = f"{machine['cpus']} CPUs, load {machine['load']:.1f} at the start, {machine['seconds']:.0f} s in all"
    lines = [head, *(["Tiny worlds, one round: these figures mean nothing."] if tiny else [])]
    for group, title in (
        ("curve", "Few tensors, more and more ranks"),
        ("large", "Many tensors"),
        ("reader", "What a reader opens"),
        ("one by one", "Coordination by the catalog: each rank asks for itself"),
    ):
        found = by_name(samples, group)
        if found:
            lines += ["", title, *aligned(_commits(found)), "", *aligned(_sizes(found))]
            if group == "one by one":
                lines += ["", *aligned(_asked(found))]
    anchors = {**by_name(samples, "anchor"), **by_name(samples, "anchor", "real")}
    if anchors:
        lines += ["", "Real processes beside the simulation", *aligned(_commits(anchors))]
        lines += ["", *aligned(_real(by_name(samples, "anchor", "real")))]
    lines += ["", "Goals", *aligned(_goals(document["goals"]))]
    return "\n".join(lines) + "\n"


def _commits(found: dict[str, list[Sample]]) -> Iterator[Row]:
    yield "ranks x tensors", *STEPS, "C1-C5 s", "cpu s", "database s", "storage s", "us a rank"
    for name, rounds in found.items():
        yield (
            name,
            *(f"{best(rounds, lambda sample, step=step: sample['steps'][step]['wall']):.3f}" for step in STEPS),  # type: ignore[misc]
            *(
                f"{best(rounds, lambda sample, what=what: _total(sample, what)):.3f}"  # type: ignore[misc]
                for what in ("wall", "cpu", "database", "storage")
            ),
            f"{best(rounds, lambda sample: _total(sample, 'wall') / sample['ranks']) * 1e6:.0f}",
        )


def _sizes(found: dict[str, list[Sample]]) -> Iterator[Row]:
    yield (
        "ranks x tensors", "boxes", "rows", "KB a part", "MB manifest", "B a box", "peak MB", "open s", "decode cpu s",
        "share s", "mine", "reader MB",
    )  # fmt: skip
    for name, rounds in found.items():
        one = rounds[0]
        reader, nbytes = one["reader"], one["manifest"]["bytes"]
        yield (
            name,
            f"{reader['boxes']:,}",
            f"{sum(one['rows'].values()):,}",
            f"{one['others']['part_bytes'] / one['ranks'] / 1e3:.1f}",
            f"{nbytes / 1e6:.2f}",
            f"{nbytes / reader['boxes']:.1f}",
            f"{best(rounds, lambda sample: sample['peak_above_start']) / 1e6:.0f}",
            f"{best(rounds, lambda sample: sample['reader']['open']):.3f}",
            f"{best(rounds, lambda sample: sample['reader']['decode_cpu']):.3f}",
            f"{best(rounds, lambda sample: sample['reader']['share']):.3f}",
            f"{reader['mine']}",
            f"{best(rounds, lambda sample: sample['reader']['peak_above_start']) / 1e6:.0f}",
        )


def _asked(found: dict[str, list[Sample]]) -> Iterator[Row]:
    yield "ranks x tensors", "calls a rank", "ms a rank", "s for all, one after the other"
    for name, rounds in found.items():
        seconds = best(rounds, lambda sample: sample["others"]["seconds_a_rank"])
        calls = rounds[0]["others"]["calls_a_rank"]
        yield name, f"{calls:.1f}", f"{seconds * 1e3:.1f}", f"{seconds * rounds[0]['ranks']:.1f}"


def _real(found: dict[str, list[Sample]]) -> Iterator[Row]:
    yield "real processes", "save to commit s", "longest stall ms", "cpu ms a rank"
    for name, rounds in found.items():
        yield (
            name,
            f"{best(rounds, lambda sample: sample['seconds']):.3f}",
            f"{best(rounds, lambda sample: sample['stall']) * 1e3:.1f}",
            f"{best(rounds, lambda sample: sample['cpu_a_rank']) * 1e3:.0f}",
        )


def _goals(goals: Sequence[dict[str, Any]]) -> Iterator[Row]:
    yield "goal", "found", "of which cpu", "at most", ""
    for goal in goals:
        verdict = "met" if goal["met"] else "MISSED"
        cpu = "" if goal["cpu"] is None else f"{goal['cpu']:.3g} s"
        yield goal["text"], f"{goal['found']:.3g} {goal['unit']}", cpu, f"{goal['limit']:g} {goal['unit']}", verdict
