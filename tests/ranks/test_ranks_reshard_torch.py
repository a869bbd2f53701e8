"""DTensors, FSDP2 modules and their optimizers, saved by some ranks and restored by others, bit for bit."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict  # once, before forks
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from reshard_rig import as_ranks, load, open_folder, restore, save, save_alone, save_together
from torch import nn

from ckptfmt import Sharded
from ckptfmt.errors import Mismatch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


# -- models, and what they hold in all ------------------------------------------------------------------
def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[no-any-return]


def image(value: Any) -> Any:
    """Equal only for values that are equal to the last bit, wherever their parts lie."""
    if isinstance(value, torch.Tensor):
        tensor = whole(value.detach()).contiguous()
        data = tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(data).hexdigest()]
    if isinstance(value, Mapping):
        return {str(key): image(item) for key, item in value.items()}
    return [image(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def image_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    names = {parameter: name for name, parameter in net.named_parameters()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    states = {names[parameter]: image(state) for parameter, state in optimizer.state.items()}
    return [image(net.state_dict()), dict(sorted(states.items())), image(groups)]


class Job:
    """A small model with rows that no number of ranks divides, on a mesh.

    ``tp`` ranks share each layer, ``copies`` groups of ranks hold the same; ``wide`` adds a layer of so many rows.
    """

    def __init__(
        self,
        world_size: int,
        *,
        tp: int = 1,
        copies: int = 1,
        wide: int = 0,
        kind: Any = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        torch.manual_seed(world_size + tp)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 10), nn.LayerNorm(10))
        if wide:
            self.net.append(nn.Linear(10, wide, bias=False))
        self.net.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if world_size > 1:
            _spread(self.net, world_size, tp, copies)
        self.optimizer = kind(self.net.parameters(), **({"lr": 0.01} | options))

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer}

    def train(self, steps: int = 2) -> None:
        for step in range(steps):
            torch.manual_seed(step)  # the same on every rank, as tensor parallel ranks need
            self.net(torch.randn(4, 6)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.net.seen += 1

    def image(self) -> Any:
        return image_of(self.net, self.optimizer)


def _spread(net: nn.Sequential, world_size: int, tp: int, copies: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if copies > 1:
        data = init_device_mesh("cpu", (copies, world_size // copies), mesh_dim_names=("copy", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
        data = mesh["dp"]
        if tp > 1:
            parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=data)
    fully_shard(net, mesh=data)


def first(tmp_path: Path, world_size: int, **options: Any) -> tuple[Path, Any]:
    """A trained job, saved; and what it holds."""
    folder = tmp_path / "first"

    def work(rank: int, size: int) -> Any:
        job = Job(size, **options)
        job.train()
        save_together(folder, job.state, rank, size)
        return job.image()

    images = as_ranks(tmp_path, world_size, work)
    assert all(one == images[0] for one in images)
    return folder, images[0]


def resumed(tmp_path: Path, source: Path, target: Path | None, world_size: int, **options: Any) -> list[Any]:
    """A fresh job restored from ``source`` by other ranks, and saved again: what each of them sees of the whole."""

    def work(rank: int, size: int) -> Any:
        job = Job(size, **options)
        report = restore(open_folder(source), job.state, rank=rank, world_size=size)
        assert report.missing == report.unexpected == ()
        found = job.image()
        if target is not None:
            save_together(target, job.state, rank, size)
        job.train(1)  # what was restored is fit to go on with
        return found

    return as_ranks(tmp_path, world_size, work)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 2, 1), pytest.param((4, 2, 8, 1), marks=pytest.mark.slow)], ids=str)
def test_fsdp_at_one_world_size_after_the_other(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    folder, expected = first(tmp_path, sizes[0])
    assert len(expected[1]) == 6
    for number, world_size in enumerate(sizes[1:]):
        after = tmp_path / str(number)
        assert resumed(tmp_path, folder, after, world_size) == [expected] * world_size
        folder = after
    plain = Job(1)
    restore(open_folder(folder), plain.state)
    assert plain.image() == expected


@pytest.mark.slow
def test_fsdp_to_tensor_parallel_and_back(tmp_path: Path) -> None:
    folder, expected = first(tmp_path, 4)
    grid = tmp_path / "grid"
    assert resumed(tmp_path, folder, grid, 4, tp=2) == [expected] * 4
    assert resumed(tmp_path, grid, tmp_path / "two", 2) == [expected] * 2


@pytest.mark.slow
def test_tensor_parallel_to_more_of_it_and_to_one_process(tmp_path: Path) -> None:
    folder, expected = first(tmp_path, 4, tp=2)
    assert resumed(tmp_path, folder, None, 4, tp=4) == [expected] * 4
    assert resumed(tmp_path, folder, None, 8, tp=2) == [expected] * 8
    assert resumed(tmp_path, folder, None, 1) == [expected]


@pytest.mark.slow
def test_copies_of_shards(tmp_path: Path) -> None:
    """Two groups of ranks that hold the same shards, saved once, into one group of three and back."""
    folder, expected = first(tmp_path, 4, copies=2)
    manifest = open_folder(folder).manifest
    assert sum(pack.nbytes - pack.header_bytes for pack in manifest.packs) == manifest.nbytes, "each shard once"
    assert resumed(tmp_path, folder, tmp_path / "three", 3) == [expected] * 3
    assert resumed(tmp_path, tmp_path / "three", None, 4, copies=2) == [expected] * 4


def test_a_job_of_one_process_becomes_one_of_many(tmp_path: Path) -> None:
    job = Job(1)
    job.train()
    save_alone(tmp_path / "one", job.state)
    assert resumed(tmp_path, tmp_path / "one", None, 3) == [job.image()] * 3


class Rows(torch.optim.Optimizer):
    """Keeps a number for each row of a parameter, as torch's ``Adafactor`` does where it knows DTensors."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["rows"] = parameter.new_zeros((*parameter.shape[:-1], 1))
                    state["moments"] = [torch.zeros_like(parameter), torch.ones_like(parameter)]
                state["rows"] += 1
                state["moments"][0].add_(parameter.grad)
                parameter.sub_(group["lr"] * parameter.grad * state["rows"] * state["moments"][1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        pytest.param(torch.optim.Adam, {"amsgrad": True}, marks=pytest.mark.slow),
        (Rows, {}),
        pytest.param(torch.optim.NAdam, {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_optimizers(tmp_path: Path, kind: Any, options: Any) -> None:
    """Also such as keep tensors of other shapes than the parameters'."""
    folder, expected = first(tmp_path, 2, kind=kind, **options)
    assert resumed(tmp_path, folder, None, 3, kind=kind, **options) == [expected] * 3


@pytest.mark.slow
def test_an_optimizer_that_has_state_takes_the_saved_one(tmp_path: Path) -> None:
    folder, expected = first(tmp_path, 2)

    def work(rank: int, size: int) -> Any:
        job = Job(size)
        job.train(1)
        restore(open_folder(folder), job.state, rank=rank, world_size=size)
        return job.image()

    assert as_ranks(tmp_path, 3, work) == [expected] * 3


@pytest.mark.slow
def test_moments_of_another_dtype_than_the_parameters(tmp_path: Path) -> None:
    """torch's ``load_state_dict`` would round them to the parameter's."""
    folder = tmp_path / "g"

    def half(size: int) -> Job:
        job = Job(size)
        for parameter in job.net.parameters():
            parameter.grad = torch.ones_like(parameter)
        return job

    def saving(rank: int, size: int) -> Any:
        job = half(size)
        job.optimizer.step()
        for state in job.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].double() / 3
        save_together(folder, job.state, rank, size)
        return job.image()

    def loading(rank: int, size: int) -> Any:
        job = half(size)
        restore(open_folder(folder), job.state, rank=rank, world_size=size)
        return job.image()

    (expected, _) = as_ranks(tmp_path, 2, saving)
    assert as_ranks(tmp_path, 3, loading) == [expected] * 3


@pytest.mark.slow
def test_a_rank_reads_its_share(tmp_path: Path) -> None:
    """Not what the other ranks hold, of the optimizer's state neither."""
    folder = tmp_path / "g"

    def saving(rank: int, size: int) -> int:
        job = Job(size, wide=4096)
        job.train()
        save_together(folder, job.state, rank, size)
        return 0

    def loading(rank: int, size: int) -> Any:
        job = Job(size, wide=4096)
        report = restore(open_folder(folder), job.state, rank=rank, world_size=size)
        return report.nbytes, report.amplification, open_folder(folder).manifest.nbytes

    as_ranks(tmp_path, 2, saving)
    for nbytes, amplification, total in as_ranks(tmp_path, 2, loading):
        assert nbytes < total * 0.55
        assert amplification == 1.0, "the same layout takes whole boxes"
    for nbytes, amplification, total in as_ranks(tmp_path, 4, loading):
        assert nbytes < total * 0.3
        assert 1.9 < amplification < 2.1, "half of each box, in one chunk"


# -- through torch's own helpers ---------------------------------------------------------------------------
@pytest.mark.slow
def test_state_dicts_by_torch_s_helpers(tmp_path: Path) -> None:
    """``get_state_dict`` before and ``set_state_dict`` after: DTensors in plain mappings, filled in place."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = tmp_path / "g"

    def saving(rank: int, size: int) -> Any:
        job = Job(size)
        job.train()
        model, optimizer = get_state_dict(job.net, job.optimizer)
        save_together(folder, {"model": model, "optimizer": optimizer}, rank, size)
        return job.image()

    def loading(rank: int, size: int) -> Any:
        job = Job(size, tp=size // 2)
        model, optimizer = get_state_dict(job.net, job.optimizer)
        restore(open_folder(folder), {"model": model, "optimizer": optimizer}, rank=rank, world_size=size)
        set_state_dict(job.net, job.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return job.image()

    expected = as_ranks(tmp_path, 3, saving)[0]
    assert as_ranks(tmp_path, 4, loading) == [expected] * 4


# -- single tensors ---------------------------------------------------------------------------------------
SHAPES = ((7, 5), (8, 6), (2, 9), (1,), (), (0, 3), (3, 0), (5, 4, 3))


def placements(dimensions: int, mesh: int) -> list[tuple[Any, ...]]:
    from torch.distributed.tensor import Replicate, Shard

    single = [Replicate(), *(Shard(axis) for axis in range(dimensions))]
    return list(itertools.product(single, repeat=mesh))


def spread(size: int, seed: float, *, order: int = 1) -> dict[str, Any]:
    """Tensors of all shapes in all placements on a mesh of one or two dimensions; the whole ones count from ``seed``.
    With ``order`` -1 each has the placements of another one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    found = {}
    sizes = [(size,)] + ([(2, size // 2)] if size % 2 == 0 and size > 2 else [])
    for dims in sizes:
        mesh = init_device_mesh("cpu", dims)
        for shape in SHAPES:
            count = torch.Size(shape).numel()
            tensor = (torch.arange(count, dtype=torch.float32) + seed).reshape(shape)
            for number, placed in enumerate(placements(len(shape), 2)[::order]):
                one = placed[: len(dims)]
                found[f"{shape} {number}"] = distribute_tensor(tensor, mesh, list(one))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("atomic", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_any_placement_into_any_other(tmp_path: Path, atomic: bool) -> None:
    """Uneven, empty and 0-d shards; on a mesh of two dimensions another order of them."""
    folder = tmp_path / "g"

    def saving(rank: int, size: int) -> int:
        save_together(folder, spread(size, 0.5), rank, size)
        return 0

    def loading(rank: int, size: int) -> Any:
        live = spread(size, -100.0, order=-1)
        restore(open_folder(folder), live, rank=rank, world_size=size, atomic=atomic)
        return {name: whole(value).flatten().tolist() for name, value in live.items()}

    def plain(opened: Any) -> Any:
        return {name: value.flatten().tolist() for name, value in load(opened).items()}

    as_ranks(tmp_path, 3, saving)
    expected = plain(open_folder(folder))
    for name, values in expected.items():
        assert values == [0.5 + number for number in range(len(values))], name
    for world_size in (1, 2, 4):
        found = as_ranks(tmp_path, world_size, loading)
        assert all(one == expected for one in found)


def test_what_does_not_fit_is_told_for_a_spread_tensor_too(tmp_path: Path) -> None:
    folder = tmp_path / "g"
    opened = save([{"a": torch.ones(4, 4), "b": torch.ones(3), "c": torch.ones(2), "d": 5}])

    def loading(rank: int, size: int) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (size,))
        live: dict[str, Any] = {
            "a": distribute_tensor(torch.zeros(4, 5), mesh, [Shard(0)]),
            "b": distribute_tensor(torch.zeros(3, dtype=torch.float64), mesh, [Shard(0)]),
            "c": DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False),
            "d": distribute_tensor(torch.zeros(3), mesh, [Shard(0)]),
        }
        with pytest.raises(Mismatch) as caught:
            restore(opened, live, rank=rank, world_size=size)
        b = {"b": live["b"]}
        report = restore(opened, b, rank=rank, world_size=size, strict=False, cast=True)
        return list(caught.value.problems), report.cast, whole(b["b"]).tolist()

    for problems, cast, values in as_ranks(tmp_path, 4, loading):
        assert problems[0] == "a: saved shape [4, 4], live shape [4, 5]"
        assert problems[1] == "b: saved dtype float32, live dtype float64 (cast=True converts)"
        assert problems[2].startswith("c: ")
        assert "Partial" in problems[2]
        assert problems[3].startswith("d: a tensor here, but saved was")
        assert cast == ["b"]
        assert values == [1.0] * 3
    assert not folder.exists()


def test_boxes_of_one_s_own_and_dtensors_are_the_same_on_storage(tmp_path: Path) -> None:
    """What ``Sharded`` saved a DTensor takes, and the other way round."""
    array = torch.arange(21, dtype=torch.float64).reshape(7, 3)
    opened = save(
        [{"w": Sharded(array[:2].clone(), (7, 3), (0, 0))}, {"w": Sharded(array[2:].clone(), (7, 3), (2, 0))}]
    )
    folder = tmp_path / "g"

    def work(rank: int, size: int) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (size,))
        live = {"w": distribute_tensor(torch.zeros(7, 3, dtype=torch.float64), mesh, [Shard(1)])}
        restore(opened, live, rank=rank, world_size=size)
        save_together(folder, live, rank, size)
        return whole(live["w"]).tolist()

    assert as_ranks(tmp_path, 2, work) == [array.tolist()] * 2
    local = torch.zeros(3, 3, dtype=torch.float64)
    restore(open_folder(folder), {"w": Sharded(local, (7, 3), (4, 0))})
    assert torch.equal(local, array[4:])


def test_shards_of_several_boxes_and_strided_ones(tmp_path: Path) -> None:
    """Rows that do not stand side by side, and a local tensor whose columns do."""
    whole_rows = torch.arange(24, dtype=torch.float32).reshape(8, 3)
    opened = save(
        [
            {"w": Sharded(whole_rows[:5].clone(), (8, 3), (0, 0)), "t": torch.arange(12.0).reshape(3, 4)},
            {"w": Sharded(whole_rows[5:].clone(), (8, 3), (5, 0)), "t": torch.arange(12.0).reshape(3, 4)},
        ]
    )

    def loading(rank: int, size: int) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor
        from torch.distributed.tensor.placement_types import _StridedShard

        mesh = init_device_mesh("cpu", (size,))
        placed = [_StridedShard(0, split_factor=2)]
        local = torch.zeros(4, 3)
        live = {
            "w": DTensor.from_local(local, mesh, placed, run_check=False, shape=torch.Size((8, 3)), stride=(3, 1)),
            "t": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]).t(),
        }
        report = restore(opened, live, rank=rank, world_size=size)
        return local.tolist(), whole(live["t"]).tolist(), list(report.loaded)

    for rank, (rows, transposed, loaded) in enumerate(as_ranks(tmp_path, 2, loading)):
        assert rows == whole_rows[[[0, 1, 4, 5], [2, 3, 6, 7]][rank]].tolist()
        assert transposed == torch.arange(12.0).reshape(3, 4).tolist()
        assert loaded == ["w", "t"]


@pytest.mark.slow
def test_a_module_on_the_meta_device_is_given_memory_first(tmp_path: Path) -> None:
    folder, expected = first(tmp_path, 2)

    def work(rank: int, size: int) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 10), nn.LayerNorm(10))
            net.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
        with pytest.raises(Mismatch, match=r"model\.0\.weight: .*meta"):
            restore(open_folder(folder), {"model": net}, rank=rank, world_size=size, strict=False)
        net.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        restore(open_folder(folder), {"model": net, "optimizer": optimizer}, rank=rank, world_size=size)
        return image_of(net, optimizer)

    assert as_ranks(tmp_path, 3, work) == [expected] * 3
