"""``make bench``: ckptfmt beside what people use, and beside what memory and disk allow.

    python -m benchmarks.run [--folder DIR] [--only GROUP ...] [--rounds N] [--minutes M] [--quick]

Every measurement is a fresh process and contenders take turns, so that a slow minute of the machine meets all of
them. Figures of one machine do not travel to another; ratios do. A ratio is taken for each pair of the same round and
place in it, its interval from order statistics (sign test). Writes ``results.json``, ``results.txt`` and plots.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.goals import goals_of
from benchmarks.plan import FULL, QUICK, Plan, Scale
from benchmarks.tables import goals_table, tables_of
from ckptfmt.engine.arena import available_memory

GROUPS = (
    "saves train",
    "saves small",
    "loads train",
    "loads small",
    "one tensor",
    "first",
    "modes",
    "interference",
    "memory",
    "starts",
)
PACKAGES = ("ckptfmt", "numpy", "safetensors", "torch")


def main() -> None:
    arguments = _parser().parse_args()
    scale = QUICK if arguments.quick else FULL
    if arguments.rounds is not None:
        scale = dataclasses.replace(scale, rounds=arguments.rounds)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    print(_told(machine), file=sys.stderr)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        plan = Plan(scale, Path(folder))
        rounds = plan.run(arguments.only or GROUPS, seconds=arguments.minutes * 60)
    report(plan, scale, machine | {"seconds": time.monotonic() - began, "rounds": rounds}, arguments.folder)


def report(plan: Plan, scale: Scale, machine: dict[str, Any], folder: Path) -> None:
    """Print the tables and write them, the figures and the plots."""
    goals = goals_of(plan.samples)
    note = "\nTiny states, one round: these figures mean nothing.\n" if scale == QUICK else ""
    text = f"{_told(machine)}\n{note}{tables_of(plan.samples)}\n\nGoals\n{goals_table(goals)}\n"
    print(text)
    (folder / "results.txt").write_text(text)
    document = {
        "machine": machine,
        "scale": dataclasses.asdict(scale),
        "samples": plan.samples.found,
        "goals": [dataclasses.asdict(goal) | {"met": goal.met} for goal in goals],
    }
    (folder / "results.json").write_text(json.dumps(document, indent=1))
    print(f"written: {folder / 'results.txt'}, results.json")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed (pip install 'ckptfmt[bench]')")
        return
    from benchmarks.plots import plot

    for path in plot(plan.samples, folder):
        print(f"written: {path}")


def describe_machine() -> dict[str, Any]:
    """What the figures depend on, and how busy it was."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "memory": available_memory(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _told(machine: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    rounds = machine.get("rounds")
    took = (
        ""
        if rounds is None
        else f"; {min(rounds.values())} to {max(rounds.values())} rounds in {machine['seconds']:.0f} s"
    )
    return (
        f"{machine['cpus']} CPUs, load {machine['load']:.1f} at the start, Linux {machine['kernel']}, "
        f"Python {machine['python']}, {packages}{took}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=Path("bench-results"), help="where to write (default: %(default)s)"
    )
    parser.add_argument("--only", action="append", choices=GROUPS, help="measure this group; may be repeated")
    parser.add_argument("--rounds", type=int, help=f"at most so many (default: {FULL.rounds})")
    parser.add_argument(
        "--minutes", type=float, default=13.0, help="begin nothing that would take longer (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny states, one round: does it run, nothing more")
    return parser


if __name__ == "__main__":
    main()
