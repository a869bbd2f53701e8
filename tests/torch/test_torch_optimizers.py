"""Optimizers and schedulers: state follows the parameter's name and continues bit by bit."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

from ckptfmt.errors import Mismatch
from ckptfmt.torch.family import TorchFamily

CLASSES: dict[str, Callable[[Any], optim.Optimizer]] = {
    name: cls
    for name, cls in vars(optim).items()
    if isinstance(cls, type) and issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer
}
VARIANTS: dict[str, Callable[[Any], optim.Optimizer]] = {
    **CLASSES,
    "SGD-momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD-maximize-tensor-lr": lambda p: optim.SGD(p, lr=torch.tensor(0.1), maximize=True),
    "Adam-amsgrad": lambda p: optim.Adam(p, amsgrad=True, foreach=True),
    "Adam-fused": lambda p: optim.Adam(p, fused=True),
    "AdamW-tensor-lr": lambda p: optim.AdamW(p, lr=torch.tensor(1e-3, dtype=torch.float64), foreach=False),
    "RMSprop-full": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "LBFGS-line-search": lambda p: optim.LBFGS(p, line_search_fn="strong_wolfe"),
    "ASGD-foreach": lambda p: optim.ASGD(p, foreach=True),
}


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, order: str = "ab") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        layers = {n: torch.randn(4, 4, generator=generator).to(dtype) / 2 for n in sorted(order)}
        for name in order:
            self.register_parameter(name, nn.Parameter(layers[name].clone()))

    def loss(self, step: int) -> torch.Tensor:
        x = torch.linspace(-1, 1, 4).mul(step + 1).to(self.a.dtype)
        y = torch.tanh(x @ self.a)
        return ((y @ self.b) ** 2).sum() if hasattr(self, "b") else (y**2).sum()


class SparseNet(Net):
    def loss(self, step: int) -> torch.Tensor:
        rows = torch.tensor([step % 4, (step + 1) % 4])
        found = nn.functional.embedding(rows, self.a, sparse=True)
        return (found @ found.T).sum() + nn.functional.embedding(rows, self.b, sparse=True).sum()


def steps(net: Net, optimizer: optim.Optimizer, first: int, count: int = 3) -> None:
    for step in range(first, first + count):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net.loss(step)
            loss.backward()
            return loss

        optimizer.step(closure)


def same(a: Any, b: Any) -> bool:
    """Equality of nested values with exact types, dtypes and devices."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_optimizer_continues_exactly(archive: Any, name: str, fresh: bool) -> None:
    make_net = SparseNet if name == "SparseAdam" else Net
    net = make_net()
    optimizer = VARIANTS[name](net.parameters())
    steps(net, optimizer, 0)
    saved = archive.save({"model": net, "opt": optimizer})
    at_save = copy.deepcopy(optimizer.state_dict())
    steps(net, optimizer, 3)

    other = make_net()
    resumed = VARIANTS[name](other.parameters())
    if not fresh:
        steps(other, resumed, 11, 2)
    archive.restore({"model": other, "opt": resumed}, saved)
    assert same(resumed.state_dict(), at_save)
    steps(other, resumed, 3)
    assert same(resumed.state_dict(), optimizer.state_dict())
    assert same(other.state_dict(), net.state_dict())


def expand(family: TorchFamily, optimizer: optim.Optimizer, **others: Any) -> Any:
    objects = [(key, value) for key, value in others.items() if isinstance(value, nn.Module)]
    leaves = [(key, value) for key, value in others.items() if not isinstance(value, nn.Module)]
    return family.expand([*objects, ("opt", optimizer)], leaves)[-1]


def test_state_is_keyed_by_the_names_in_the_mapping(family: TorchFamily) -> None:
    net, free = Net(), torch.zeros(3, requires_grad=True)
    optimizer = optim.SGD([{"params": net.parameters()}, {"params": [free], "lr": 0.5}], lr=0.1, momentum=0.9)
    (net.loss(0) + free.sum()).backward()
    optimizer.step()
    one = expand(family, optimizer, model=torch.compile(net, backend="eager"), temperature=free)
    assert (one.kind, one.live, one.notes) == ("optimizer", False, {"by": "name"})
    assert list(one.state["state"]) == ["model.a", "model.b", "temperature"]
    assert [group["params"] for group in one.state["param_groups"]] == [["model.a", "model.b"], ["temperature"]]
    assert one.state["param_groups"][1]["lr"] == 0.5
    assert expand(family, optimizer, model=net).notes == {"by": "mixed"}
    alone = expand(family, optimizer)
    assert alone.notes == {"by": "position"}
    assert list(alone.state["state"]) == ["~0.0", "~0.1", "~1.0"]


