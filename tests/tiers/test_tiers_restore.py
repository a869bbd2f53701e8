"""A checkpointer restores from its stage, and from the durable tier once the node is another one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt


def state(seed: int = 0) -> dict[str, Any]:
    return {"big": np.random.default_rng(seed).integers(0, 255, 17 << 20, np.uint8), "step": seed}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("host_bytes_max", [None, 64 << 20])
def test_a_restart_reads_its_stage(tmp_path: Path, lost: bool, host_bytes_max: int | None) -> None:
    root, stage = tmp_path / "durable", tmp_path / "stage"
    with ckptfmt.open(root, stage=stage) as repo, repo.checkpointer("r") as ckpt:
        for step in range(3):
            ckpt.save(state(step), step=step)
    if lost:
        shutil.rmtree(stage)
    live = {"big": np.zeros(17 << 20, np.uint8), "step": -1}
    with ckptfmt.open(root, stage=stage) as repo, repo.checkpointer("r", host_bytes_max=host_bytes_max) as ckpt:
        report = ckpt.restore(live)
    assert report is not None
    assert [source.role for source in report.sources] == ["durable" if lost else "stage"]
    assert report.damaged == ()
    assert live["step"] == 2
    np.testing.assert_array_equal(live["big"], state(2)["big"])


@pytest.mark.slow
def test_a_damaged_stage_is_no_reason_to_fall_back(tmp_path: Path) -> None:
    """The durable tier has it whole: an older generation is not taken."""
    root, stage = tmp_path / "durable", tmp_path / "stage"
    with ckptfmt.open(root, stage={"url": stage, "keep": 2}) as repo, repo.checkpointer("r") as ckpt:
        for step in range(2):
            ckpt.save(state(step), step=step)
    for pack in stage.rglob("*.safetensors"):
        data = bytearray(pack.read_bytes())
        data[5000] ^= 1
        pack.write_bytes(data)
    live = {"big": np.zeros(17 << 20, np.uint8), "step": -1}
    with ckptfmt.open(root, stage=stage) as repo, repo.checkpointer("r", host_bytes_max=64 << 20) as ckpt:
        report = ckpt.restore(live, fallback=True)
        assert report is not None
        assert (report.step, report.fell_back_from) == (1, ())
        assert [problem.tensor for problem in report.damaged] == ["big"]
        events = repo._connection.site.sql().events(generation_id=report.generation_id)
    assert [event.detail["tensor"] for event in events if event.kind == "damage"] == ["big"]
    np.testing.assert_array_equal(live["big"], state(1)["big"])
