"""Deferred freeze: ``save`` returns before parameters and optimizer state are copied, and nothing torn is committed."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from error_chain import chain_of
from forked import in_child
from lifecycle_rig import Place, Process, ended, state_of
from torch import nn, optim

from ckptfmt.checkpointer import Checkpointer
from ckptfmt.engine.save import deferral, snapshot
from ckptfmt.engine.transfer import copy_memory
from ckptfmt.errors import BackendError, InvalidInput, SaveFailed
from ckptfmt.pending import PendingSave
from ckptfmt.testing.faults import Fault

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, foreach=False),
    "AdamW foreach": lambda p: optim.AdamW(p, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: optim.AdamW(p, fused=True),
    "SGD": lambda p: optim.SGD(p, lr=0.001, momentum=0.9),
    "SGD foreach": lambda p: optim.SGD(p, lr=0.001, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.001, momentum=0.9, fused=True),
    "LBFGS": lambda p: optim.LBFGS(p, history_size=3, max_iter=3),
}


class Job:
    """A small training job with everything in it: buffers that a forward pass changes, tied and strided weights, two
    optimizers, plain values."""

    def __init__(self, make: Callable[[Any], optim.Optimizer] = OPTIMIZERS["AdamW foreach"]) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 64), nn.Linear(64, 64))
        if make is not OPTIMIZERS["LBFGS"]:  # wants dense ones
            self.net[3].weight = nn.Parameter(torch.randn(64, 64).t())
        self.head = nn.Linear(64, 8)
        self.optimizer = make(self.net.parameters())
        self.head_optimizer = optim.SGD(self.head.parameters(), lr=0.001, momentum=0.5)
        self.scheduler = optim.lr_scheduler.LambdaLR(self.head_optimizer, lambda step: 1 / (step + 1))
        self.average = torch.zeros(64, 32)
        self.state = {
            "net": self.net,
            "head": self.head,
            "opt": self.optimizer,
            "head_opt": self.head_optimizer,
            "scheduler": self.scheduler,
            "average": self.average,
            "also": self.net[0].weight,
            "log": [],
        }
        self.update()

    def forward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        self.head_optimizer.zero_grad()
        loss = self.head(self.net(torch.randn(16, 64))).square().mean()
        loss.backward()
        return loss

    def update(self) -> None:
        loss = self.forward()
        self.optimizer.step(lambda: loss if not isinstance(self.optimizer, optim.LBFGS) else self.forward())
        self.head_optimizer.step()
        self.scheduler.step()
        self.average.lerp_(self.net[2].weight.detach(), 0.5)
        self.state["log"].append(len(self.state["log"]))

    def copied(self) -> dict[str, Any]:
        """An independent copy of what a save should hold."""
        return copy.deepcopy(
            {
                "net": dict(self.net.state_dict()),
                "head": dict(self.head.state_dict()),
                "opt": list(self.optimizer.state.values()),
                "head_opt": list(self.head_optimizer.state.values()),
                "average": self.average,
                "also": self.net[0].weight.detach(),
                "log": self.state["log"],
            }
        )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def assert_saved(process: Process, id: int, wanted: dict[str, Any]) -> None:
    found = process.repository.generation(id).load()
    for name in ("opt", "head_opt"):
        found[name] = list(found[name]["state"].values())
    for name, value in wanted.items():
        assert same(dict(found[name]) if isinstance(value, dict) else found[name], value), name


class Gate:
    """Holds up the thread that makes deferred copies."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.error: Exception | None = None

    def copy(self, moves: Any) -> None:
        assert threading.current_thread().name == "ckptfmt-freeze"
        self.reached.set()
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error
        copy_memory(moves)

    def open_in(self, seconds: float) -> None:
        threading.Timer(seconds, self.open.set).start()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(snapshot, "copy_memory", made.copy)
    monkeypatch.setattr(deferral, "DEFERRED_BYTES_MIN", 0)
    yield made
    made.open.set()


@pytest.fixture
def process(place: Place) -> Process:
    return place.open()


def save(checkpointer: Checkpointer, state: Any, step: int = 1) -> PendingSave:
    pending = checkpointer.save(state, step=step)
    assert pending is not None
    return pending


