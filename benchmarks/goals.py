"""The goals, and whether this run meets them. Each figure is a ratio of a pair, or stands beside a fixed limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.pairs import Interval, best_of, interval, ratios
from benchmarks.plan import LIMITS
from benchmarks.samples import Samples

MIB = 1 << 20


@dataclass(frozen=True)
class Goal:
    """``found`` against ``limit``: met if the interval's lower end is; ``clear`` if the median is, too."""

    number: int
    text: str
    unit: str
    limit: float
    found: Interval

    @property
    def met(self) -> bool:
        return self.found.low <= self.limit

    @property
    def clear(self) -> bool:
        return self.found.median <= self.limit


def goals_of(samples: Samples) -> list[Goal]:
    """Every goal whose figures were measured in this run."""
    asked: Sequence[tuple[str, Callable[[Samples], Iterator[Goal]]]] = (
        ("saves train", _stall),
        ("saves small", _stall_small),
        ("modes", _beside_busy),
        ("first", _first),
        ("saves train", _durable),
        ("saves small", _durable_small),
        ("loads train", _loads),
        ("loads small", _loads_small),
        ("one tensor", _one_tensor),
        ("interference", _interference),
        ("memory", _memory),
        ("starts", _starts),
    )
    return [goal for group, goals in asked if group in samples.found for goal in goals(samples)]


def _ratio(number: int, text: str, ours: Sequence[float], theirs: Sequence[float], limit: float) -> Goal:
    return Goal(number, text, "", limit, interval(ratios(ours, theirs)))


def copy_limit(samples: Samples, group: str) -> list[float]:
    """Seconds of the best way to copy the state into reused memory."""
    ways = samples.ways(group, LIMITS, "copy")
    return ways[best_of(ways)]


def write_limit(samples: Samples, group: str) -> list[float]:
    """Seconds of the best number of threads to write the state into a fresh file."""
    ways = samples.ways(group, LIMITS, "write")
    return ways[best_of(ways)]


def read_limit(samples: Samples, group: str, cache: str) -> list[float]:
    ways = samples.ways(group, LIMITS, cache)
    return ways[best_of(ways)]


# -- 1: stall ---------------------------------------------------------------------------------------
def _stall(samples: Samples) -> Iterator[Goal]:
    group = "saves train"
    ours = samples.later(group, "ckptfmt", "stall")
    yield _ratio(1, "stall / best raw copy", ours, copy_limit(samples, group), 1.25)
    for contender, limit in (("DCP async, cached", 0.8), ("DCP async", 0.3)):
        yield _ratio(1, f"stall / {contender}", ours, samples.later(group, contender, "stall"), limit)


def _stall_small(samples: Samples) -> Iterator[Goal]:
    ours, theirs = (
        samples.of("saves small", name, lambda one: [one["saves"][1]["stall"]])
        for name in ("ckptfmt", "DCP async, cached")
    )
    yield _ratio(1, "small: stall / DCP async, cached", ours, theirs, 0.2)


def _beside_busy(samples: Samples) -> Iterator[Goal]:
    quiet, busy = (samples.later("modes", way, "stall") for way in ("saves", "beside_busy"))
    yield _ratio(1, "stall beside busy processes / quiet", busy, quiet, 2.5)


def _first(samples: Samples) -> Iterator[Goal]:
    for after in ("prepare", "restore"):
        first, second = (samples.field("first", after, name) for name in ("first", "second"))
        yield _ratio(1, f"first stall after {after} / second", first, second, 1.5)


# -- 2: durable -------------------------------------------------------------------------------------
def _durable(samples: Samples) -> Iterator[Goal]:
    group = "saves train"
    ours = samples.later(group, "ckptfmt", "durable")
    writes = write_limit(samples, group)
    both = [copy + write for copy, write in zip(copy_limit(samples, group), writes, strict=True)]
    yield _ratio(2, "committed / (raw copy + raw write)", ours, both, 1.1)
    yield _ratio(2, "committed from frozen / raw write", samples.later(group, "ckptfmt", "after_stall"), writes, 1.15)
    yield _ratio(2, "committed / safetensors + fsync", ours, samples.later(group, "safetensors", "durable"), 0.7)
    hashed = samples.field(group, LIMITS, "hashed_cpu")
    cpu = samples.later(group, "ckptfmt", "cpu_after_stall")
    yield _ratio(2, "CPU from frozen / raw write and hash", cpu, hashed, 1.5)


