"""Wrappers that need a process group: one process is a group of its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptfmt.errors import UnsupportedValue

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


@pytest.fixture
def group() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_distributed_data_parallel_leaves_no_trace(family: Any, archive: Any) -> None:
    bare = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = torch.compile(nn.parallel.DistributedDataParallel(inner), backend="eager")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    wrapped._orig_mod(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    module, kept = family.expand([("model", wrapped), ("opt", optimizer)], [])
    assert list(module.state) == list(bare.state_dict())
    assert module.notes == {"stripped": ["_orig_mod", "module"]}
    assert kept.state["param_groups"][0]["params"] == [
        "model.0.weight",
        "model.0.bias",
        "model.1.weight",
        "model.1.bias",
    ]
    resumed = torch.optim.SGD(bare.parameters(), lr=0.1)
    archive.restore({"model": bare, "opt": resumed}, archive.save({"model": wrapped, "opt": optimizer}))
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), inner.parameters(), strict=True))
    momentum = resumed.state[bare[0].weight]["momentum_buffer"]
    assert torch.equal(momentum, optimizer.state[inner[0].weight]["momentum_buffer"])


def test_activation_checkpointing_leaves_no_trace(family: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    bare = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    wrapped = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2))))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    module, kept = family.expand([("model", wrapped), ("opt", optimizer)], [])
    assert list(module.state) == list(bare.state_dict())
    assert module.live
    assert kept.state["param_groups"][0]["params"][2:] == ["model.1.0.weight", "model.1.0.bias"]


@pytest.mark.usefixtures("group")
def test_a_distributed_tensor_is_described_by_its_boxes(family: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    value = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    for one in (value, nn.Parameter(value)):
        with pytest.raises(UnsupportedValue, match=r"model\.w: a DTensor has a share on every rank"):
            family.describe(one, "model.w")
        ((local, spec),) = family.boxes(one, "model.w")
        assert (spec.kind, spec.holders, spec.start, spec.size) == ("replicated", (0,), (0, 0), (4, 2))
        assert local.data_ptr() == value.to_local().data_ptr()


@pytest.mark.usefixtures("group")
def test_a_fully_sharded_module_is_its_own_memory(family: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    module, kept = family.expand([("model", net), ("opt", optimizer)], [])
    assert module.live
    assert list(module.state) == list(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict())
    assert set(kept.state["state"]) == {f"model.{name}" for name, _ in net.named_parameters()}
    step = kept.state["state"]["model.0.weight"]["step"]
    assert family.boxes(step, "step") is None
    assert family.boxes(kept.state["state"]["model.0.weight"]["exp_avg"], "e") is not None