def hooks(job: Job) -> int:
    return sum(len(one._optimizer_step_pre_hooks) for one in (job.optimizer, job.head_optimizer))


# -- what is saved is what was there ------------------------------------------------------------------
@pytest.mark.parametrize(("name", "in_flight_max"), [(name, 1 + n % 2) for n, name in enumerate(OPTIMIZERS)])
def test_every_step_of_a_training_loop_is_saved_as_it_was(
    process: Process, gate: Gate, name: str, in_flight_max: int
) -> None:
    job = Job(OPTIMIZERS[name])
    wanted: dict[int, dict[str, Any]] = {}
    with process.checkpointer(freeze="deferred", in_flight_max=in_flight_max) as checkpointer:
        for step in range(4):
            gate.open.clear()
            wanted[step] = job.copied()
            save(checkpointer, job.state, step)
            gate.open_in(0.01)
            job.update()
    assert hooks(job) == 0
    for row in process.rows():
        assert_saved(process, row.id, wanted[row.step])
    assert len(process.rows()) == 4


def test_training_goes_on_until_the_optimizer_steps(process: Process, gate: Gate) -> None:
    job = Job()
    with process.checkpointer(freeze="deferred") as checkpointer:
        gate.open.clear()
        wanted = job.copied()
        pending = save(checkpointer, job.state)
        assert pending.stage == "freezing"
        at_return = pending.stall_seconds
        assert hooks(job) == 2
        assert gate.reached.wait(10)
        job.forward()  # changes the buffers of the batch norm
        job.average.zero_()  # owned by nobody
        job.state["log"].append("later")
        assert pending.stage == "freezing"
        gate.open_in(0.3)
        began = time.perf_counter()
        job.optimizer.step()
        waited = time.perf_counter() - began
        assert waited > 0.2
        assert pending.stage != "freezing"
        assert at_return + 0.2 < pending.stall_seconds < at_return + waited
        again = pending.stall_seconds
        job.head_optimizer.step()
        pending.result()
        assert pending.stall_seconds == again
    assert_saved(process, process.row().id, wanted)
    assert process.row().stall_seconds == pytest.approx(again)


def test_the_hooks_go_at_the_next_call_and_those_of_others_stay(process: Process, gate: Gate) -> None:
    job = Job()
    order: list[str] = []

    def first(*_: Any) -> None:  # a hook that changes parameters must come after ours
        order.append("first")
        with torch.no_grad():
            job.net[0].weight.mul_(0.5)

    earlier = job.optimizer.register_step_pre_hook(first)
    with process.checkpointer(freeze="deferred") as checkpointer:
        gate.open.clear()
        wanted = job.copied()
        pending = save(checkpointer, job.state)
        later = job.optimizer.register_step_pre_hook(lambda *_: order.append("later"))
        gate.open_in(0.2)
        job.update()
        assert order == ["first", "later"]
        assert hooks(job) == 4  # torch walks over them in a step: they don't go there
        pending.result()
        checkpointer.should_save(1)
        assert hooks(job) == 2
        job.update()
        earlier.remove()
        later.remove()
        assert hooks(job) == 0
    assert_saved(process, process.row().id, wanted)


@pytest.mark.parametrize("way", ["save", "restore", "wait", "close", "before_update"])
def test_hooks_never_outlive_the_next_call(process: Process, gate: Gate, way: str) -> None:
    job = Job()
    checkpointer = process.checkpointer(freeze="deferred")
    gate.open.clear()
    wanted = job.copied()
    pending = save(checkpointer, job.state)
    gate.open_in(0.2)
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: save(checkpointer, {"n": 1}, 2),
        "restore": lambda: checkpointer.restore(job.state),
        "wait": checkpointer.wait,
        "close": checkpointer.close,
        "before_update": pending.before_update,
    }
    calls[way]()
    assert gate.open.is_set()
    assert hooks(job) == 0
    checkpointer.close()
    assert_saved(process, process.rows()[0].id, wanted)