def _durable_small(samples: Samples) -> Iterator[Goal]:
    group = "saves small"
    theirs = samples.later(group, "safetensors", "durable")
    yield _ratio(2, "small: committed / safetensors + fsync", samples.later(group, "ckptfmt", "durable"), theirs, 0.6)


# -- 3: restore -------------------------------------------------------------------------------------
def _loads(samples: Samples) -> Iterator[Goal]:
    group = "loads train"
    cold, warm = read_limit(samples, group, "cold"), read_limit(samples, group, "warm")
    copied = [one + other for one, other in zip(warm, copy_limit(samples, group), strict=True)]
    for way in ("in place", "afresh"):
        ours = samples.way(group, "ckptfmt", "seconds", f"{way}, cold")
        yield _ratio(3, f"{way}, cold / raw cold read", ours, cold, 1.1)
        theirs = samples.way(group, "safetensors", "seconds", f"{way}, cold")
        yield _ratio(3, f"{way}, cold / safetensors", ours, theirs, 1.0)
        ours = samples.way(group, "ckptfmt", "seconds", f"{way}, warm")
        yield _ratio(3, f"{way}, warm / (raw warm read + copy)", ours, copied, 1.5)


def _loads_small(samples: Samples) -> Iterator[Goal]:
    group = "loads small"
    for way in ("in place, cold", "in place, warm", "afresh, cold", "afresh, warm"):
        ours, theirs = (samples.way(group, name, "seconds", way) for name in ("ckptfmt", "safetensors"))
        yield _ratio(3, f"small: {way} / safetensors", ours, theirs, 1.1)


def _one_tensor(samples: Samples) -> Iterator[Goal]:
    for text, field, limit in (("repository open", "open", 15.0), ("whole read", "seconds", 60.0)):
        found = [one * 1e3 for one in samples.field("one tensor", "ckptfmt", field)]
        yield Goal(3, f"one tensor: {text}", "ms", limit, interval(found))
    over = samples.of(
        "one tensor", "ckptfmt", lambda one: [(one["pack_bytes"] - -(-one["tensor_bytes"] // 4096) * 4096) / 1024]
    )
    yield Goal(3, "one tensor: pack bytes read beyond whole blocks", "KiB", 8.0, interval(over))


# -- 4 to 6 -----------------------------------------------------------------------------------------
def _interference(samples: Samples) -> Iterator[Goal]:
    def later(contender: str, field: str) -> list[float]:
        return samples.field("interference", contender, field, skip=1)

    for contender in ("DCP async", "DCP async, cached"):
        text = f"lost training time / {contender}"
        yield _ratio(4, text, later("ckptfmt", "lost"), later(contender, "lost"), 0.3)
    longest = interval(later("ckptfmt", "longest"))
    yield Goal(4, "longest step outside the stall / median step", "", 2.0, longest)


def _memory(samples: Samples) -> Iterator[Goal]:
    allowed = {
        "save": (1.0, "beyond the state"),
        "staged": (0.5, "beyond host_bytes_max"),
        "restore, atomic=False": (0.0, "in all"),
    }
    measured = samples.found["memory"]
    for way, (share, beyond) in allowed.items():
        over = [(one["peak"] - share * one["nbytes"]) / MIB for one in measured[way]]
        yield Goal(5, f"memory of {way}, {beyond}", "MiB", 64.0, interval(over))
    grown = [
        one["stall"] / (plain["stall"] + one["sync_share"] * (plain["durable"] - plain["stall"]))
        for one, plain in zip(measured["partial"], measured["save"], strict=True)
    ]
    yield Goal(5, "partial: stall / (stall + write of the synchronous part)", "", 1.25, interval(grown))


def _starts(samples: Samples) -> Iterator[Goal]:
    nothing, ours = (samples.field("starts", name, "seconds") for name in ("python", "import ckptfmt"))
    own = [(one - other) * 1e3 for one, other in zip(ours, nothing, strict=True)]
    yield Goal(6, "import ckptfmt, without Python's own start", "ms", 30.0, interval(own))
    for name, limit in (("ckptfmt --help", 250.0), ("ckptfmt ls", 400.0)):
        found = [one * 1e3 for one in samples.field("starts", name, "seconds")]
        yield Goal(6, f"{name}, from process start", "ms", limit, interval(found))
