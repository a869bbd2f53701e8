"""Copies between CUDA tensors and host memory, in flight while the host goes on.

A capture runs on a side stream that first waits for the work enqueued so far; copies keep their
order and are cut into buckets, each closed by an event, so that the first buckets can be written
while later ones are still being copied. Sources are kept until their bucket's event has passed.
Nothing here synchronises a whole device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import torch

from ckptfmt.errors import InvalidInput
from ckptfmt.ports.arrays import wait_all
from ckptfmt.torch.elements import bits, is_lazy_view, over_host

BUCKET_BYTES: Final = 128 << 20
"""A bucket is closed once it holds this many bytes."""

Pair = tuple[int, torch.Tensor, memoryview]
"""Index in the caller's list, tensor on a device, host memory."""


class DeviceRuntime(Protocol):
    """Streams and events of one kind of device. ``stream`` and ``event`` values are opaque here."""

    def current_stream(self, device: torch.device) -> Any: ...

    def side_stream(self, device: torch.device) -> Any:
        """The stream for captures from ``device``, the same one each time."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Enqueue what the block does on ``stream``."""

    def record(self, stream: Any) -> Any:
        """Return an event that passes when the work enqueued on ``stream`` so far is done."""

    def wait_event(self, stream: Any, event: Any) -> None:
        """Make later work on ``stream`` wait for ``event``; the host does not wait."""

    def passed(self, event: Any) -> bool: ...

    def synchronize(self, event: Any) -> None:
        """Block the host until ``event`` has passed. Raises what the device raised."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy on the stream of the surrounding ``on`` block (else the current one)."""

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the tensor's device memory from being reused before ``stream`` has done its work so far."""


class CudaRuntime:
    """The CUDA runtime as torch gives it."""

    def __init__(self) -> None:
        self._side: dict[torch.device, torch.cuda.Stream] = {}

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._side.get(device)
        if stream is None:
            stream = self._side[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, stream: Any) -> torch.cuda.Event:
        # Blocking: a thread that waits sleeps, for the training loop needs the core.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait_event(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def passed(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


@dataclass
class _Bucket:
    device: torch.device
    event: Any = None
    nbytes: int = 0
    held: list[Any] = field(default_factory=list)
    """Tensors and host memory that the copies still use."""


class DeviceTransfers:
    """A ``Capture`` of copies that may still be under way (``ports/arrays``).

    Pairs of the caller's list that are not on a device are final from the start.
    """

    def __init__(self, runtime: DeviceRuntime, buckets: Sequence[_Bucket], bucket_of: dict[int, _Bucket]) -> None:
        self._runtime = runtime
        self._buckets = buckets
        self._bucket_of = bucket_of

    def ready(self, index: int) -> bool:
        bucket = self._bucket_of.get(index)
        if bucket is None:
            return True
        if not self._runtime.passed(bucket.event):
            return False
        bucket.held.clear()
        return True

    def wait_for(self, index: int) -> None:
        bucket = self._bucket_of.get(index)
        if bucket is not None:
            self._settle(bucket)

    def wait(self) -> None:
        wait_all([partial(self._settle, bucket) for bucket in self._buckets])

    def fence(self) -> None:
        last = {bucket.device: bucket for bucket in self._buckets}  # one stream per device: in order
        for device, bucket in last.items():
            self._runtime.wait_event(self._runtime.current_stream(device), bucket.event)

    def _settle(self, bucket: _Bucket) -> None:
        self._runtime.synchronize(bucket.event)
        bucket.held.clear()


def capture_from_device(
    pairs: Sequence[Pair], runtime: DeviceRuntime, bucket_bytes: int = BUCKET_BYTES
) -> DeviceTransfers:
    """Enqueue copies of device tensors into host memory, in the order given."""
    sides: dict[torch.device, Any] = {}
    for device in dict.fromkeys(tensor.device for _, tensor, _ in pairs):
        side = sides[device] = runtime.side_stream(device)
        runtime.wait_event(side, runtime.record(runtime.current_stream(device)))

    def copy(tensor: torch.Tensor, host: memoryview, bucket: _Bucket) -> None:
        side = sides[tensor.device]
        # detach(): a user who swaps the tensor's storage leaves ours alone.
        source = tensor.detach()
        bucket.held += [source, host]
        runtime.keep(source, side)
        with runtime.on(side):
            dense = _dense_bits(source)
            bucket.held.append(dense)
            runtime.copy(over_host(host, dense.dtype, dense.shape), dense)

    return _in_buckets(pairs, runtime, bucket_bytes, sides, copy)


def fill_from_host(pairs: Sequence[Pair], runtime: DeviceRuntime, bucket_bytes: int = BUCKET_BYTES) -> DeviceTransfers:
    """Enqueue copies of host memory into device tensors on their current streams, in the order given."""
    streams = {device: runtime.current_stream(device) for device in {tensor.device for _, tensor, _ in pairs}}

    def copy(tensor: torch.Tensor, host: memoryview, bucket: _Bucket) -> None:
        with torch.inference_mode(tensor.is_inference()), runtime.on(streams[tensor.device]):
            target = tensor.detach() if is_lazy_view(tensor) else bits(tensor)
            source = over_host(host, target.dtype, target.shape)
            bucket.held += [target, source]
            runtime.copy(target, source)

    return _in_buckets(pairs, runtime, bucket_bytes, streams, copy)


def _in_buckets(
    pairs: Sequence[Pair], runtime: DeviceRuntime, bucket_bytes: int, streams: dict[torch.device, Any], copy: Any
) -> DeviceTransfers:
    buckets: list[_Bucket] = []
    bucket_of: dict[int, _Bucket] = {}
    open_buckets: dict[torch.device, _Bucket] = {}

    def close(device: torch.device) -> None:
        bucket = open_buckets.pop(device)
        bucket.event = runtime.record(streams[device])

    transfers = DeviceTransfers(runtime, buckets, bucket_of)
    try:
        for index, tensor, host in pairs:
            if host.nbytes != tensor.nbytes:
                raise InvalidInput(
                    f"host memory of {host.nbytes} bytes for a tensor of {tensor.nbytes}; this is a bug in the caller"
                )
            if not host.nbytes:
                continue
            device = tensor.device
            bucket = open_buckets.get(device)
            if bucket is None:
                bucket = open_buckets[device] = _Bucket(device)
                buckets.append(bucket)
            copy(tensor, host, bucket)
            bucket_of[index] = bucket
            bucket.nbytes += host.nbytes
            if bucket.nbytes >= bucket_bytes:
                close(device)
        for device in list(open_buckets):
            close(device)
    except BaseException as error:
        # What was enqueued still uses the caller's memory: leave it only when that is over.
        wait_all([*(partial(close, device) for device in list(open_buckets)), transfers.wait], error)
    return transfers


def _dense_bits(source: torch.Tensor) -> torch.Tensor:
    if is_lazy_view(source):
        source = source.resolve_conj().resolve_neg()
    return bits(source).contiguous()