def test_own_names_of_the_optimizer_are_used(family: TorchFamily) -> None:
    one = expand(family, optim.SGD(Net().named_parameters(), lr=0.1))
    assert one.notes == {"by": "name"}
    assert one.state["param_groups"][0]["params"] == ["a", "b"]
    assert one.state["param_groups"][0]["param_names"] == ["a", "b"]


@pytest.mark.parametrize("named", [False, True])
def test_momentum_follows_the_name_when_the_order_changes(archive: Any, named: bool) -> None:
    def make(order: str) -> tuple[Net, optim.Optimizer]:
        net = Net(order=order)
        return net, optim.AdamW(net.named_parameters() if named else net.parameters())

    net, optimizer = make("ab")
    steps(net, optimizer, 0)
    saved = archive.save({"model": net, "opt": optimizer})
    other, resumed = make("ba")
    archive.restore({"model": nn.ModuleDict(), "opt": resumed} | {"model": other}, {"opt": saved["opt"]})
    for name in "ab":
        assert torch.equal(
            resumed.state[getattr(other, name)]["exp_avg"], optimizer.state[getattr(net, name)]["exp_avg"]
        )
    if named:
        assert resumed.param_groups[0]["param_names"] == ["b", "a"]
    other.load_state_dict(net.state_dict())
    steps(net, optimizer, 3)
    steps(other, resumed, 3)
    assert torch.equal(net.a, other.a)
    assert torch.equal(net.b, other.b)


def test_lbfgs_refuses_another_order(archive: Any) -> None:
    net = Net()
    optimizer = optim.LBFGS(net.parameters())
    steps(net, optimizer, 0)
    saved = archive.save({"model": net, "opt": optimizer})
    other = Net(order="ba")
    with pytest.raises(Mismatch, match="saved order"):
        archive.restore({"model": other, "opt": optim.LBFGS(other.parameters())}, {"opt": saved["opt"]})


def test_every_difference_is_listed(archive: Any) -> None:
    net = Net(order="abc")
    saved = archive.save({"model": net, "opt": optim.SGD([{"params": [net.a, net.b]}, {"params": [net.c]}], lr=0.1)})
    other = Net(order="abd")
    live = optim.SGD([{"params": [other.a]}, {"params": [other.b, other.d]}], lr=0.7)
    with pytest.raises(Mismatch) as caught:
        archive.restore({"model": other, "opt": live}, {"opt": saved["opt"]})
    assert caught.value.problems == (
        "model.b: saved in group 0, here in group 1",
        "model.d: missing in the saved state (group 1)",
        "model.c: saved, but not in this optimizer",
    )
    assert live.param_groups[0]["lr"] == 0.7
    fewer = optim.SGD([net.a, net.b, net.c], lr=0.7)
    with pytest.raises(Mismatch, match="saved with 2 parameter groups, this optimizer has 1"):
        archive.restore({"model": net, "opt": fewer}, {"opt": saved["opt"]})


def test_names_are_not_guessed_from_positions(archive: Any) -> None:
    net = Net()
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    steps(net, optimizer, 0)
    by_name = archive.save({"model": net, "opt": optimizer})["opt"]
    with pytest.raises(Mismatch, match="put the model into the same mapping") as caught:
        archive.restore({"opt": optim.SGD(Net().parameters(), lr=0.1)}, {"opt": by_name})
    assert len(caught.value.problems) == 4


def test_state_saved_by_position_is_restored_by_position(archive: Any) -> None:
    net = Net()
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    steps(net, optimizer, 0)
    by_place = archive.save({"opt": optimizer})
    for with_model in (False, True):
        other = Net()
        resumed = optim.SGD(other.parameters(), lr=0.3)
        archive.restore({"opt": resumed} | ({"model": other} if with_model else {}), by_place)
        assert same(resumed.state_dict(), optimizer.state_dict())


