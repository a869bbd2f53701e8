"""The benchmark of tiers moves real bytes through a real S3 server, and judges what it found by its goals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from s3_rig import binary

from benchmarks.samples import Samples
from benchmarks.tiers_tables import goals_of, notes_of, proves_nothing, tables_of

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def moved(upload: float, download: float, peak: int = 0) -> dict[str, object]:
    def way(seconds: float) -> dict[str, float]:
        return {"seconds": seconds, "cpu": seconds, "peak": peak, "called": 2 * seconds}

    return {"nbytes": 100 * MIB, "upload": [way(99.0), way(upload)], "download": [way(99.0), way(download)]}


def isolation(unlimited: list[float], limited: list[float]) -> Samples:
    """Samples of what a stream of 100 bytes per second kept beside copies."""
    ways = {"unlimited": unlimited, "bandwidth_max": limited}
    return Samples(
        {
            "isolation": {
                name: [{"alone": [100.0] * len(kept), "beside": kept, "copied": [1e6] * len(kept)}]
                for name, kept in ways.items()
            }
        }
    )


def test_an_upload_is_held_against_the_best_of_others_on_each_way() -> None:
    found = {"ckptfmt": [moved(2.0, 3.0, 300 * MIB)], "slow": [moved(9.0, 2.0)], "fast": [moved(4.0, 9.0)]}
    upload, download, *memory = goals_of(Samples({"transfer": found}))
    assert ("fast" in upload.text, upload.found.median, upload.met) == (True, 0.5, True)
    assert ("slow" in download.text, download.found.median, download.met) == (True, 1.5, False)
    assert [(goal.found.median, goal.met) for goal in memory] == [(200.0, True), (200.0, True)]
    too_much = {**found, "ckptfmt": [moved(2.0, 3.0, 357 * MIB)]}
    assert [goal.met for goal in goals_of(Samples({"transfer": too_much}))][2:] == [False, False]


def test_a_stage_is_held_against_the_same_disk_by_later_saves() -> None:
    def sample(first: float, later: float) -> dict[str, object]:
        times = [first, later]
        return {"nbytes": 1, "stall": times, "free": times, "committed": times, "restore": times, "lost": 7.0}

    goals = goals_of(Samples({"stage": {"local": [sample(1.0, 1.0)], "stage": [sample(50.0, 1.05)]}}))
    assert [(goal.found.median, goal.met) for goal in goals] == [(1.05, True)] * 3
    goals = goals_of(Samples({"stage": {"local": [sample(1.0, 1.0)], "stage": [sample(1.0, 1.2)]}}))
    assert [goal.met for goal in goals] == [False] * 3


@pytest.mark.parametrize(("limited", "met"), [([95.0, 97.0, 91.0], True), ([85.0, 80.0, 70.0], False)])
def test_a_limit_is_judged_by_what_the_stream_keeps(limited: list[float], met: bool) -> None:
    samples = isolation([50.0, 60.0, 70.0], limited)
    (goal,) = goals_of(samples)
    assert (goal.met, notes_of(samples)) == (met, [])


def test_a_limit_is_not_judged_where_an_unlimited_copy_disturbs_nobody() -> None:
    samples = isolation([95.0, 89.0, 99.0], [99.0, 99.0, 99.0])
    assert proves_nothing(samples)
    assert goals_of(samples) == []
    assert notes_of(samples) == [
        "isolation proves nothing: an unlimited copy took 5% from the stream, and has to take over 10%"
    ]


def test_tables_have_a_row_for_each_contender_and_way() -> None:
    transfer = Samples({"transfer": {"ckptfmt": [moved(2.0, 3.0)], "other": [moved(1.0, 0.05)]}})
    assert [line.split("  ")[1] for line in tables_of(transfer).splitlines()[3:]] == ["ckptfmt", "other"]
    assert "50 [50-50] ms" in tables_of(transfer)
    assert "40.0% [30.0% to 50.0%]" in tables_of(isolation([50.0, 60.0, 70.0], [99.0]))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_quick_run_measures_everybody_and_leaves_nothing_else(tmp_path: Path) -> None:
    binary("weed")
    for library in ("boto3", "s3fs", "obstore"):
        pytest.importorskip(library, reason="pip install -e '.[bench]'")
    command = [sys.executable, "-m", "benchmarks.tiers", "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiers.json", "tiers.txt"]
    samples = json.loads((tmp_path / "tiers.json").read_text())["samples"]
    assert {group: sorted(found) for group, found in samples.items()} == {
        "transfer": ["boto3", "ckptfmt", "obstore", "s3fs"],
        "stage": ["local", "stage"],
        "isolation": ["bandwidth_max", "unlimited"],
    }
    assert "these figures mean nothing" in done.stdout
