"""The run as text: figures of every contender beside the raw limits of the same run, then the goals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from benchmarks.columns import Row, aligned
from benchmarks.goals import Goal, copy_limit, read_limit, write_limit
from benchmarks.loading import WAYS
from benchmarks.meter import GIB
from benchmarks.pairs import LEVEL, best_of
from benchmarks.plan import LIMITS
from benchmarks.samples import Samples

PAIRS_MIN = 9
"""Figures that a verdict needs: more --minutes give them on a slow machine."""


def tables_of(samples: Samples) -> str:
    """All tables of a run: medians, ranges in brackets."""
    asked: Sequence[tuple[str, Callable[[Samples, str], Iterator[str]]]] = (
        ("saves train", _saves),
        ("saves small", _saves),
        ("loads train", _loads),
        ("loads small", _loads),
        ("one tensor", _one_tensor),
        ("first", _first),
        ("modes", _modes),
        ("interference", _interference),
        ("memory", _memory),
        ("starts", _starts),
    )
    return "\n".join(line for group, lines in asked if group in samples.found for line in lines(samples, group))


def goals_table(goals: Sequence[Goal]) -> str:
    """Median, 95% interval, limit and verdict of each goal."""
    rows: list[Row] = [("", "goal", "median", "95% interval", "at most", "")]
    for goal in goals:
        unit = f" {goal.unit}" if goal.unit else ""
        found = goal.found
        verdict = "met" if goal.clear else "met by the interval" if goal.met else "MISSED"
        span = f"{found.low:.3g} to {found.high:.3g}"
        if found.count < PAIRS_MIN:
            verdict += ", but of too few"
        if found.coverage < LEVEL:
            span += f" (only {found.count}: {found.coverage:.0%})"
        rows.append((str(goal.number), goal.text, f"{found.median:.3g}{unit}", span, f"{goal.limit:g}{unit}", verdict))
    missed = sum(not goal.met for goal in goals)
    return "\n".join(
        [*(f"  {line}" for line in aligned(rows, left=2)), f"{len(goals) - missed} of {len(goals)} goals met"]
    )


def _saves(samples: Samples, group: str) -> Iterator[str]:
    nbytes = samples.nbytes(group)
    copy, write = copy_limit(samples, group), write_limit(samples, group)
    ways = best_of(samples.ways(group, LIMITS, "copy")), best_of(samples.ways(group, LIMITS, "write"))
    cpu = median(samples.field(group, LIMITS, "hashed_cpu")) / nbytes * GIB
    limit = f"{LIMITS} ({ways[0]}; {ways[1]} threads)"
    rows: list[Row] = [
        ("", "stall, later", "durable, later", "stall, first", "durable, first", "CPU s/GiB", "memory/state"),
        (limit, spread(copy), spread(write), "", "", f"{cpu:.2f}", ""),
    ]
    for name in _contenders(samples, group):
        later = [samples.later(group, name, field) for field in ("stall", "durable")]
        first = [samples.first(group, name, field) for field in ("stall", "durable")]
        cpu = median(samples.later(group, name, "cpu")) / nbytes * GIB
        peak = max(samples.first(group, name, "peak_growth")) / nbytes
        rows.append((name, *map(spread, later), *map(spread, first), f"{cpu:.2f}", f"{peak:.2f}"))
    yield from _titled(f"Saves of {_state(group, nbytes)} (raw write: fresh file, direct, fsync; hashed CPU)", rows)


def _loads(samples: Samples, group: str) -> Iterator[str]:
    nbytes = samples.nbytes(group)
    cold, warm = read_limit(samples, group, "cold"), read_limit(samples, group, "warm")
    copied = [one + other for one, other in zip(warm, copy_limit(samples, group), strict=True)]
    limit = f"{LIMITS} ({best_of(samples.ways(group, LIMITS, 'cold'))}; in place, warm: and a copy)"
    rows: list[Row] = [
        ("", *WAYS, "CPU s/GiB, cold in place"),
        (limit, *map(spread, (cold, copied, cold, warm)), ""),
        (
            "into fresh memory",
            "",
            "",
            *(spread(samples.way(group, LIMITS, "fresh", at)) for at in ("cold", "warm")),
            "",
        ),
    ]
    for name in _contenders(samples, group):
        measured = samples.found[group][name][0]["seconds"]
        cells = [spread(samples.way(group, name, "seconds", way)) if way in measured else "" for way in WAYS]
        cpu = median(samples.way(group, name, "cpu", WAYS[0])) / nbytes * GIB
        rows.append((name, *cells, f"{cpu:.2f}"))
    yield from _titled(f"Loads of {_state(group, nbytes)} (all compared here; only ckptfmt verifies by itself)", rows)


def _one_tensor(samples: Samples, group: str) -> Iterator[str]:
    title = "One tensor of the small state by name, cold, after imports"
    yield from _fields(samples, group, title, {"open": "open", "seconds": "whole read"})


def _first(samples: Samples, group: str) -> Iterator[str]:
    title = "First save after prepare or restore, ckptfmt, a part of the train state"
    yield from _fields(samples, group, title, {"first": "first stall", "second": "second stall"})


def _modes(samples: Samples, group: str) -> Iterator[str]:
    rows: list[Row] = [("", "stall", "wait for the save before")]
    for way, text in (("saves", "each save waited for"), ("beside_busy", "beside busy processes")):
        rows.append((text, spread(samples.later(group, way, "stall")), ""))
    for way, text in (("back_to_back", "back to back"), ("two_in_flight", "back to back, two in flight")):
        rows.append((text, *(spread(samples.field(group, way, name)) for name in ("stalls", "busy"))))
    yield from _titled("Saves of ckptfmt, a part of the train state, second and later", rows)


def _interference(samples: Samples, group: str) -> Iterator[str]:
    rows: list[Row] = [("", "lost per save", "longest step/median", "stall", "durable beside it")]
    for name in samples.found[group]:
        later = [samples.field(group, name, field, skip=1) for field in ("lost", "stall", "durable", "longest")]
        longest = f"{median(later[3]):.2f} [{min(later[3]):.2f}-{max(later[3]):.2f}]"
        rows.append((name, spread(later[0]), longest, *map(spread, later[1:3])))
    yield from _titled("Saves beside a training loop, a part of the train state", rows)


def _memory(samples: Samples, group: str) -> Iterator[str]:
    rows: list[Row] = [("", "peak beyond before", "of a state of")]
    for way, found in samples.found[group].items():
        peak = max(one["peak"] for one in found)
        rows.append((way, f"{peak / 1e6:.0f} MB", f"{found[0]['nbytes'] / 1e6:.0f} MB"))
    yield from _titled("Memory of ckptfmt (peak of what is resident)", rows)


def _starts(samples: Samples, group: str) -> Iterator[str]:
    yield from _fields(samples, group, "Starts (python alone is the limit)", {"seconds": "from process start"})


def _fields(samples: Samples, group: str, title: str, fields: dict[str, str]) -> Iterator[str]:
    """One row for each contender, one column for each field."""
    rows: list[Row] = [("", *fields.values())]
    rows += [(name, *(spread(samples.field(group, name, field)) for field in fields)) for name in samples.found[group]]
    yield from _titled(title, rows)


def _contenders(samples: Samples, group: str) -> list[str]:
    return [name for name in samples.found[group] if name != LIMITS]


# -- text -------------------------------------------------------------------------------------------
def spread(seconds: Sequence[float]) -> str:
    """``0.52 [0.49-0.61] s``; milliseconds below a tenth of a second."""
    middle = median(seconds)
    scale, unit = (1e3, "ms") if abs(middle) < 0.1 else (1.0, "s")
    figures = [f"{value * scale:.3g}" for value in (middle, min(seconds), max(seconds))]
    return f"{figures[0]} [{figures[1]}-{figures[2]}] {unit}"


def _state(group: str, nbytes: int) -> str:
    return f"the {group.split()[-1]} state, {nbytes / 1e9:.2f} GB"


def _titled(title: str, rows: Sequence[Row]) -> Iterator[str]:
    yield from ("", title, *(f"  {line}" for line in aligned(rows)))
