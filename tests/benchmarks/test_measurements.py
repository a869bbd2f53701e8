"""The measurements run, compare what they load, and print every table; figures of tiny states mean nothing."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckptfmt
from benchmarks.contenders import SAVERS
from benchmarks.job import Job, run_job
from benchmarks.loading import (
    AFRESH,
    IN_PLACE,
    ONE_TENSOR_READERS,
    WAYS,
    measure_loads,
    measure_one_tensor,
    prepare_saved,
)
from benchmarks.plan import QUICK, Plan
from benchmarks.starts import fill_catalog
from benchmarks.states import build
from ckptfmt.errors import BackendError
from ckptfmt.measure import raw_files, states
from ckptfmt.measure.raw_memory import CopyLimit

ROOT = Path(__file__).parents[2]


def job(folder: Path, contender: str, **options: object) -> Job:
    return Job("", contender, "train", 1_000_000, 20, folder, 1, tuple(options.items()))


def run_quick(folder: Path, *groups: str) -> str:
    only = [word for group in groups for word in ("--only", group)]
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--folder", str(folder), *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_quick_run_prints_limits_beside_figures_and_leaves_only_results(tmp_path: Path) -> None:
    text = run_quick(tmp_path, "saves small", "loads small")
    for title in ("Saves of the small state", "Loads of the small state", "Goals"):
        assert title in text
    assert text.count("raw limits") == 2
    document = json.loads((tmp_path / "results.json").read_text())
    assert {"goals", "machine", "samples", "scale"} == document.keys()
    assert set(document["samples"]["saves small"]) == {"raw limits", *("ckptfmt", "safetensors", "torch.save")} | {
        "DCP async, cached"
    }
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_nothing_begins_that_would_take_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = dataclasses.replace(QUICK, rounds=5)
    clock = [0.0]
    monkeypatch.setattr("benchmarks.plan.time.monotonic", lambda: clock[0])

    def rounds(seconds: float) -> int:
        plan = Plan(scale, tmp_path)
        clock[0] = 0.0

        def group(turn: int) -> None:
            clock[0] += 100.0

        plan._groups["starts"] = group
        return plan.run(["starts"], seconds=seconds)["starts"]

    assert rounds(1e6) == 5
    assert rounds(350.0) == 3
    assert rounds(10.0) == 1  # the first one always runs


def test_the_catalog_that_is_listed_has_as_many_generations(tmp_path: Path) -> None:
    fill_catalog(tmp_path / "listed", 40)
    with ckptfmt.open(tmp_path / "listed", mode="r") as repository:
        listed = repository.generations(run="bench")
    assert [one.commit_seq for one in listed] == list(range(40, 0, -1))


@pytest.mark.long
def test_everything_runs(tmp_path: Path) -> None:
    text = run_quick(tmp_path)
    assert "goals met" in text
    assert "One tensor of the small state by name, cold, after imports" in text
    pytest.importorskip("matplotlib")
    assert {"stall-train.png", "durable-train.png", "load-train.png", "interference.png"} <= {
        path.name for path in tmp_path.iterdir()
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("contender", list(IN_PLACE))
def test_every_load_is_compared(tmp_path: Path, contender: str) -> None:
    about = prepare_saved(job(tmp_path, contender))
    ways = WAYS if contender in AFRESH else WAYS[:2]
    seconds = measure_loads(job(tmp_path, contender, digest=about["digest"], ways=ways))["seconds"]
    assert tuple(seconds) == ways
    assert all(len(one) == 1 for one in seconds.values())
    with pytest.raises(ValueError, match=f"{contender}, in place, cold: the load gave other bytes"):
        measure_loads(job(tmp_path, contender, digest="0" * 32, ways=ways))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("contender", list(ONE_TENSOR_READERS))
def test_one_tensor_is_compared_and_its_bytes_counted(tmp_path: Path, contender: str) -> None:
    one = prepare_saved(job(tmp_path, contender))["one"]
    found = measure_one_tensor(job(tmp_path, contender, **one))
    if contender == "ckptfmt":
        assert found["tensor_bytes"] <= found["pack_bytes"] <= found["tensor_bytes"] + 2 * 4096 + 8192
    with pytest.raises(ValueError, match="other bytes"):
        measure_one_tensor(job(tmp_path, contender, **{**one, "digest": "0" * 32}))


def test_contenders_that_are_compared_can_save() -> None:
    assert set(AFRESH) <= set(IN_PLACE) == set(ONE_TENSOR_READERS)
    assert set(IN_PLACE) <= set(SAVERS)


@pytest.mark.slow
def test_a_job_runs_in_a_process_of_its_own_and_tells_its_error(tmp_path: Path) -> None:
    wrong = Job(
        "loading.measure_loads", "ckptfmt", "train", 1_000_000, 20, tmp_path, 1, (("digest", ""), ("ways", WAYS))
    )
    with pytest.raises(RuntimeError, match=r"(?s)measure_loads of ckptfmt failed.*NotFound"):
        run_job(wrong)


# -- states and limits ------------------------------------------------------------------------------
@pytest.mark.parametrize("nbytes", [1_000_000, 30_000_000])
def test_a_train_state_has_its_size_and_is_the_same_each_time(nbytes: int) -> None:
    state = states.train_state(nbytes)
    assert abs(states.state_bytes(state) - nbytes) < 0.3 * nbytes
    assert states.state_digest(state) == states.state_digest(states.train_state(nbytes))
    assert states.state_digest(states.train_state(nbytes, fill=False)) != states.state_digest(state)
    kinds = {name.split(".")[0]: tensor.dtype for name, tensor in states.named_tensors(state)}
    assert kinds == dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), torch.float32) | {"model": torch.bfloat16}


def test_a_step_changes_every_tensor() -> None:
    state = states.small_state(30)
    before = {name: tensor.clone() for name, tensor in states.named_tensors(state)}
    states.step(state, 3)
    assert all(not torch.equal(before[name], tensor) for name, tensor in states.named_tensors(state))
    sizes = [tensor.nbytes for tensor in before.values()]
    assert 4 << 10 <= min(sizes) <= max(sizes) <= 64 << 10


def test_every_way_to_copy_copies_all(tmp_path: Path) -> None:
    state = build(job(tmp_path, "ckptfmt"))
    for way in ("_by_copy", "_by_foreach", "_by_threads"):
        limit = CopyLimit(state)
        assert set(limit.times(2)) == {"copy_ per tensor", "_foreach_copy_", "np.copyto, threads"}
        limit.memory[:] = bytes(len(limit.memory))
        with limit.threads():
            getattr(limit, way)()
        assert all(
            torch.equal(target, source) for target, source in zip(limit._targets, limit._sources, strict=True)
        ), way


@pytest.mark.parametrize("threads", [1, 3])
def test_raw_writes_and_reads_move_every_byte(tmp_path: Path, threads: int) -> None:
    from ckptfmt.engine.arena import map_memory

    memory = map_memory(20 << 20)[: (20 << 20) - 4096]
    memory[:] = (bytes(range(256)) * (1 << 17))[: len(memory)]
    raw_files.raw_write(tmp_path / "raw", memory, threads=threads, hashed=threads == 3)
    assert (tmp_path / "raw").read_bytes() == memory
    back = map_memory(20 << 20)[: len(memory)]
    for direct in (True, False):
        back[:] = bytes(len(back))
        raw_files.raw_read(tmp_path / "raw", back, threads=threads, direct=direct)
        assert back == memory
    with pytest.raises(FileExistsError):
        raw_files.raw_write(tmp_path / "raw", memory, threads=1)
    with pytest.raises(BackendError, match="ends at offset"):
        raw_files.raw_read(tmp_path / "raw", map_memory(32 << 20), threads=1, direct=False)


def test_the_cache_is_dropped_and_filled_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sub" / "file"
    path.parent.mkdir()
    path.write_bytes(b"x" * (8 << 20))
    if raw_files.cached_bytes(path) is None:
        pytest.skip("this kernel does not tell which pages are cached (cachestat, Linux 6.5)")
    raw_files.drop_cache(tmp_path)
    assert raw_files.cached_bytes(path) == 0
    raw_files.fill_cache(tmp_path)
    assert raw_files.cached_bytes(path) == 8 << 20
    monkeypatch.setattr(raw_files, "_drop", lambda path: None)
    with pytest.raises(BackendError, match="stay in the page cache"):
        raw_files.drop_cache(tmp_path)
