"""The tables and goals of ``benchmarks.tiers``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from benchmarks.columns import Row, aligned
from benchmarks.goals import MIB, Goal
from benchmarks.meter import GIB
from benchmarks.pairs import best_of, interval, ratios
from benchmarks.samples import Samples
from benchmarks.tables import spread

OURS = "ckptfmt"
MEMORY_MIB = 256.0
"""Beyond one state: what an upload or a download may take."""
LIKE_LOCAL = 1.1
"""What a stage may take, in times of the same disk without a tier behind it."""
KEPT_OUT = 0.1
"""The share of its rate that a stream may lose beside a limited copy, and has to lose beside an unlimited one."""


def goals_of(samples: Samples) -> list[Goal]:
    """Every goal whose figures were measured in this run."""
    asked = (("transfer", _transfer), ("stage", _stage), ("isolation", _isolation))
    return [goal for group, goals in asked if group in samples.found for goal in goals(samples)]


def _moved(samples: Samples, name: str, way: str, field: str) -> list[float]:
    """Of all but the first of each process: nobody has used its memory and its volumes of the server before."""
    return samples.of("transfer", name, lambda sample: [float(moved[field]) for moved in sample[way][1:]])


def _transfer(samples: Samples) -> Iterator[Goal]:
    for way in ("upload", "download"):
        ours = _moved(samples, OURS, way, "seconds")
        others = {name: _moved(samples, name, way, "seconds") for name in samples.found["transfer"] if name != OURS}
        best = best_of(others)
        yield Goal(1, f"{way}: time / the best of others ({best})", "", 1.0, interval(ratios(ours, others[best])))
    for way in ("upload", "download"):
        found = [(peak - samples.nbytes("transfer")) / MIB for peak in _moved(samples, OURS, way, "peak")]
        yield Goal(1, f"{way}: memory beyond the state", "MiB", MEMORY_MIB, interval(found))


def _stage(samples: Samples) -> Iterator[Goal]:
    for field, text in (("stall", "stall"), ("free", "memory is free"), ("restore", "restore, cold")):
        staged, local = (samples.field("stage", way, field, skip=1) for way in ("stage", "local"))
        yield Goal(2, f"{text} / without tiers", "", LIKE_LOCAL, interval(ratios(staged, local)))


def lost(samples: Samples, way: str) -> list[float]:
    """The share of its rate that the stream lost, of each pair."""
    alone, beside = (samples.field("isolation", way, field) for field in ("alone", "beside"))
    return [1 - kept for kept in ratios(beside, alone)]


def proves_nothing(samples: Samples) -> bool:
    """Whether the stream lost so little beside an unlimited copy that there is nothing for a limit to keep from it."""
    return interval(lost(samples, "unlimited")).median <= KEPT_OUT


def _isolation(samples: Samples) -> Iterator[Goal]:
    if not proves_nothing(samples):
        found = interval(lost(samples, "bandwidth_max"))
        yield Goal(3, "share of its rate that a stream loses beside a limited copy", "", KEPT_OUT, found)


def notes_of(samples: Samples) -> list[str]:
    """What the goals do not tell by themselves."""
    if "isolation" not in samples.found or not proves_nothing(samples):
        return []
    control = interval(lost(samples, "unlimited")).median
    return [f"isolation proves nothing: an unlimited copy took {control:.0%} from the stream, and has to take over 10%"]


def tables_of(samples: Samples) -> str:
    """All tables of a run: medians, ranges in brackets."""
    asked: Sequence[tuple[str, Callable[[Samples], Iterator[str]]]] = (
        ("transfer", _transfer_table),
        ("stage", _stage_table),
        ("isolation", _isolation_table),
    )
    return "\n".join(line for group, lines in asked if group in samples.found for line in lines(samples))


def _transfer_table(samples: Samples) -> Iterator[str]:
    nbytes = samples.nbytes("transfer")
    columns = [f"{way}{what}" for way in ("upload", "download") for what in ("", ", CPU s/GiB", ", MiB")]
    rows: list[Row] = [("", *columns, "upload from the call")]
    for name in samples.found["transfer"]:
        cells: list[str] = []
        for way in ("upload", "download"):
            cpu = median(_moved(samples, name, way, "cpu")) / nbytes * GIB
            peak = max(_moved(samples, name, way, "peak")) / MIB
            cells += [spread(_moved(samples, name, way, "seconds")), f"{cpu:.2f}", f"{peak:.0f}"]
        rows.append((name, *cells, spread(_moved(samples, name, "upload", "called"))))
    yield from _titled(f"{nbytes / 1e9:.2f} GB to and from one S3 server (ckptfmt: hashed, committed, verified)", rows)


def _stage_table(samples: Samples) -> Iterator[str]:
    rows: list[Row] = [("", "stall", "memory free", "committed", "committed after that", "restore", "stage lost")]
    for way in samples.found["stage"]:
        stall, free, committed, restore = (
            samples.field("stage", way, field, skip=1) for field in ("stall", "free", "committed", "restore")
        )
        lag = [whole - part for whole, part in zip(committed, free, strict=True)]
        gone = spread(samples.field("stage", way, "lost")) if way == "stage" else ""
        rows.append((way, *map(spread, (stall, free, committed, lag, restore)), gone))
    title = f"{samples.nbytes('stage') / 1e9:.2f} GB to a local disk, and to a stage on it before S3, later saves"
    yield from _titled(title, rows)


def _isolation_table(samples: Samples) -> Iterator[str]:
    rows: list[Row] = [("", "stream alone, MB/s", "beside, MB/s", "lost", "copy, MB/s")]
    for way in samples.found["isolation"]:
        rates = [median(samples.field("isolation", way, field)) / 1e6 for field in ("alone", "beside", "copied")]
        share = lost(samples, way)
        told = f"{median(share):.1%} [{min(share):.1%} to {max(share):.1%}]"
        rows.append((way, f"{rates[0]:.0f}", f"{rates[1]:.0f}", told, f"{rates[2]:.0f}"))
    yield from _titled("A stream of data beside the copy from a stage to S3", rows)


def _titled(title: str, rows: Sequence[Row]) -> Iterator[str]:
    yield from ("", title, *(f"  {line}" for line in aligned(rows)))
