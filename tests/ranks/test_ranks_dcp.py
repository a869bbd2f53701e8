"""torch.distributed.checkpoint with several ranks over generations: layouts, meetings, failures, async saves.

The scenarios are those of torch's own tests of its storages, as spec/dcp.md lists them.
"""

from __future__ import annotations

import io
import itertools
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as helpers
import torch.distributed.fsdp
from meeting_rig import Job, Rank, rows_of
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptfmt
from ckptfmt.torch.dcp import GenerationReader, GenerationWriter

WORLD = 4


@pytest.fixture
def start(root: Path, agent: int) -> Callable[..., Job]:
    """``start(world)``: a new start of the job, in one process group."""
    return lambda world=WORLD: Job(root, "c10d", world=world, agent=agent)


def writer_of(rank: Rank, **options: Any) -> GenerationWriter:
    return GenerationWriter(rank.job.root, run="run", **{"commit_timeout": 30.0, **options})


def reader_of(rank: Rank, **options: Any) -> GenerationReader:
    return GenerationReader(rank.job.root, run="run", **options)


# -- layouts ---------------------------------------------------------------------------------------------
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "replicate": ((4,), [Replicate()]),
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "copies of rows": ((2, 2), [Replicate(), Shard(0)]),
    "rows of copies": ((2, 2), [Shard(0), Replicate()]),
    "blocks": ((2, 2), [Shard(0), Shard(1)]),
}


@pytest.mark.slow
def test_every_layout_into_every_layout(start: Callable[..., Job]) -> None:
    """test_dtensor_resharding, test_dtensor_checkpoint and test_hsdp_checkpoint; 10 x 5 divides by no 4."""

    def body(rank: Rank) -> int:
        whole = torch.arange(50.0).reshape(10, 5)
        loads = 0
        with writer_of(rank) as writer:
            for step, (shape, placements) in enumerate(LAYOUTS.values()):
                mesh = init_device_mesh("cpu", shape)
                state = {"t": distribute_tensor(whole + step, mesh, placements), "n": step}
                dcp.save(state, storage_writer=writer, checkpoint_id=step)
                for shape_, placements_ in LAYOUTS.values():
                    mesh_ = init_device_mesh("cpu", shape_)
                    into = {"t": zeros([10, 5], device_mesh=mesh_, placements=placements_), "n": -1}
                    dcp.load(into, storage_reader=reader_of(rank))
                    assert torch.equal(into["t"].full_tensor(), whole + step)
                    assert into["n"] == step
                    loads += 1
        return loads

    job = start()
    assert job.run(body) == [36] * WORLD
    assert [row["state"] for row in rows_of(job.root)] == ["committed"] * 6
    assert torch.equal(ckptfmt.load(job.root, at="step:5")["t"], torch.arange(50.0).reshape(10, 5) + 5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 10), nn.Linear(10, 7)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


def trained(steps: int, lr: float, shape: tuple[int, ...] = (4,)) -> tuple[nn.Module, torch.optim.Optimizer]:
    net: nn.Module = Net()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[: len(shape)])
    if len(shape) == 2:
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        net = parallelize_module(net, mesh["tensor"], plan)
        mesh = mesh["data"]
    for layer in (net.first, net.second, net):
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    for step in range(steps):
        torch.manual_seed(step)
        net(torch.rand(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def whole_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(whole_of, value))
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return [str(value.dtype), value.tolist()] if isinstance(value, torch.Tensor) else repr(value)


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optimizers = helpers.get_state_dict(net, optimizer)
    return {"model": model, "optimizer": optimizers, "list": [torch.arange(3), {"lr": 0.1, "t": torch.tensor(2)}]}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["save", "async_save"])
