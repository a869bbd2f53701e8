"""Device copies in buckets, on streams that only run when they are made to; and pinned memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfmt
from ckptfmt.engine.save.deferral import Deferral, Watch
from ckptfmt.errors import CkptError, InvalidInput
from ckptfmt.torch.cuda import DeviceTransfers, capture_from_device, fill_from_host
from ckptfmt.torch.ownership import ownership_of
from ckptfmt.torch.pieces import piece_of
from ckptfmt.torch.pinning import register

CPU = torch.device("cpu")


class Stream:
    """Work in order, done only when somebody waits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: list[Any] = []

    def run_until(self, event: Event) -> None:
        while not event.passed:
            self.queue.pop(0)()


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.passed = False
        stream.queue.append(self.fire)

    def fire(self) -> None:
        self.passed = True


class LazyRuntime:
    """A device whose streams stand still until the host synchronises."""

    def __init__(self) -> None:
        self.main, self.side = Stream("main"), Stream("side")
        self.current = self.main
        self.kept: list[tuple[int, str]] = []
        self.fail_at: int | None = None
        self.copies = 0

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    def side_stream(self, device: torch.device) -> Stream:
        return self.side

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def record(self, stream: Stream) -> Event:
        return Event(stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        stream.queue.append(lambda: event.stream.run_until(event))

    def passed(self, event: Event) -> bool:
        return event.passed

    def synchronize(self, event: Event) -> None:
        event.stream.run_until(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copies += 1
        if self.copies == self.fail_at:
            raise RuntimeError("CUDA error: out of memory")
        self.current.queue.append(lambda: target.copy_(source))

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.kept.append((tensor.data_ptr(), stream.name))

    def enqueue(self, work: Any) -> None:
        self.current.queue.append(work)

    def drain(self) -> None:
        self.synchronize(self.record(self.main))


@pytest.fixture
def runtime() -> LazyRuntime:
    return LazyRuntime()


def hosts(values: list[torch.Tensor]) -> list[bytearray]:
    return [bytearray(value.nbytes) for value in values]


def pairs(values: list[torch.Tensor], memory: list[bytearray]) -> list[tuple[int, torch.Tensor, memoryview]]:
    return [(i, v, memoryview(m)) for i, (v, m) in enumerate(zip(values, memory, strict=True))]


def test_buckets_are_ready_one_after_the_other(runtime: LazyRuntime) -> None:
    values = [torch.full((64,), float(i)) for i in range(6)]
    memory = hosts(values)
    capture = capture_from_device(pairs(values, memory), runtime, bucket_bytes=512)
    assert not any(capture.ready(i) for i in range(6))
    assert not any(any(m) for m in memory[1:])
    capture.wait_for(1)
    assert [capture.ready(i) for i in range(6)] == [True, True, False, False, False, False]
    assert bytes(memory[1]) == values[1].numpy().tobytes()
    assert not any(memory[2])
    capture.wait()
    assert all(capture.ready(i) for i in range(6))
    assert [bytes(m) for m in memory] == [v.numpy().tobytes() for v in values]
    assert [stream for _, stream in runtime.kept] == ["side"] * 6


def test_a_capture_sees_the_work_enqueued_before_it_and_not_after(runtime: LazyRuntime) -> None:
    value = torch.zeros(8)
    memory = hosts([value])
    runtime.enqueue(lambda: value.fill_(1))
    capture = capture_from_device(pairs([value], memory), runtime)
    capture.fence()
    runtime.enqueue(lambda: value.fill_(2))
    runtime.drain()  # the main stream runs all it has; the fence makes it wait for the copies
    assert value[0] == 2
    capture.wait()
    assert torch.frombuffer(memory[0], dtype=torch.float32).tolist() == [1.0] * 8


def test_sources_are_held_until_their_bucket_has_passed(runtime: LazyRuntime) -> None:
    values = [torch.ones(64), torch.ones(64)]
    memory = hosts(values)
    capture = capture_from_device(pairs(values, memory), runtime, bucket_bytes=256)
    values[0].set_(torch.zeros(64).untyped_storage(), 0, (64,))  # the storage is swapped: ours stays
    del values
    first, second = capture._buckets
    assert first.held
    capture.wait_for(0)
    assert not first.held
    assert second.held
    assert torch.frombuffer(memory[0], dtype=torch.float32).tolist() == [1.0] * 64
    capture.wait()
    assert not second.held


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128, torch.int4], ids=str)
def test_strided_and_conjugate_sources_and_targets(runtime: LazyRuntime, dtype: torch.dtype) -> None:
    if dtype is torch.int4:
        base = torch.arange(24, dtype=torch.uint8).view(dtype)
        values = [base, base[::2], base.view(4, 6).t()]
    else:
        base = torch.randn(4, 6, dtype=dtype)
        values = [base, base.t(), base[:, ::2], base.conj() if dtype.is_complex else base[1]]
    values.append(values[0][:0])
    memory = hosts(values)
    capture = capture_from_device(pairs(values, memory), runtime)
    capture.wait()
    assert capture.ready(len(values) - 1)  # nothing to copy
    targets = [
        torch.empty_strided(v.shape, v.stride(), dtype=torch.uint8 if dtype is torch.int4 else dtype).zero_()
        for v in values
    ]
    targets = [t.view(dtype) for t in targets]
    if dtype.is_complex:
        targets[3] = targets[3].conj()
    filled = fill_from_host(pairs(targets, memory), runtime)
    assert not filled.ready(0)
    filled.wait()
    for value, target in zip(values, targets, strict=True):
        if dtype is torch.int4:
            value, target = value.view(torch.uint8), target.view(torch.uint8)
        assert torch.equal(value, target)


