"""Real process groups: what FSDP2, tensor parallelism and plain replicas hold becomes whole tensors, each byte once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from reshard_rig import (
    FOLDER,
    as_ranks,
    load,
    merged,
    on_disk,
    open_folder,
    save_together,
    unite,
    write_rank,
    write_snapshot,
)

from ckptfmt import connect
from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.save.context import Ranks
from ckptfmt.engine.save.snapshot import Planner, take_snapshot
from ckptfmt.errors import Mismatch
from ckptfmt.format.manifest import decode_manifest

torch = pytest.importorskip("torch")
dist = torch.distributed
nn = torch.nn
if dist.is_available():  # here, since each fork would import them anew
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


def network() -> Any:
    """Odd sizes: ranks hold unequal shares, and of the last layer some hold nothing."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6), nn.Linear(6, 2))


def stepped(net: Any, rank: int) -> Any:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    torch.manual_seed(rank)
    net(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    return optimizer


def mesh(*sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


def sharded(net: Any, on: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=on)
    return fully_shard(net, mesh=on)


def tensor_parallel(net: Any, on: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(net, on, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def expected_of(net: Any, optimizer: Any) -> dict[str, Any]:
    """Every tensor of model and optimizer, made whole by torch's own collectives."""
    names = {parameter: f"model.{name}" for name, parameter in net.named_parameters()}
    found = {f"model.{name}": whole(value) for name, value in net.state_dict().items()}
    for parameter, state in optimizer.state.items():
        found |= {f"opt.state.{names[parameter]}.{key}": whole(value) for key, value in state.items()}
    return {name: value.detach().clone() for name, value in found.items()}


def train_and_save(folder: str, how: str, rank: int, world_size: int) -> dict[str, Any]:
    net = network()
    if how == "fsdp":
        sharded(net, mesh(world_size))
    elif how == "hsdp":
        sharded(net, mesh(2, world_size // 2))
    elif how == "fsdp x tp":
        both = mesh(world_size // 2, 2)
        sharded(tensor_parallel(net, both["tp"]), both["dp"])
    elif how == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = stepped(net, rank)
    save_together(Path(folder), {"model": net, "opt": optimizer, "n": 1}, rank, world_size)
    bare = net.module if how == "ddp" else net
    expected = expected_of(bare, optimizer)
    if rank == 0:
        torch.save(expected, f"{folder}/expected.pt")
    return {}


HOW = ["fsdp", "hsdp", "fsdp x tp", "ddp"]


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_every_tensor_is_saved_whole_and_once(tmp_path: Path, how: str) -> None:
    as_ranks(tmp_path, 4, lambda rank, world: train_and_save(str(tmp_path), how, rank, world))
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    opened = open_folder(tmp_path)
    manifest = opened.manifest
    assert set(manifest.tensors.name) == set(expected)
    state = load(opened)
    for name, value in expected.items():
        found = found_in(state, name)
        assert found.dtype == value.dtype, name
        assert torch.equal(found, value), name
    sizes = [pack.nbytes - pack.header_bytes for pack in manifest.packs]
    assert manifest.nbytes == sum(value.nbytes for value in expected.values())
    # FSDP2 does not know that the layer without tensor parallelism is the same in both of its meshes.
    twice = sum(v.nbytes for name, v in expected.items() if ".3." in name and v.dim()) if how == "fsdp x tp" else 0
    assert sum(sizes) == manifest.nbytes + twice
    by_rank = [sum(n for n, pack in zip(sizes, manifest.packs, strict=True) if pack.rank == rank) for rank in range(4)]
    assert max(by_rank) < 0.45 * sum(by_rank), by_rank
    names = {"fsdp": ["dp"], "hsdp": ["dp", "tp"], "fsdp x tp": ["dp", "tp"], "ddp": None}[how]
    assert [None if row.mesh is None else sorted(row.mesh) for row in manifest.ranks] == [names] * 4
    kinds = dict(zip(manifest.tensors.name, manifest.tensors.kind, strict=True))
    assert kinds["opt.state.model.0.weight.step"] == "replicated"
    assert kinds["model.0.weight"] == ("replicated" if how == "ddp" else "sharded")
    torch_reads(tmp_path, expected)


def found_in(state: Any, name: str) -> Any:
    if name.startswith("model."):
        return state["model"][name.removeprefix("model.")]
    rest, _, key = name.removeprefix("opt.state.").rpartition(".")
    return state["opt"]["state"][rest][key]


def torch_reads(folder: Path, expected: dict[str, Any]) -> None:
    """By the packs' own headers, with no manifest: each box tells its place, wherever packs were split."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as dcp_load

    state = {name: torch.zeros_like(value) for name, value in expected.items() if value.numel() and value.dim()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(state, storage_reader=HuggingFaceStorageReader(str(folder / FOLDER)), no_dist=True)
    assert all(torch.equal(value, expected[name]) for name, value in state.items())


def save_placed(folder: str, rank: int, world_size: int) -> int:
    """Placements that no wrapper makes: several boxes on a rank, columns, replicas on a part of the mesh."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    both, values = mesh(2, 2), wholes()
    placed = {
        "columns": [Replicate(), Shard(1)],
        "both": [Shard(1), Shard(0)],
        "same": [Shard(0), Shard(0)],
        "everywhere": [Replicate(), Replicate()],
        "scalar": [Replicate(), Replicate()],
        "empty": [Shard(0), Replicate()],
    }
    state: dict[str, Any] = {
        name: distribute_tensor(values[name], both, placements) for name, placements in placed.items()
    }
    for name, placements in (
        ("strided", [_StridedShard(0, split_factor=3), Replicate()]),
        ("strided both", [_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=2)]),
    ):
        local = values[name]
        for size, at, placement in zip((2, 2), both.get_coordinate(), placements, strict=True):
            if not placement.is_replicate():
                local = placement._split_tensor(local, size, with_padding=False)[0][at]
        shape, stride = values[name].shape, values[name].stride()
        state[name] = DTensor.from_local(local, both, placements, run_check=False, shape=shape, stride=stride)
    state["tied"] = state["columns"].detach()
    state["tied, too"] = state["same"].detach()  # of which one rank holds nothing
    save_together(Path(folder), state, rank, world_size)
    return sum(len(placement) for placement in placed.values())


def wholes() -> dict[str, Any]:
    shapes = {
        "columns": (3, 7),
        "both": (5, 6),
        "same": (3, 2),
        "everywhere": (4,),
        "scalar": (),
        "empty": (0, 3),
        "strided": (11, 2),
        "strided both": (9, 5),
    }
    made = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


def test_placements_of_all_kinds(tmp_path: Path) -> None:
    as_ranks(tmp_path, 4, lambda rank, world: save_placed(str(tmp_path), rank, world))
    opened = open_folder(tmp_path)
    state = load(opened)
    values = wholes()
    assert all(torch.equal(state[name], value) for name, value in values.items())
    assert opened.manifest.aliases == {"tied": "columns", "tied, too": "same"}
    assert state["tied, too"] is state["same"]
    boxes = {name: opened.manifest.boxes.tensor.count(row) for row, name in enumerate(opened.manifest.tensors.name)}
    assert boxes == {
        "columns": 2,
        "both": 4,
        "same": 3,
        "everywhere": 1,
        "scalar": 1,
        "empty": 1,
        "strided": 6,
        "strided both": 16,
    }
    assert sum(pack.nbytes - pack.header_bytes for pack in opened.manifest.packs) == opened.manifest.nbytes
    torch_reads(tmp_path, values)


def save_by_helpers(folder: str, rank: int, world_size: int) -> int:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    net = sharded(network(), mesh(world_size))
    optimizer = stepped(net, rank)
    state = {"model": get_model_state_dict(net), "opt": get_optimizer_state_dict(net, optimizer)}
    save_together(Path(folder), state, rank, world_size)
    expected = expected_of(net, optimizer)
    if rank == 0:
        torch.save(expected, f"{folder}/expected.pt")
    return len(state)


@pytest.mark.slow
def test_what_torchs_helpers_make_of_a_model(tmp_path: Path) -> None:
    as_ranks(tmp_path, 3, lambda rank, world: save_by_helpers(str(tmp_path), rank, world))
    state = load(open_folder(tmp_path))
    state["opt"]["state"] = {f"model.{name}": value for name, value in state["opt"]["state"].items()}
    for name, value in torch.load(tmp_path / "expected.pt", weights_only=True).items():
        assert torch.equal(found_in(state, name), value), name


class Quiet:
    """Nobody listens."""

    def advance(self, stage: str) -> None:
        pass

    def blocked(self, seconds: float) -> None:
        pass


def save_while_training(folder: str, rank: int, world_size: int) -> bool:
    """The optimizer steps while the snapshot is still being copied."""
    net = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 256))
    sharded(net, mesh(2, world_size // 2))
    optimizer = stepped(net, rank)
    expected = expected_of(net, optimizer)
    ranks = Ranks(rank, world_size, tuple(range(world_size)))
    snapshot = take_snapshot(
        {"model": net, "opt": optimizer},
        None,
        families=connect.live_families(),
        planner=Planner(),
        arena=Arena(),
        ranks=ranks,
        deferred=True,
    )
    snapshot.freeze()
    put_off = snapshot.deferral is not None
    if snapshot.deferral is not None:
        snapshot.deferral.start(Quiet())  # type: ignore[arg-type]
    optimizer.step()
    backend = on_disk(Path(folder))
    backend.make_folder(FOLDER)
    unite(backend, write_snapshot(backend, snapshot, ranks), world_size)
    if rank == 0:
        torch.save(expected, f"{folder}/expected.pt")
    return put_off


@pytest.mark.slow
def test_shares_that_an_optimizer_owns_are_copied_beside_training(tmp_path: Path) -> None:
    told = as_ranks(tmp_path, 4, lambda rank, world: save_while_training(str(tmp_path), rank, world))
    assert told == [True] * 4
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    state = load(open_folder(tmp_path))
    assert all(torch.equal(found_in(state, name), value) for name, value in expected.items())


def diverge(rank: int, world_size: int) -> str:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    state = {
        "plain": torch.arange(4.0),
        "shared": distribute_tensor(torch.arange(8.0), mesh(2, 2), [Replicate(), Shard(0)]),
        "fine": torch.ones(3),
    }
    if rank == 3:
        state["plain"][2] = -1
        state["shared"].to_local()[0] = -1
    part = write_rank(MemoryBackend(f"diverge-{rank}"), state, rank, world_size)
    parts: list[Any] = [None] * world_size
    dist.all_gather_object(parts, part)
    try:
        merged(parts)
    except Mismatch as error:
        return str(error)
    return ""


def test_replicas_that_differ_are_named_with_their_ranks(tmp_path: Path) -> None:
    told = as_ranks(tmp_path, 4, diverge)
    assert len(set(told)) == 1
    assert "tensor 'plain', box [0]+[4]" in told[0]
    assert "3" in told[0].split("'plain'")[1].split("differ")[0]
    assert "tensor 'shared', box [4]+[4]: the replicas of ranks 1 and 3 differ" in told[0]
    assert "'fine'" not in told[0]


def test_per_rank_values_are_kept_for_every_rank(tmp_path: Path) -> None:
    import ckptfmt

    def work(rank: int, world_size: int) -> None:
        state = {"mine": ckptfmt.PerRank({"seen": torch.full((rank + 1,), rank), "n": rank}), "rng": ckptfmt.Rng()}
        torch.manual_seed(rank)
        save_together(tmp_path, state, rank, world_size)

    as_ranks(tmp_path, 3, work)
    opened = open_folder(tmp_path)
    for rank in range(3):
        mine = load(opened, rank=rank)["mine"]
        assert (mine["seen"].tolist(), mine["n"]) == ([rank] * (rank + 1), rank)
    kinds = set(zip(opened.manifest.tensors.name, opened.manifest.tensors.rank, strict=True))
    assert {("mine.seen", 0), ("mine.seen", 1), ("mine.seen", 2)} <= kinds


def test_a_distributed_tensor_is_no_ranks_own(tmp_path: Path) -> None:
    import ckptfmt
    from ckptfmt.errors import UnsupportedValue

    def work(rank: int, world_size: int) -> str:
        from torch.distributed.tensor import Shard, distribute_tensor

        value = distribute_tensor(torch.arange(4.0), mesh(2), [Shard(0)])
        told = []
        for state in ({"w": ckptfmt.PerRank(value)}, {"w": ckptfmt.Sharded(value, (8,), (0,))}):
            try:
                write_rank(MemoryBackend(f"own-{rank}"), state, rank, world_size)
            except UnsupportedValue as error:
                told.append(str(error))
        return " | ".join(told)

    (told, _) = as_ranks(tmp_path, 2, work)
    assert "w: PerRank holds a DTensor" in told
    assert "w: Sharded holds a DTensor" in told


def test_frameworks_of_ones_own(tmp_path: Path) -> None:
    """``Sharded`` parts of numpy arrays, a box on two ranks, and one rank that has none."""
    import numpy as np

    import ckptfmt

    array = np.arange(20.0).reshape(10, 2)
    cuts = [(0, 4), (0, 4), (4, 10), (10, 10)]

    def work(rank: int, world_size: int) -> None:
        first, last = cuts[rank]
        save_together(tmp_path, {"w": ckptfmt.Sharded(array[first:last], (10, 2), (first, 0))}, rank, world_size)

    as_ranks(tmp_path, 4, work)
    manifest = decode_manifest((tmp_path / FOLDER / "manifest.json.zst").read_bytes())
    assert [(start, size) for start, size in zip(manifest.boxes.start, manifest.boxes.size, strict=True)] == [
        ((0, 0), (4, 2)),
        ((4, 0), (6, 2)),
    ]
    assert np.array_equal(load(open_folder(tmp_path))["w"], array)