def test_fsdp_models_and_optimizers_at_another_world_size(start: Callable[..., Job], mode: str) -> None:
    """test_e2e_save_and_load and test_fsdp_dsd: four ranks save, two and one load, also through ckptfmt."""

    def save(rank: Rank) -> Any:
        state = state_of(*trained(2, 0.1))
        with writer_of(rank) as writer:
            if mode == "save":
                dcp.save(state, storage_writer=writer)
            else:
                wanted = whole_of(state)  # not beside the save: its collectives are those of the same group
                future = dcp.async_save(state, storage_writer=writer)
                for tensor in state["model"].values():
                    (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
                future.result(60)
                return wanted
        return whole_of(state)

    def load(rank: Rank) -> Any:
        net, optimizer = trained(1, 0.3, (rank.job.world,))
        state = state_of(net, optimizer)
        state["list"] = [torch.zeros(3, dtype=torch.int64), {"lr": 0.0, "t": torch.tensor(0)}]
        dcp.load(state, storage_reader=reader_of(rank))
        assert optimizer.param_groups[0]["lr"] == 0.3
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        helpers.set_state_dict(net, optimizer, **parts)
        assert optimizer.param_groups[0]["lr"] == 0.1
        return whole_of({**state_of(net, optimizer), "list": state["list"]})

    saved = start().run(save)
    assert all(each == saved[0] for each in saved)
    assert start(2).run(load) == [saved[0]] * 2
    job = start(1)
    assert whole_of(ckptfmt.load(job.root))["model"] == saved[0]["model"]
    assert whole_of(ckptfmt.load(job.root))["list"] == saved[0]["list"]


@pytest.mark.slow
def test_fsdp_with_tensor_parallel_layers_into_fsdp_and_back(start: Callable[..., Job]) -> None:
    """test_2d_fsdp_dt_checkpoint, test_fsdp_tp_checkpoint_conversion and test_tp_checkpoint."""

    def body(rank: Rank) -> Any:
        warnings.simplefilter("ignore")  # FSDP2 warns of views that such layers return
        found = []
        with writer_of(rank) as writer:
            for one, other in (((2, 2), (4,)), ((4,), (2, 2))):
                saved = state_of(*trained(2, 0.1, one))
                dcp.save(saved, storage_writer=writer)
                into = state_of(*trained(1, 0.3, other))
                dcp.load(into, storage_reader=reader_of(rank))
                found.append(whole_of(saved) == whole_of(into))
        return found

    assert start().run(body) == [[True, True]] * WORLD


SPECS: dict[str, Any] = {
    "halves": ChunkShardingSpec(dim=0, placements=["rank:0", "rank:1"]),
    "quarters": ChunkShardingSpec(dim=0, placements=["rank:0", "rank:1", "rank:1", "rank:0"]),
    "columns": ChunkShardingSpec(dim=1, placements=["rank:0", "rank:1"]),
    "uneven": EnumerableShardingSpec(
        shards=[
            ShardMetadata(shard_offsets=[first, 0], shard_sizes=[rows, 20], placement=f"rank:{rank}")
            for first, rows, rank in ((0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 3, 1), (9, 1, 0))
        ]
    ),
    "swapped": EnumerableShardingSpec(
        shards=[
            ShardMetadata(shard_offsets=[0, 0], shard_sizes=[8, 20], placement="rank:1"),
            ShardMetadata(shard_offsets=[8, 0], shard_sizes=[2, 20], placement="rank:0"),
        ]
    ),
}


@pytest.mark.slow
def test_sharded_tensors_with_several_shards_on_a_rank(start: Callable[..., Job]) -> None:
    """TestDistributedReshardOnLoad: every plan into every other, and plain tensors into sharded ones and back."""

    def gathered(tensor: Any) -> Any:
        whole = torch.zeros(10, 20) if dist.get_rank() == 0 else None
        tensor.gather(out=whole)
        return whole

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        with writer_of(rank) as writer:
            for one in SPECS.values():
                plain = torch.rand(10, 20, generator=torch.Generator().manual_seed(1))
                saved = {"sharded": sharded_tensor.rand(one, 10, 20), "plain": plain}
                dcp.save(saved, storage_writer=writer)
                for other in SPECS.values():
                    into = {"sharded": sharded_tensor.zeros(other, 10, 20), "plain": torch.zeros(10, 20)}
                    dcp.load(into, storage_reader=reader_of(rank))
                    swapped = {"sharded": torch.zeros(10, 20), "plain": sharded_tensor.zeros(other, 10, 20)}
                    dcp.load(swapped, storage_reader=reader_of(rank))
                    assert torch.equal(into["plain"], plain)
                    wholes = [gathered(t) for t in (saved["sharded"], into["sharded"], swapped["plain"])]
                    if rank.rank == 0:
                        assert torch.equal(wholes[0], wholes[1])
                        assert torch.equal(wholes[0], swapped["sharded"])
                        assert torch.equal(wholes[2], plain)

    start(2).run(body)


def test_states_that_differ_from_rank_to_rank(start: Callable[..., Job]) -> None:
    """DCP keeps one rank's copy of what several have, and all of what one has; keys in any order."""

    def body(rank: Rank) -> Any:
        number = rank.rank
        own = {f"own{number}": torch.full((3,), float(number)), f"value{number}": [number], "big": bytes(100_000)}
        common = {"t": torch.arange(5), "list": [torch.tensor(1.5), torch.arange(4), {"n": [7]}], "f": io.BytesIO(b"f")}
        state = common | own if number % 2 else dict(reversed((common | own).items()))
        with writer_of(rank) as writer:
            dcp.save(state, storage_writer=writer)
            assert writer.generation is not None
            assert writer.generation.world_size == WORLD
        into = {
            "t": torch.zeros(5, dtype=torch.int64),
            "list": [torch.tensor(0.0), torch.zeros(4, dtype=torch.int64), {"n": []}],
            "f": None,
            "big": b"",
            f"own{number}": torch.zeros(3),
            f"value{number}": None,
        }
        dcp.load(into, storage_reader=reader_of(rank))
        assert into["f"].getvalue() == b"f"
        assert len(into["big"]) == 100_000
        return [
            into["t"].tolist(),
            [into["list"][0].item(), into["list"][1].tolist(), into["list"][2]],
            into[f"own{number}"].tolist(),
            into[f"value{number}"],
        ]

    found = start().run(body)
    assert found == [[[0, 1, 2, 3, 4], [1.5, [0, 1, 2, 3], {"n": [7]}], [float(n)] * 3, [n]] for n in range(WORLD)]


# -- who saves together ----------------------------------------------------------------------------------
def test_some_ranks_save_a_generation_of_their_own(start: Callable[..., Job]) -> None:
    def body(rank: Rank) -> Any:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = groups[rank.rank % 2]
        mesh = init_device_mesh("cpu", (2, 2))
        with GenerationWriter(rank.job.root, run=f"group{rank.rank % 2}") as writer:
            for step in (1, 2):
                state = {"t": torch.arange(3) + step, f"rank{rank.rank}": rank.rank}
                dcp.save(state, storage_writer=writer, checkpoint_id=step, process_group=mine)
            assert writer.generation is not None
            first = [writer.generation.world_size, sorted(ckptfmt.load(rank.job.root, run=writer.generation.run))]
        with GenerationWriter(rank.job.root, run=f"alone{rank.rank}") as writer, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"rank": rank.rank, "t": torch.ones(2)}, storage_writer=writer, no_dist=True)
            into = {"rank": -1, "t": torch.zeros(2)}
            dcp.load(into, storage_reader=GenerationReader(rank.job.root, run=f"alone{rank.rank}"), no_dist=True)
        assert mesh.ndim == 2
        return [*first, into["rank"]]

    assert start().run(body) == [[2, [f"rank{n % 2}", f"rank{n % 2 + 2}", "t"], n] for n in range(WORLD)]


