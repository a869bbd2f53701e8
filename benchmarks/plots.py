"""Bars of one run: stall, durable time, load, interference. Needs matplotlib (the extra ``bench``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.goals import copy_limit, read_limit, write_limit
from benchmarks.plan import LIMITS
from benchmarks.samples import Samples

Bars = dict[str, Sequence[float]]
_OURS, _LIMIT, _OTHERS = "#1b7f5c", "#8a8a8a", "#9db7d5"


def plot(samples: Samples, folder: Path) -> list[Path]:
    """Write the PNG files of all groups that were measured; returns their paths."""
    figures: dict[str, tuple[str, Bars]] = {}
    for state in ("train", "small"):
        figures |= _saves(samples, state) | _loads(samples, state)
    if "interference" in samples.found:
        names = samples.found["interference"]
        lost: Bars = {name: samples.field("interference", name, "lost", skip=1) for name in names}
        figures["interference"] = ("Training time lost per save", lost)
    return [_bars(folder / f"{name}.png", title, bars) for name, (title, bars) in figures.items()]


def _saves(samples: Samples, state: str) -> dict[str, tuple[str, Bars]]:
    group = f"saves {state}"
    if group not in samples.found:
        return {}
    names = [name for name in samples.found[group] if name != LIMITS]
    stalls: Bars = {"raw copy": copy_limit(samples, group)}
    durable: Bars = {"raw write": write_limit(samples, group)}
    return {
        f"stall-{state}": (
            f"Stall, {state} state, second save on",
            stalls | {name: samples.later(group, name, "stall") for name in names},
        ),
        f"durable-{state}": (
            f"Call of save to safe on storage, {state} state",
            durable | {name: samples.later(group, name, "durable") for name in names},
        ),
    }


def _loads(samples: Samples, state: str) -> dict[str, tuple[str, Bars]]:
    group = f"loads {state}"
    if group not in samples.found:
        return {}
    bars: Bars = {f"raw {cache} read": read_limit(samples, group, cache) for cache in ("cold", "warm")}
    for name in samples.found[group]:
        if name != LIMITS:
            for cache in ("cold", "warm") if state == "train" else ("cold",):
                bars[f"{name}, {cache}"] = samples.way(group, name, "seconds", f"in place, {cache}")
    return {f"load-{state}": (f"Load in place, {state} state", bars)}


def _bars(path: Path, title: str, bars: Bars) -> Path:
    """One horizontal bar for each median, a line for the range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, values = list(bars), [median(found) for found in bars.values()]
    spans = [
        [middle - min(found) for middle, found in zip(values, bars.values(), strict=True)],
        [max(found) - middle for middle, found in zip(values, bars.values(), strict=True)],
    ]
    colours = [_LIMIT if name.startswith("raw") else _OURS if name.startswith("ckptfmt") else _OTHERS for name in names]
    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.45 * len(names)), layout="constrained")
    axes.barh(names, values, xerr=spans, color=colours, ecolor="#444444", capsize=3)
    axes.invert_yaxis()
    axes.set_xlim(left=min(0.0, min(values)))
    axes.set_xlabel("seconds (median and range)")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
