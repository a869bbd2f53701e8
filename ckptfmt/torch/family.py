"""torch tensors and live torch objects as an array family (``ports/arrays``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from ckptfmt.errors import InvalidInput, UnsupportedValue
from ckptfmt.ports.arrays import Capture, Expansion, LeafSpec
from ckptfmt.torch import types
from ckptfmt.torch.cuda import CudaRuntime, DeviceTransfers, Pair, capture_from_device, fill_from_host
from ckptfmt.torch.distributed import boxes_of, coordinates_of, is_distributed
from ckptfmt.torch.elements import EXACT_TYPES, NAMES, allocate, bits, flags_of, is_lazy_view, over_host, torch_dtype
from ckptfmt.torch.expand import expand_objects, is_object
from ckptfmt.torch.host import cast_in, copy_in, copy_out, dense_address, overlaps, wrote_to
from ckptfmt.torch.pieces import piece_of
from ckptfmt.torch.pinning import pin_host
from ckptfmt.torch.refusals import refusal

_MEMORY_FORMATS: Final = {
    4: ("channels_last", torch.channels_last),
    5: ("channels_last_3d", torch.channels_last_3d),
}


_TENSOR: Final[tuple[tuple[str, ...], tuple[str, ...]]] = ((), ("requires_grad",))
_PARAMETER: Final[tuple[tuple[str, ...], tuple[str, ...]]] = (("parameter",), ("parameter", "requires_grad"))
"""The flags of dense tensors, by ``requires_grad``."""


class TorchFamily:
    """torch's tensors, modules and optimizers. See ``ArrayFamily`` for what each method promises."""

    name = "tensor"

    def __init__(self) -> None:
        if sys.byteorder != "little":
            raise UnsupportedValue("torch tensors cannot be stored on a big-endian host: the format is little-endian")
        types.register()
        self._cuda = CudaRuntime()
        self._casts: dict[tuple[str, torch.dtype, str], str | None] = {}
        """Why one dtype cannot be converted to another one on a kind of device, or None."""

    def owns(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def owns_object(self, value: Any) -> bool:
        return is_object(value)

    def expand(self, objects: Sequence[tuple[str, Any]], leaves: Sequence[tuple[str, Any]]) -> list[Expansion]:
        return expand_objects(objects, leaves)

    def describe(self, value: Any, path: str, known: LeafSpec | None = None) -> LeafSpec:
        # In the stall once per tensor, so each attribute counts: sparse and other storage-less layouts
        # raise at data_ptr(), nested ones at shape; quantised ones have dtypes of their own.
        kind = type(value)
        if kind not in EXACT_TYPES:
            raise refusal(value, path)
        try:
            dtype = value.dtype
            size = value.shape
            address = value.data_ptr()
            dense = value.is_contiguous() and value.is_cpu and not value.is_neg()
        except RuntimeError:
            raise refusal(value, path) from None
        name = NAMES.get(dtype)
        if not dense or name is None or not address or (dtype.is_complex and value.is_conj()):
            return _described(value, path, known)
        if kind is torch.nn.Parameter:
            flags = _PARAMETER[value.requires_grad]
        elif getattr(value, "_is_buffer", False):
            flags = _flags(value)
        else:
            flags = _TENSOR[value.requires_grad]
        if (
            known is not None
            and known.address == address
            and known.size == size
            and known.dtype == name
            and known.flags == flags
        ):
            return known
        size = tuple(size)
        alias = (address, name, size)
        return LeafSpec(name, size, (0,) * len(size), size, value.nbytes, "replicated", alias, flags, address)

    def boxes(self, value: Any, path: str) -> Sequence[tuple[Any, LeafSpec]] | None:
        return boxes_of(value, path, self.describe) if is_distributed(value) else None

    def coordinates(self, value: Any) -> Mapping[str, int]:
        return coordinates_of(value)

    def host_address(self, value: Any) -> int | None:
        return dense_address(value)

    def capture(self, pairs: Sequence[tuple[Any, memoryview]]) -> Capture:
        on_device: list[Pair] = []
        for index, (value, host) in enumerate(pairs):
            if value.is_cuda:
                on_device.append((index, value, host))
            else:
                copy_out(value, host)
        return self._transfers(on_device, capture_from_device)

    def piece(self, value: Any, start: int, stop: int) -> Any:
        return piece_of(value, start, stop)

    def fill(self, pairs: Sequence[tuple[Any, memoryview]]) -> Capture:
        on_device: list[Pair] = []
        for index, (value, host) in enumerate(pairs):
            if value.is_cuda:
                on_device.append((index, value, host))
            else:
                copy_in(value, host)
        return self._transfers(on_device, fill_from_host)

    def wrote_to(self, values: Sequence[Any]) -> None:
        wrote_to(values)

    def fill_cast(self, value: Any, saved_dtype: str, host: memoryview) -> None:
        try:
            cast_in(value, over_host(host, torch_dtype(saved_dtype), value.shape))
        except NotImplementedError as error:
            raise UnsupportedValue(
                f"torch cannot convert {saved_dtype} to {NAMES.get(value.dtype, value.dtype)}: {error}; "
                "restore into a tensor of the saved dtype"
            ) from None

    def check_cast(self, value: Any, saved_dtype: str) -> str | None:
        pair = (saved_dtype, value.dtype, value.device.type)
        if pair not in self._casts:
            self._casts[pair] = self._tried_cast(value, saved_dtype)
        return self._casts[pair]

    def _tried_cast(self, value: torch.Tensor, saved_dtype: str) -> str | None:
        """torch has no list of the conversions that it lacks, so one element is converted."""
        try:
            element = torch.empty(1, dtype=value.dtype, device=value.device)
            self.fill_cast(element, saved_dtype, memoryview(bytearray(torch_dtype(saved_dtype).itemsize)))
        except UnsupportedValue as error:
            return str(error)
        return None

    def check_fillable(self, value: Any, path: str) -> str | None:
        if value.is_meta and type(value) in EXACT_TYPES:
            return (
                f"{path}: the tensor is on the meta device and has no memory to fill; call "
                "module.to_empty(device=...) (for a plain tensor torch.empty_like(..., device=...)) first"
            )
        try:
            self.describe(value, path)
        except UnsupportedValue as error:
            return str(error)
        if overlaps(value):
            return f"{path}: several elements share memory (an expanded view); pass a contiguous copy"
        return None

    def takes(self, value: Any, dtype: str, shape: tuple[int, ...]) -> int | None:
        # Once per tensor of a model, so each attribute counts. Dense memory can't overlap itself.
        if type(value) not in EXACT_TYPES or NAMES.get(value.dtype) != dtype:
            return None
        try:
            dense = value.is_cpu and value.is_contiguous() and not (value.is_neg() or value.is_conj())
            return value.data_ptr() or None if dense and value.shape == shape else None
        except RuntimeError:  # sparse, nested, or of a running transform: ``describe`` says so
            return None

    def build(self, spec: LeafSpec, host: memoryview, flags: Sequence[str], device: Any | None) -> Any:
        dtype = torch_dtype(spec.dtype)
        if host.readonly and spec.nbytes:
            host = memoryview(bytearray(host))
        tensor = over_host(host, dtype, spec.size)
        if tensor.data_ptr() % dtype.itemsize:  # torch's kernels want aligned elements
            tensor = over_host(memoryview(bytearray(host)), dtype, spec.size)
        if not flags and device is None:
            return tensor
        memory_format = next((form for name, form in _MEMORY_FORMATS.values() if name in flags), None)
        if memory_format is not None:
            tensor = allocate(spec.size, dtype, memory_format)
            copy_in(tensor, host)
        if device is not None:
            tensor = _moved(tensor, device)
        return _flagged(tensor, flags)

    def pin(self, memory: memoryview) -> Callable[[], None]:
        return pin_host(memory)

    def _transfers(self, on_device: list[Pair], enqueue: Callable[..., DeviceTransfers]) -> DeviceTransfers:
        return enqueue(on_device, self._cuda) if on_device else DeviceTransfers(self._cuda, [], {})


def _described(value: torch.Tensor, path: str, known: LeafSpec | None) -> LeafSpec:
    """The description of a tensor that is empty, strided, a lazy view or on a device; or why it cannot be stored."""
    try:
        size = tuple(value.shape)
        nbytes = value.nbytes
        address = value.data_ptr()
        stride = value.stride()
    except RuntimeError:
        raise refusal(value, path) from None
    name = NAMES.get(value.dtype)
    if name is None or (nbytes and not address) or value.is_meta:
        raise refusal(value, path)
    alias = (address, name, size, stride, value.device) if nbytes and not is_lazy_view(value) else None
    spec = LeafSpec(name, size, (0,) * len(size), size, nbytes, "replicated", alias, _flags(value))
    return known if known == spec else spec


def _flags(value: torch.Tensor) -> tuple[str, ...]:
    found = flags_of(value, type(value) is torch.nn.Parameter)
    memory_format = _MEMORY_FORMATS.get(value.dim())
    if memory_format is not None and not value.is_contiguous() and value.is_contiguous(memory_format=memory_format[1]):
        return (*found, memory_format[0])
    return found


def _moved(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    try:
        target = torch.device(device)
        if target.type == "meta":
            raise InvalidInput(
                "a tensor on the meta device would hold nothing of what was saved; shapes and dtypes are in "
                "Generation[name], without reading a byte"
            )
        integers = bits(tensor).to(target, copy=True)
    except (RuntimeError, TypeError, AssertionError) as error:  # AssertionError: torch built without CUDA
        raise InvalidInput(f"cannot put a tensor on device {device!r}: {error}") from error
    if tensor.dtype is torch.complex128:
        return torch.view_as_complex(integers.view(torch.float64))
    return integers.view(tensor.dtype)


def _flagged(tensor: torch.Tensor, flags: Sequence[str]) -> torch.Tensor:
    requires_grad = "requires_grad" in flags
    if "parameter" in flags:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    tensor.requires_grad_(requires_grad)
    if "buffer" in flags or "non_persistent" in flags:
        buffer = getattr(torch.nn, "Buffer", None)
        if buffer is None:
            raise UnsupportedValue(
                f"torch {torch.__version__} has no torch.nn.Buffer, which was saved; install torch 2.5 or newer"
            )
        return buffer(tensor, persistent="non_persistent" not in flags)  # type: ignore[no-any-return]
    return tensor
