"""The same through the front: a checkpointer on each rank, one catalog, jobs that shrink and grow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from reshard_rig import as_ranks
from test_ranks_reshard_torch import Job

import ckptfmt
from ckptfmt import PerRank, Rng
from ckptfmt.errors import Mismatch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


def half(rank: int) -> int:
    return rank // 2


@pytest.mark.slow
def test_a_job_shrinks_and_grows(tmp_path: Path) -> None:
    """4 -> 2 -> 4 ranks; the data loader's position is each rank's own, and somebody says whose goes on."""
    root = tmp_path / "repository"
    ckptfmt.open(root).close()

    def work(rank: int, size: int) -> Any:
        job = Job(size)
        state = job.state | {"loader": PerRank({"position": rank}), "rng": Rng(), "epoch": 0}
        told: dict[str, Any] = {}
        with ckptfmt.open(root) as repo, repo.checkpointer("run") as checkpointer:
            latest = repo.generations(run="run")
            if latest and latest[0].world_size != size:
                with pytest.raises(Mismatch, match="map="):
                    checkpointer.restore(state)
            found = {2: lambda rank: rank * 2, 4: half}[size]
            report = checkpointer.restore(state, map=found if latest else None)
            if report is not None:
                told = {"at": report.step, "loader": state["loader"].value["position"], "epoch": state["epoch"]}
                told["image"], told["amplification"] = job.image(), report.amplification
            job.train()
            state["epoch"] += 1
            state["loader"].value["position"] += 10
            checkpointer.save(state, step=state["epoch"]).result()
            told["after"] = job.image()
        return told

    one = as_ranks(tmp_path, 4, work)
    two = as_ranks(tmp_path, 2, work)
    three = as_ranks(tmp_path, 4, work)
    for before, after in ((one, two), (two, three)):
        assert all(told["image"] == before[0]["after"] for told in after)
    assert [told["loader"] for told in two] == [10, 12]
    assert [told["loader"] for told in three] == [20, 20, 22, 22]
    assert [told["epoch"] for told in three] == [2] * 4
    with ckptfmt.open(root, mode="r") as repo:
        assert [info.world_size for info in repo.generations(run="run")] == [4, 2, 4]
        with pytest.raises(Mismatch, match=r"loader: kept by each of 4 ranks"):
            repo.latest("run").load()
        built = repo.latest("run").load(rank=3, exclude="rng*")
        assert built["loader"] == {"position": 32}
        assert built["model"]["0.weight"].shape == (16, 6)


SCRIPT = """
import os, sys, numpy as np, torch, torch.distributed as dist, ckptfmt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
root, step = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
whole = torch.arange(35, dtype=torch.float32).reshape(7, 5)
state = {"w": distribute_tensor(whole * 0, mesh, [Shard(step % 2)]), "own": ckptfmt.PerRank(rank)}
with ckptfmt.open(root) as repo, repo.checkpointer("run") as checkpointer:
    report = checkpointer.restore(state, map=lambda rank: 0)
    assert (report is None) == (step == 0), report
    expected = whole * step
    assert torch.equal(state["w"].full_tensor(), expected), state["w"].full_tensor()
    state["w"] = distribute_tensor(whole * (step + 1), mesh, [Shard(step % 2)])
    checkpointer.save(state, step=step).result()
dist.destroy_process_group()
os._exit(0)  # torch keeps gloo's threads, which may abort an interpreter that shuts down
"""


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    root = tmp_path / "repository"
    ckptfmt.open(root).close()
    for step, ranks in enumerate((2, 3, 1)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(ckptfmt.__file__).parents[1])}
        ended = subprocess.run(
            [*command, str(script), str(root), str(step)], env=environment, capture_output=True, text=True, timeout=150
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
    whole = ckptfmt.load(root, keys="w")["w"]
    np.testing.assert_array_equal(whole.numpy(), np.arange(35, dtype=np.float32).reshape(7, 5) * 3)
