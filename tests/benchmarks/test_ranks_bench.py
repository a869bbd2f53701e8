"""The simulation of many ranks commits generations that are whole by the library's own rules, and measures them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from postgres_rig import require_wheel

from benchmarks.columns import aligned
from benchmarks.ranks_tables import goals_of
from benchmarks.ranks_world import Save, World, write_ranks
from ckptfmt.demo import postgres
from ckptfmt.errors import FormatError
from ckptfmt.format import layout
from ckptfmt.format.manifest import Manifest
from ckptfmt.format.merge import merge_parts
from ckptfmt.format.part import Part, decode_part

ROOT = Path(__file__).parents[2]


def run_quick(folder: Path, *groups: str) -> tuple[str, dict[str, object]]:
    require_wheel()
    only = [word for group in groups for word in ("--only", group)]
    command = [sys.executable, "-m", "benchmarks.ranks", "--quick", "--folder", str(folder), *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["ranks.json", "ranks.txt"]
    return done.stdout, json.loads((folder / "ranks.json").read_text())


def parts_of(world: World, folder: Path) -> list[Part]:
    save = Save("0" * 32)
    (folder / save.folder).mkdir(parents=True)
    reports = list(write_ranks(world, save, folder))
    assert [report.rank for report in reports] == list(range(world.ranks))
    return [decode_part((folder / save.folder / layout.part_name(rank)).read_bytes()) for rank in range(world.ranks)]


def merged(parts: list[Part]) -> Manifest:
    return merge_parts(
        parts, id=1, repository="0b8b7b1c-1111-4111-8111-111111111111", run="run", parent=None, members=None
    ).manifest


@pytest.mark.parametrize("layout_", ["even", "mesh", "tiny"])
@pytest.mark.parametrize("ranks", [1, 16])
def test_simulated_ranks_hold_every_tensor_once(tmp_path: Path, layout_: str, ranks: int) -> None:
    world = World(ranks, 20, layout_)  # type: ignore[arg-type]
    parts = parts_of(world, tmp_path)
    manifest = merged(parts)
    assert len(manifest.tensors.name) == 20 + ranks
    assert any(part.claims.tensor for part in parts) == (layout_ == "mesh" and ranks > 1)
    for pack in manifest.packs:
        assert (tmp_path / Save("0" * 32).folder / pack.name).stat().st_size == pack.nbytes
    for row, (name, shape) in enumerate(world.shapes):
        found = [
            (start, size)
            for at, start, size in zip(manifest.boxes.tensor, manifest.boxes.start, manifest.boxes.size, strict=True)
            if at == row
        ]
        held = {share for rank in range(ranks) if (share := world.share(rank, shape)) is not None}
        assert sorted(found) == sorted(held), name


def test_a_simulated_rank_that_is_missing_is_missed(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="1 missing"):
        merged(parts_of(World(4, 3), tmp_path)[:-1])


def test_without_a_server_to_start_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import ranks

    monkeypatch.setattr(postgres, "WHEEL", "no-such-wheel")
    monkeypatch.setattr(sys, "argv", ["ranks", "--quick", "--folder", str(tmp_path / "results")])
    with pytest.raises(SystemExit, match=r"the wheel no-such-wheel.*: pip install -e '\.\[test\]'"):
        ranks.main()
    assert not (tmp_path / "results").exists()


def test_columns_are_aligned() -> None:
    rows = [("goal", "found", "limit"), ("a", "1.5 s", "2"), ("longer", "10 s", "")]
    assert aligned(rows) == ["goal    found  limit", "a       1.5 s      2", "longer   10 s"]
    assert aligned(iter(rows), left=2) == ["goal    found  limit", "a       1.5 s      2", "longer  10 s"]


def test_a_goal_is_missed_by_its_best_round() -> None:
    def sample(seconds: float, ranks: int = 8, group: str = "large") -> dict[str, object]:
        step = {"wall": seconds, "cpu": seconds, "database": seconds / 100, "storage": 0.0}
        steps = dict.fromkeys(("C1", "C2", "C3", "C4", "C5"), step)
        each = {"database": {"mark_durable": seconds / 100, "commit": seconds / 100}}
        facts = {"group": group, "kind": "simulated", "name": f"{ranks}", "ranks": ranks}
        return facts | {"steps": steps, "each": each}

    met = goals_of([sample(9.0), sample(2.0), sample(99.0, ranks=4)])
    assert [(goal["found"], goal["met"]) for goal in met] == [(4.0, True), (0.02, True), (0.04, True)]
    assert [goal["cpu"] for goal in met] == [4.0, None, None]
    assert [goal["met"] for goal in goals_of([sample(2.6), sample(30.0)])] == [False, True, True]
    curve = goals_of([sample(1.0, 4, "curve"), sample(2.0, 8, "curve"), sample(6.0, 16, "curve")])
    assert [(goal["found"], goal["met"]) for goal in curve] == [(1.0, True), (1.5, False)]


@pytest.mark.slow
def test_a_quick_run_commits_and_reads_in_fresh_processes(tmp_path: Path) -> None:
    text, document = run_quick(tmp_path, "large")
    assert "C3 and C4 of 16 x 30 mesh" in text
    samples = document["samples"]
    assert isinstance(samples, list)
    assert [sample["reader"]["mine"] for sample in samples] == [30, 30]
    assert [sample["rows"]["ranks"] for sample in samples] == [16, 16]
    assert [sample["rows"]["generation_packs"] for sample in samples] == [16, 16]


@pytest.mark.long
def test_real_ranks_commit_what_simulated_ones_do(tmp_path: Path) -> None:
    text, document = run_quick(tmp_path, "anchor", "one by one", "curve", "reader")
    assert "Real processes beside the simulation" in text
    samples = document["samples"]
    assert isinstance(samples, list)
    assert [sample["place"] for sample in samples if sample["kind"] == "real"] == ["c10d", "catalog"]
    assert all(set(sample["steps"]) == {"C1", "C2", "C3", "C4", "C5"} for sample in samples)