def test_a_place_never_stands_in_for_a_name(archive: Any) -> None:
    net, free = Net(), torch.zeros(3, requires_grad=True)
    saved = archive.save({"model": net, "opt": optim.SGD([free, net.a], lr=0.1)})
    archive.restore({"model": net, "opt": optim.SGD([free, net.a], lr=0.1)}, {"opt": saved["opt"]})
    with pytest.raises(Mismatch) as caught:
        archive.restore({"model": net, "opt": optim.SGD([net.b, net.a], lr=0.1)}, {"opt": saved["opt"]})
    assert caught.value.problems == (
        "model.b: missing in the saved state (group 0)",
        "~0.0: saved, but not in this optimizer",
    )


@pytest.mark.parametrize("saved", [{"epoch": 1}, [1, 2], None])
def test_what_is_no_optimizer_state_is_a_mismatch(family: TorchFamily, saved: Any) -> None:
    one = expand(family, optim.SGD(Net().parameters(), lr=0.1))
    with pytest.raises(Mismatch, match="not the state of an optimizer"):
        one.check(saved)


class Tied(nn.Module):
    def __init__(self, first: str) -> None:
        super().__init__()
        weight = nn.Parameter(torch.ones(3))
        for name in (first, "embed" if first == "head" else "head"):
            self.register_parameter(name, weight)


def test_a_tied_parameter_is_found_by_any_of_its_names(archive: Any) -> None:
    net, other = Tied("embed"), Tied("head")
    optimizer, resumed = (optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (net, other))
    net.embed.grad = torch.ones(3)
    optimizer.step()
    saved = archive.save({"model": net, "opt": optimizer})
    assert "model.embed" in saved["opt"]
    archive.restore({"model": other, "opt": resumed}, {"opt": saved["opt"]})
    assert torch.equal(resumed.state[other.head]["momentum_buffer"], torch.ones(3))


def test_two_parameters_of_one_name_are_refused(family: TorchFamily) -> None:
    net, free = Net(), torch.zeros(2, requires_grad=True)
    optimizer = optim.SGD([*net.parameters(), free], lr=0.1)
    with pytest.raises(Mismatch, match=r"(?s)two parameters have one name.*model\.a"):
        family.expand([("model", net), ("opt", optimizer)], [("model.a", free)])


def test_no_state_tensor_is_cast_on_the_way_in(archive: Any) -> None:
    """torch's own load_state_dict rounds float32 moments of bfloat16 parameters to bfloat16."""
    net = Net(torch.bfloat16)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    moments = OrderedDict(first=torch.randn(4, 4), codes=torch.arange(16, dtype=torch.uint8))
    optimizer.state[net.a] = {
        "exp_avg": torch.randn(4, 4),
        "nested": moments,
        "history": [torch.randn(3), (torch.randn(2), 5)],
        "tag": "warm",
        "blocks": range(3),
        "step": 3,
    }
    kept = copy.deepcopy(optimizer.state[net.a])
    del kept["blocks"], optimizer.state[net.a]["blocks"]
    saved = archive.save({"model": net, "opt": optimizer})
    other = Net(torch.bfloat16)
    resumed = optim.SGD(other.parameters(), lr=0.1)
    archive.restore({"model": other, "opt": resumed}, saved)
    assert same(resumed.state[other.a], kept)


def test_a_state_that_torch_cannot_load_is_a_mismatch(archive: Any) -> None:
    net = Net()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net.a] = {"blocks": range(3)}
    saved = archive.save({"model": net, "opt": optimizer})
    with pytest.raises(Mismatch, match="load_state_dict refused"):
        archive.restore({"model": net, "opt": optimizer}, {"opt": saved["opt"]})


def test_state_of_no_parameter_and_further_entries_are_kept(archive: Any) -> None:
    net = Net()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    optimizer.state["global"] = {"calls": 4}
    saved = archive.save({"model": net, "opt": optimizer})
    other = Net()
    resumed = optim.SGD(other.parameters(), lr=0.1)
    archive.restore({"model": other, "opt": resumed}, saved)
    assert resumed.state["global"] == {"calls": 4}