def test_before_update_lets_anything_be_changed(process: Process, gate: Gate) -> None:
    job = Job()
    with process.checkpointer(freeze="deferred") as checkpointer:
        gate.open.clear()
        wanted = job.copied()
        pending = save(checkpointer, job.state)
        gate.open_in(0.2)
        pending.before_update()
        for parameter in job.net.parameters():
            parameter.data.zero_()
        pending.before_update()
        assert pending.exception() is None
    assert_saved(process, process.row().id, wanted)


def test_what_no_torch_optimizer_owns_is_copied_before_save_returns(process: Process, gate: Gate) -> None:
    job = Job()
    states = [state_of(1), {"net": job.net, "average": job.average}, {"net": dict(job.net.state_dict())}]
    gate.open.clear()
    with process.checkpointer(freeze="deferred") as checkpointer:
        for step, state in enumerate(states):
            pending = save(checkpointer, state, step)
            assert pending.stage != "freezing"
            pending.before_update()
            pending.result()
    assert not gate.reached.is_set()
    assert hooks(job) == 0


def test_parameters_are_recognised_in_a_state_dict(process: Process, gate: Gate) -> None:
    job = Job()
    with process.checkpointer(freeze="deferred") as checkpointer:
        gate.open.clear()
        wanted = job.copied()["net"]
        save(checkpointer, {"net": job.net.state_dict(), "opt": job.optimizer})
        assert gate.reached.wait(10)
        gate.open_in(0.1)
        job.update()
    assert same(dict(process.repository.latest().load()["net"]), wanted)


def test_small_tensors_are_copied_at_once(process: Process, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferral, "DEFERRED_BYTES_MIN", 1 << 20)
    job = Job()
    gate.open.clear()
    with process.checkpointer(freeze="deferred") as checkpointer:
        wanted = job.copied()
        save(checkpointer, job.state)
        job.update()
    assert_saved(process, process.row().id, wanted)


# -- failures -----------------------------------------------------------------------------------------
def _zero(job: Job) -> None:
    with torch.no_grad():
        job.net[2].weight.zero_()


def _load(job: Job) -> None:
    job.net.load_state_dict({name: torch.zeros_like(value) for name, value in job.net.state_dict().items()})


@pytest.mark.parametrize(("change", "name"), [(_zero, r"net\.2\.weight"), (_load, r"net\.\d\.(weight|bias)")])
def test_a_change_that_nobody_announced_fails_the_save(
    process: Process, gate: Gate, change: Callable[[Job], None], name: str
) -> None:
    job = Job()
    with process.checkpointer(freeze="deferred") as checkpointer:
        gate.open.clear()
        pending = save(checkpointer, job.state)
        assert gate.reached.wait(10)
        change(job)
        gate.open.set()
        job.update()  # training is not disturbed
        with pytest.raises(SaveFailed, match=rf"{name}: changed while it was being copied: call pending.before_update"):
            pending.result()
        assert pending.stage == "failed"
        assert pending.error is not None
        assert any(getattr(error, "kind", None) == "changed_while_copied" for error in chain_of(pending.error))
        wanted = job.copied()
        save(checkpointer, job.state, 2)
        job.update()
    assert ended(process.rows()[0])
    assert_saved(process, process.row().id, wanted)


@pytest.mark.parametrize("saved", [lambda w: w.data, lambda w: w.detach(), lambda w: w], ids=["data", "detached", "w"])
@pytest.mark.parametrize("changed", ["the parameter", "what is saved"])
def test_the_same_whichever_tensor_of_that_memory_is_saved(
    process: Process, gate: Gate, saved: Callable[[torch.Tensor], torch.Tensor], changed: str
) -> None:
    """``w.data`` has a count of changes of its own."""
    weight = nn.Parameter(torch.randn(64, 64))
    state = {"w": saved(weight), "opt": optim.SGD([weight], lr=0.1)}
    with process.checkpointer(freeze="deferred") as checkpointer:
        gate.open.clear()
        pending = save(checkpointer, state)
        assert gate.reached.wait(10)
        with torch.no_grad():
            (weight if changed == "the parameter" else state["w"]).add_(1)
        gate.open.set()
        with pytest.raises(SaveFailed, match="w: changed while it was being copied"):
            pending.result()