def test_a_fill_is_in_order_with_the_current_stream(runtime: LazyRuntime) -> None:
    value = torch.zeros(4)
    runtime.enqueue(lambda: value.fill_(7))
    fill_from_host([(0, value, memoryview(bytearray(torch.ones(4).numpy().tobytes())))], runtime)
    runtime.enqueue(lambda: value.mul_(3))
    runtime.drain()
    assert value.tolist() == [3.0] * 4


def test_an_error_half_way_waits_for_what_was_enqueued(runtime: LazyRuntime) -> None:
    values = [torch.ones(64) for _ in range(4)]
    memory = hosts(values)
    runtime.fail_at = 3
    with pytest.raises(RuntimeError, match="out of memory"):
        capture_from_device(pairs(values, memory), runtime, bucket_bytes=1024)
    assert all(any(m) for m in memory[:2])  # the caller may reuse its memory: no copy is left
    assert not runtime.side.queue


@pytest.mark.parametrize("fails", [1, 2])
def test_a_bucket_that_fails_does_not_end_the_waiting_for_the_others(
    runtime: LazyRuntime, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    values = [torch.ones(64) for _ in range(6)]
    memory = hosts(values)
    capture = capture_from_device(pairs(values, memory), runtime, bucket_bytes=512)
    synchronize, calls = runtime.synchronize, iter(range(1, 10))

    def failing(event: Event) -> None:
        if next(calls) == fails:
            raise RuntimeError("CUDA error: uncorrectable ECC error")
        synchronize(event)

    monkeypatch.setattr(runtime, "synchronize", failing)
    with pytest.raises(RuntimeError, match="ECC error"):
        capture.wait()
    assert not runtime.side.queue


def test_a_stream_that_takes_no_event_leaves_the_earlier_buckets_to_end(
    runtime: LazyRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [torch.ones(64) for _ in range(3)]
    memory = hosts(values)
    record = runtime.record

    def refuse(stream: Stream) -> Event:
        if stream is runtime.side and runtime.copies == 3:
            raise RuntimeError("CUDA error: out of memory")
        return record(stream)

    monkeypatch.setattr(runtime, "record", refuse)
    with pytest.raises(RuntimeError, match="out of memory"):
        capture_from_device(pairs(values, memory), runtime, bucket_bytes=512)
    assert all(any(m) for m in memory[:2])


def test_memory_of_another_size_is_refused(runtime: LazyRuntime) -> None:
    with pytest.raises(InvalidInput, match="15 bytes"):
        capture_from_device([(0, torch.zeros(4), memoryview(bytearray(15)))], runtime)


def test_pairs_that_are_on_no_device_are_final(runtime: LazyRuntime) -> None:
    nothing = DeviceTransfers(runtime, [], {})
    assert nothing.ready(5)
    nothing.wait_for(5)
    nothing.wait()
    nothing.fence()
    assert not runtime.main.queue


# -- deferred freeze on a device ----------------------------------------------------------------------
class Seen:
    """A listener of a deferral."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.seconds = 0.0

    def advance(self, stage: str) -> None:
        self.stages.append(stage)

    def blocked(self, seconds: float) -> None:
        self.seconds += seconds

    def began(self, generation_id: int) -> None:
        raise AssertionError(generation_id)

    succeeded = failed = began


class SharedRuntime(LazyRuntime):
    """Streams that several threads wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.moving = threading.Event()

    def synchronize(self, event: Event) -> None:
        assert self.moving.wait(20)
        with self.lock:
            super().synchronize(event)

    def passed(self, event: Event) -> bool:
        return event.passed


@dataclass
class Deferred:
    """Parameters of an optimizer on a device that stands still, and their deferred copies."""

    runtime: SharedRuntime
    net: torch.nn.Linear
    optimizer: torch.optim.Optimizer
    memory: list[bytearray]
    deferral: Deferral
    seen: Seen

    def update(self, amount: float) -> None:
        """A step on the device: it is enqueued, and torch counts the change at once."""
        self.optimizer.step()
        for parameter in self.net.parameters():
            torch.autograd.graph.increment_version(parameter)
            self.runtime.enqueue(lambda parameter=parameter: parameter.data.add_(amount))

    def held(self) -> list[torch.Tensor]:
        return [torch.frombuffer(m, dtype=torch.float32) for m in self.memory]


@pytest.fixture
def deferred() -> Iterator[Deferred]:
    runtime, net = SharedRuntime(), torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    values = [parameter.detach() for parameter in net.parameters()]
    memory = hosts(values)
    owner = ownership_of(optimizer)
    watches = [Watch(f"net.{i}", value, owner, owner.changes(value)) for i, value in enumerate(values)]
    capture = capture_from_device(pairs(values, memory), runtime)
    deferral, seen = Deferral(lambda: None, [capture], on_host=[], on_device=watches), Seen()
    yield Deferred(runtime, net, optimizer, memory, deferral, seen)
    runtime.moving.set()
    deferral.settle()


def test_a_step_makes_the_device_wait_and_not_the_host(deferred: Deferred) -> None:
    before = [parameter.detach().clone().flatten() for parameter in deferred.net.parameters()]
    deferred.deferral.start(deferred.seen)
    for _ in range(2):
        deferred.update(5.0)
    assert deferred.seen.stages == []
    assert len(deferred.optimizer._optimizer_step_pre_hooks) == 1
    main = deferred.runtime.main
    main.run_until(deferred.runtime.record(main))  # the device runs, and nobody has waited for the copies on the host
    deferred.runtime.moving.set()
    deferred.deferral.wait()
    assert all(torch.equal(a, b) for a, b in zip(deferred.held(), before, strict=True))
    for parameter, old in zip(deferred.net.parameters(), before, strict=True):
        assert torch.allclose(parameter.detach().flatten(), old + 10)
    assert deferred.seen.stages == ["frozen"]
    assert deferred.seen.seconds < 0.1
    assert deferred.deferral.lift()
    assert not deferred.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("then_step", [True, False])
def test_an_unannounced_change_on_a_device_is_found(deferred: Deferred, then_step: bool) -> None:
    deferred.deferral.start(deferred.seen)
    torch.autograd.graph.increment_version(deferred.net.bias)
    if then_step:
        deferred.update(1.0)
    deferred.runtime.moving.set()
    with pytest.raises(InvalidInput, match=r"net\.1: changed while it was being copied"):
        deferred.deferral.wait()
    assert deferred.seen.stages == []


def test_a_device_that_fails_is_the_failure_of_the_save_not_of_the_step(deferred: Deferred) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    deferred.deferral.start(deferred.seen)
    deferred.runtime.wait_event = broken  # type: ignore[method-assign]
    deferred.update(1.0)
    deferred.runtime.moving.set()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        deferred.deferral.wait()
    assert deferred.seen.stages == []


def test_a_save_that_has_failed_calls_its_copies_off(deferred: Deferred) -> None:
    deferred.deferral.call_off(ValueError("the disk is broken"))
    deferred.deferral.start(deferred.seen)
    assert not deferred.optimizer._optimizer_step_pre_hooks
    with pytest.raises(ValueError, match="the disk is broken"):
        deferred.deferral.wait_for_host()
    deferred.deferral.before_update()
    assert deferred.deferral.lift()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device_defers_to_the_next_step(tmp_path: Path) -> None:
    net = torch.nn.Linear(2048, 2048, device="cuda")
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    state = {"net": net, "optimizer": optimizer}
    with ckptfmt.open(tmp_path) as repository, repository.checkpointer(freeze="deferred") as checkpointer:
        for step in range(4):
            net(torch.randn(64, 2048, device="cuda")).square().mean().backward()
            before = [parameter.detach().clone() for parameter in net.parameters()]
            pending = checkpointer.save(state, step=step)
            optimizer.step()
            assert pending is not None
            saved = pending.result().load()["net"]
            assert all(torch.equal(a.cpu(), b) for a, b in zip(before, saved.values(), strict=True))


class Cudart:
    """Registers ranges; refuses from the ``limit``-th on."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.pieces: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if len(self.pieces) >= self.limit:
            return 2
        self.pieces[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.pieces.pop(address, None) else 713


def test_memory_is_pinned_in_pieces_and_unpinned_once() -> None:
    cudart, memory = Cudart(), memoryview(bytearray(2500))
    undo = register(memory, cudart, piece_bytes=1000)
    addresses = sorted(cudart.pieces)
    assert [cudart.pieces[a] for a in addresses] == [1000, 1000, 500]
    assert addresses[1] - addresses[0] == addresses[2] - addresses[1] == 1000
    undo()
    assert not cudart.pieces
    undo()


def test_a_refused_piece_leaves_nothing_pinned() -> None:
    cudart = Cudart(limit=2)
    with pytest.raises(CkptError, match="CUDA error 2") as caught:
        register(memoryview(bytearray(2500)), cudart, piece_bytes=1000)
    assert caught.value.kind == "pin_failed"
    assert not cudart.pieces


def test_a_failed_undo_is_reported() -> None:
    cudart = Cudart()
    undo = register(memoryview(bytearray(1500)), cudart, piece_bytes=1000)
    cudart.pieces.clear()
    with pytest.raises(CkptError, match="code 713") as caught:
        undo()
    assert caught.value.kind == "unpin_failed"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device_captures_what_was_there_at_the_call(family: Any) -> None:
    values = [torch.randn(1 << 22, device="cuda"), torch.randn(512, 512, device="cuda").t()]
    before = [value.cpu().contiguous() for value in values]
    memory = hosts(values)
    undo = family.pin(memoryview(memory[0]))
    capture = family.capture([(v, memoryview(m)) for v, m in zip(values, memory, strict=True)])
    capture.fence()
    for value in values:
        value.fill_(-1)
    capture.wait()
    for host, value in zip(memory, before, strict=True):
        assert torch.equal(torch.frombuffer(host, dtype=torch.float32).view(value.shape), value)
    family.fill([(v, memoryview(m)) for v, m in zip(values, memory, strict=True)]).wait()
    for value, saved in zip(values, before, strict=True):
        assert torch.equal(value.cpu(), saved)
    undo()


def test_pieces_of_a_tensor_arrive_each_in_its_place_dense_ones_without_a_copy_on_the_device() -> None:
    runtime = LazyRuntime()
    dense, strided = torch.arange(5000.0), torch.arange(6000.0).to(torch.bfloat16).reshape(60, 100).t()
    for tensor in (dense, strided):
        host = torch.zeros(tensor.numel(), dtype=tensor.dtype)
        memory = memoryview(host.view(torch.uint8).numpy())
        captures = []
        for start in range(0, tensor.nbytes, 2048):
            stop = min(start + 2048, tensor.nbytes)
            piece = piece_of(tensor, start, stop)
            assert piece.untyped_storage().nbytes() == (dense.nbytes if tensor is dense else stop - start)
            captures.append(capture_from_device([(0, piece, memory[start:stop])], runtime))
        assert not host.any()
        for capture in captures:
            capture.wait()
        assert torch.equal(host.view(tensor.shape), tensor)