def test_an_optimizer_with_a_form_of_its_own_is_kept_as_it_is(family: TorchFamily) -> None:
    class Own(optim.SGD):
        def state_dict(self) -> Any:
            return {"mine": 1}

        def load_state_dict(self, state_dict: Any) -> None:
            self.mine = state_dict["mine"]

    optimizer = Own(Net().parameters(), lr=0.1)
    one = expand(family, optimizer)
    assert (one.kind, one.state) == ("stateful", {"mine": 1})
    one.apply({"mine": 2})
    assert optimizer.mine == 2


def test_restored_state_is_not_shared_between_optimizers(archive: Any) -> None:
    net = Net()
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    steps(net, optimizer, 0)
    saved = archive.save({"model": net, "opt": optimizer})
    before = copy.deepcopy(optimizer.state_dict())
    other = Net()
    resumed = optim.SGD(other.parameters(), lr=0.1)
    archive.restore({"model": other, "opt": resumed}, saved)
    steps(other, resumed, 3)
    assert same(optimizer.state_dict(), before)


def schedulers() -> dict[str, Callable[[optim.Optimizer], Any]]:
    return {
        "LambdaLR": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
        "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda epoch: 0.9),
        "StepLR": lambda o: lrs.StepLR(o, 2),
        "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 2, 2, 4]),
        "ConstantLR": lambda o: lrs.ConstantLR(o, total_iters=4),
        "LinearLR": lambda o: lrs.LinearLR(o),
        "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
        "PolynomialLR": lambda o: lrs.PolynomialLR(o, 7, 2.0),
        "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 7),
        "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
        "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3),
        "CyclicLR-scale": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3, scale_fn=lambda x: 0.5),
        "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=20),
        "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0),
        "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]),
        "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)], [2]),
        "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 3),
    }


def test_no_scheduler_of_torch_is_forgotten() -> None:
    known = {
        name
        for name, cls in vars(lrs).items()
        if isinstance(cls, type) and hasattr(cls, "state_dict") and not name.startswith("_")
    }
    assert known - {"LRScheduler", "Optimizer"} <= set(schedulers())


@pytest.mark.parametrize("name", schedulers())
def test_every_scheduler_continues_exactly(archive: Any, name: str) -> None:
    def run(optimizer: optim.Optimizer, scheduler: Any, count: int) -> list[float]:
        rates = []
        for _ in range(count):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own use of deprecated arguments
        net, other = Net(), Net()
        optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scheduler = schedulers()[name](optimizer)
        run(optimizer, scheduler, 4)
        saved = archive.save({"model": net, "opt": optimizer, "scheduler": scheduler})
        at_save = copy.deepcopy(scheduler.state_dict())
        expected = run(optimizer, scheduler, 4)
        resumed = optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        schedule = schedulers()[name](resumed)
        archive.restore({"model": other, "opt": resumed, "scheduler": schedule}, saved)
        assert same(schedule.state_dict(), at_save)
        assert run(resumed, schedule, 4) == expected


def test_grad_scaler_and_averaged_model(archive: Any) -> None:
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (512.0, 2.0))
    scaler.scale(torch.ones(1))
    archive.restore({"scaler": other}, archive.save({"scaler": scaler}))
    assert same(other.state_dict(), scaler.state_dict())
    net = Net()
    averaged, target = (torch.optim.swa_utils.AveragedModel(n) for n in (net, Net()))
    averaged.update_parameters(net)
    averaged.update_parameters(net)
    archive.restore({"ema": target}, archive.save({"ema": averaged}))
    assert target.n_averaged == 2
    assert same(dict(target.state_dict()), dict(averaged.state_dict()))


def test_stateful_data_loader(archive: Any) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        generator = torch.Generator().manual_seed(3)
        return loaders.StatefulDataLoader(list(range(20)), batch_size=2, shuffle=True, generator=generator)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata uses what torch deprecates
        loader = make()
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        saved = archive.encode(loader.state_dict(), "loader")
        rest = [batch.tolist() for batch in batches]
        resumed = make()
        resumed.load_state_dict(archive.decode(saved))
        assert [batch.tolist() for batch in resumed] == rest
    assert len(rest) == 6