def test_a_copy_that_fails_is_the_failure_of_the_save_not_of_the_step(process: Process, gate: Gate) -> None:
    job = Job()
    with process.checkpointer(freeze="deferred") as checkpointer:
        gate.open.clear()
        gate.error = MemoryError("the copy broke")
        pending = save(checkpointer, job.state)
        gate.open_in(0.1)
        job.update()
        job.update()
        with pytest.raises(SaveFailed, match="the copy broke"):
            save(checkpointer, job.state, 2)
        gate.error = None
        wanted = job.copied()
        save(checkpointer, job.state, 3)
        assert isinstance(pending.exception(), SaveFailed)
    assert hooks(job) == 0
    assert_saved(process, process.row().id, wanted)


def test_an_optimizer_that_takes_no_hook_fails_the_save(process: Process, gate: Gate) -> None:
    job = Job()

    def refuse(hook: Any) -> Any:
        raise RuntimeError("no hooks here")

    job.head_optimizer.register_step_pre_hook = refuse  # type: ignore[method-assign]
    with process.checkpointer(freeze="deferred") as checkpointer:
        with pytest.raises(SaveFailed, match="no hooks here"):
            save(checkpointer, job.state)
        assert hooks(job) == 0
        checkpointer.save({"net": job.net}, step=2)
    assert process.repository.latest().step == 2


def test_a_disk_that_fails_while_copies_are_under_way(place: Place, gate: Gate) -> None:
    def broken() -> BackendError:
        gate.reached.wait(10)  # not before
        return BackendError("the disk is broken")

    process = place.open(Fault("open_writer", error=broken))
    job = Job()
    with process.checkpointer(freeze="deferred") as checkpointer:
        gate.open.clear()
        pending = save(checkpointer, job.state)
        assert gate.reached.wait(10)
        gate.open_in(0.2)
        assert isinstance(pending.exception(timeout=20), SaveFailed)
        assert gate.open.is_set()  # its arena is free only now
        wanted = job.copied()
        save(checkpointer, job.state, 2)
        job.update()
    assert_saved(process, process.row().id, wanted)


def test_a_state_that_cannot_be_stored_leaves_no_hook(process: Process, gate: Gate) -> None:
    job = Job()
    with process.checkpointer(freeze="deferred") as checkpointer:
        with pytest.raises(TypeError):
            save(checkpointer, {**job.state, "odd": object()})
        assert hooks(job) == 0


def test_no_thread_to_copy_on(process: Process, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "ckptfmt-freeze":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(snapshot, "copy_memory", copy_memory)
    job = Job()
    with process.checkpointer(freeze="deferred") as checkpointer:
        wanted = job.copied()
        assert save(checkpointer, job.state).stage != "freezing"
        job.update()
    assert_saved(process, process.row().id, wanted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_may_step(process: Process, gate: Gate) -> None:
    """A child has the hooks, but not the thread that copies."""
    job = Job()
    with process.checkpointer(freeze="deferred") as checkpointer:
        gate.open.clear()
        wanted = job.copied()
        pending = save(checkpointer, job.state)
        assert gate.reached.wait(10)

        def step() -> None:
            pending.before_update()
            for parameter in job.head.parameters():
                parameter.grad = torch.ones_like(parameter)
            job.head_optimizer.step()

        in_child(step)
        gate.open.set()
        job.update()
    assert_saved(process, process.row().id, wanted)


@pytest.mark.parametrize(
    "options", [{"freeze": "later"}, {"freeze": None}, {"freeze": "deferred", "host_bytes_max": 1 << 30}]
)
def test_modes_that_cannot_be_meant_are_refused(process: Process, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="freeze"):
        process.repository.checkpointer("run", **options)
    assert not process.catalog.runs()


def test_part_of_it_written_at_once_and_part_deferred(process: Process, gate: Gate) -> None:
    job = Job()
    with process.checkpointer(freeze="deferred") as checkpointer:
        gate.open.clear()
        wanted = job.copied()
        pending = checkpointer.save(job.state, step=1, sync=["*.exp_avg_sq", "average"])
        assert pending is not None
        assert pending.stage == "freezing"
        gate.open_in(0.1)
        job.update()
    assert_saved(process, process.row().id, wanted)
    assert np.prod(pending.stall_seconds) > 0