def test_ranks_that_find_different_generations_are_told(start: Callable[..., Job]) -> None:
    def body(rank: Rank) -> str:
        with writer_of(rank) as writer:
            for step in (1, 2):
                dcp.save({"t": torch.ones(2)}, storage_writer=writer, checkpoint_id=step)
        into = {"t": torch.zeros(2)}
        try:
            dcp.load(into, storage_reader=reader_of(rank, at="step:1" if rank.rank == 2 else None))
        except CheckpointException as error:
            assert not into["t"].any()
            return str(error)
        raise AssertionError("loaded")

    for text in start().run(body):
        assert "the ranks found different generations" in text
        assert "rank 2: generation 1" in text


# -- failures --------------------------------------------------------------------------------------------
class Failing(dcp.DefaultSavePlanner):
    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def _fail(self, stage: str) -> None:
        if stage == self.stage:
            raise ValueError(f"rank fail for {stage}")

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self._fail("set_up_planner")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> Any:
        self._fail("create_local_plan")
        return super().create_local_plan()

    def finish_plan(self, new_plan: Any) -> Any:
        self._fail("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self._fail("resolve_data")
        return super().resolve_data(write_item)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "failing"),
    [
        *itertools.product(("set_up_planner", "create_local_plan", "resolve_data"), (0, 2)),
        ("finish_plan", 1),
    ],
)
def test_a_rank_that_fails_fails_the_save_of_all_and_the_next_is_whole(
    start: Callable[..., Job], stage: str, failing: int
) -> None:
    """test_save_error_handling. Nobody waits longer than ``commit_timeout``, and only where a rank fails between plan
    and write, which nobody is told of."""

    def body(rank: Rank) -> Any:
        told = []
        with writer_of(rank, commit_timeout=4.0 if stage == "finish_plan" else 30.0) as writer:
            for step, planner in enumerate((None, Failing(stage if rank.rank == failing else ""), None, None)):
                state = {"t": torch.full((8,), float(step)), "own": torch.full((2,), float(rank.rank)), "n": step}
                began = time.monotonic()
                try:
                    dcp.save(state, storage_writer=writer, planner=planner, checkpoint_id=step)
                except CheckpointException as error:
                    assert time.monotonic() - began < 25
                    told.append(f"rank fail for {stage}" in str(error) and failing in error.failures)
        return told

    job = start()
    assert job.run(body) == [[True]] * WORLD
    committed = [row["step"] for row in rows_of(job.root) if row["state"] == "committed"]
    assert committed == [0, 2, 3]
    assert ckptfmt.load(job.root)["n"] == 3


