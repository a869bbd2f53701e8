"""The power goes at every change that a job makes to its disk; afterwards everything that was promised must be true.

Covers FR-098 of the field reports: "durable" means that file and folder were synced before anything refers to them.
``make test`` runs a sample, ``make rigs`` every 35th of some forty thousand cases, ``RIG_EVERY=1 make rigs`` all.
``RIG_EVERY`` is odd, so that all kinds of cuts have their turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rig_disks import CUTS, KINDS, Disk, Kind
from rig_jobs import JOBS
from rig_needs import need_tools

WORKER = Path(__file__).with_name("rig_power.py")


def cut(folder: Path, orders: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each order to a process of its own, as many at once as there are processors; their summaries."""
    need_tools("mkfs.ext4", "mkfs.xfs", "mount")
    folder.mkdir(exist_ok=True)

    def one(index: int) -> dict[str, Any]:
        order = {"work": str(folder / str(index)), "cuts": CUTS, "first": 0, **orders[index]}
        done = subprocess.run([sys.executable, str(WORKER), json.dumps(order)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        *cases, summary = map(json.loads, done.stdout.splitlines())
        subprocess.run(["rm", "-rf", order["work"]], check=True)
        return {**summary, **{name: order[name] for name in ("kind", "job")}, "found": cases}

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(one, range(len(orders))))


def explain(summaries: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{case['kind']} {case['job']}, power cut ({case.get('cut')}) before {case.get('before')} "
        f"[{case.get('number', case.get('after'))}]:\n  " + "\n  ".join(case["problems"])
        for summary in summaries
        for case in summary["found"]
    ]
    return "\n".join(lines[:5] + ([f"... and {len(lines) - 5} more"] if len(lines) > 5 else []))


@pytest.mark.slow
def test_a_sample_of_cuts(memory_folder: Path) -> None:
    orders = [
        {"kind": kind, "job": job, "every": 331, "first": first}
        for kind, job, first in (("ext4-writeback", "save", 31), ("xfs", "apart", 7))
    ]
    summaries = cut(memory_folder / "sample", orders)
    assert sum(summary["cases"] for summary in summaries) >= 14
    assert not any(summary["wrong"] for summary in summaries), explain(summaries)


@pytest.mark.rig
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_every_job(memory_folder: Path, capsys: pytest.CaptureFixture[str], kind: Kind) -> None:
    every = int(os.environ.get("RIG_EVERY", "35"))
    first = (12 * KINDS.index(kind)) % every  # other cuts on each kind of disk
    summaries = cut(
        memory_folder / "every", [{"kind": kind, "job": job, "every": every, "first": first} for job in JOBS]
    )
    count = sum(summary["cases"] for summary in summaries)
    with capsys.disabled():
        jobs = ", ".join(f"{one['job']} {one['cases']} at {one['calls']} changes" for one in summaries)
        print(f"\n{count} power cuts on {kind}: {jobs}")
    assert not any(summary["wrong"] for summary in summaries), explain(summaries)
    for summary in summaries:
        job = JOBS[summary["job"]]
        assert summary["calls"] >= job.calls_min, f"{job.name} makes {summary['calls']} changes only"
        assert {"sqlite openDirectory", "fsync"} <= set(summary["names"])
    assert count >= 13_000 // every


@pytest.mark.rig
@pytest.mark.timeout(600)
def test_at_any_time(memory_folder: Path) -> None:
    """Also inside a system call: by the clock, not at a change."""
    orders = [
        {"kind": kind, "job": job, "times": 25, "seconds": 0.25, "seed": seed}
        for seed, (kind, job) in enumerate(
            (kind, job) for kind in ("ext4", "xfs") for job in ("create", "save", "large")
        )
    ]
    summaries = cut(memory_folder / "times", orders)
    assert sum(summary["cases"] for summary in summaries) == 150
    assert not any(summary["wrong"] for summary in summaries), explain(summaries)


@pytest.mark.rig
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mutant", "job"), [("files", "save"), ("folders", "apart"), ("sqlite", "save")])
def test_a_sync_left_out_is_found(memory_folder: Path, mutant: str, job: str) -> None:
    """The rig itself: with files, folders or SQLite not synced it must find something lost."""
    orders = [
        {"kind": kind, "job": job, "cuts": ["nothing"], "every": 40, "first": 39, "mutant": mutant}
        for kind in ("ext4", "xfs")
    ]
    summaries = cut(memory_folder / mutant, orders)
    assert all(summary["wrong"] >= 3 for summary in summaries)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_the_rig_loses_what_was_not_synced(new_disk: Callable[..., Disk], kind: str) -> None:
    disk = new_disk(kind)
    (disk.place / "unsynced").write_bytes(b"x" * 5000)
    with (disk.place / "synced").open("wb") as file:
        file.write(b"y" * 5000)
        file.flush()
        os.fsync(file.fileno())
    (disk.place / "synced").rename(disk.place / "renamed")
    disk.cut_power()
    found = {path.name: path.stat().st_size for path in disk.place.iterdir() if path.is_file()}
    assert found.get("unsynced", 0) == 0
    assert found.pop("synced") == 5000
    assert "renamed" not in found