class FailingLoad(dcp.DefaultLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> Any:
        raise ValueError("rank fail for resolve_tensor")


def test_a_rank_that_cannot_load_fails_the_load_of_all(start: Callable[..., Job]) -> None:
    def body(rank: Rank) -> Any:
        with writer_of(rank) as writer:
            dcp.save({"t": torch.ones(4)}, storage_writer=writer)
        reader = reader_of(rank)
        try:
            planner = FailingLoad() if rank.rank == 3 else None
            dcp.load({"t": torch.zeros(4)}, storage_reader=reader, planner=planner)
        except CheckpointException as error:
            into = {"t": torch.zeros(4)}
            dcp.load(into, storage_reader=reader)
            return [sorted(error.failures), into["t"].tolist()]
        raise AssertionError("loaded")

    assert start().run(body) == [[[3], [1.0] * 4]] * WORLD


# -- async_save in processes -----------------------------------------------------------------------------
@pytest.mark.slow
def test_async_save_in_processes(start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """test_e2e_async_cached: each rank has a process that saves, and they meet in a group of their own."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def body(rank: Rank) -> Any:
        warnings.simplefilter("ignore")
        net, optimizer = trained(1, 0.1)
        with writer_of(rank) as writer:
            wanted = []
            for step in (1, 2):
                state = state_of(net, optimizer)
                wanted.append(whole_of(state))
                future = dcp.async_save(
                    state,
                    storage_writer=writer,
                    checkpoint_id=step,
                    async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                )
                net(torch.rand(4, 8)).sum().backward()
                optimizer.step()
                future.result(50)
            for step in (1, 2):
                state = state_of(net, optimizer)
                dcp.load(state, storage_reader=reader_of(rank, at=f"step:{step}"))
                assert whole_of(state) == wanted[step - 1]
        from torch.distributed.checkpoint import _async_process_executor as executor

        process = executor._CHECKPOINT_PROCESS
        assert process is not None
        process._send(executor._CheckpointSaveProcessControlOpts.TERMINATE)
        process._save_process.join(20)
        return None

    job = start()
    job.run(body)
    assert [row["step"] for row in rows_of(job.root)] == [1, 2]
