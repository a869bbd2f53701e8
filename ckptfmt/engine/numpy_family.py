"""numpy arrays as an array family, and large byte strings as one more."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ckptfmt.errors import InvalidInput, UnsupportedValue
from ckptfmt.format import dtypes
from ckptfmt.ports.arrays import Capture, Expansion, LeafSpec


class Done:
    """The capture of memory that was copied before the call returned."""

    def ready(self, index: int) -> bool:
        return True

    def wait_for(self, index: int) -> None:
        pass

    def wait(self) -> None:
        pass

    def fence(self) -> None:
        pass


def _no_undo() -> None:
    pass


class _HostFamily:
    """What families of plain host memory have in common: no objects of their own, nothing to pin."""

    def owns_object(self, value: Any) -> bool:
        return False

    def expand(self, objects: Sequence[tuple[str, Any]], leaves: Sequence[tuple[str, Any]]) -> list[Expansion]:
        return []

    def boxes(self, value: Any, path: str) -> Sequence[tuple[Any, LeafSpec]] | None:
        return None

    def coordinates(self, value: Any) -> Mapping[str, int]:
        return {}

    def wrote_to(self, values: Sequence[Any]) -> None:
        pass

    def pin(self, memory: memoryview) -> Callable[[], None]:
        return _no_undo


class NumpyFamily(_HostFamily):
    """numpy's ndarrays. Values are stored little-endian in C order and come back so."""

    name = "array"

    def __init__(self) -> None:
        self._casts: dict[tuple[str, np.dtype[Any]], str | None] = {}
        """Why one dtype cannot be converted to another one, or None."""

    def owns(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def describe(self, value: Any, path: str, known: LeafSpec | None = None) -> LeafSpec:
        if type(value) is not np.ndarray:
            raise UnsupportedValue(
                f"{path}: {type(value).__module__}.{type(value).__qualname__} is a subclass of numpy.ndarray with "
                "meaning of its own; save numpy.asarray(value), or teach ckptfmt the type with ckptfmt.register_type"
            )
        name = dtypes.from_numpy(value.dtype)
        if name is None:
            raise UnsupportedValue(
                f"{path}: a numpy array of dtype {value.dtype} has no place in the format; "
                "convert it to a numeric dtype, or save it as a list"
            )
        shape = value.shape
        interface = value.__array_interface__
        nbytes, address = value.nbytes, interface["data"][0]
        alias = ("numpy", address, name, shape, interface["strides"]) if nbytes else None
        ready = address if nbytes and _as_stored(value) else None
        spec = LeafSpec(name, shape, (0,) * len(shape), shape, nbytes, "replicated", alias, (), ready)
        return known if known == spec else spec

    def host_address(self, value: Any) -> int | None:
        return int(value.__array_interface__["data"][0]) if value.nbytes and _as_stored(value) else None

    def capture(self, pairs: Sequence[tuple[Any, memoryview]]) -> Capture:
        for value, host in pairs:
            if value.nbytes:
                np.copyto(_over(host, value.dtype, value.shape), value)
        return Done()

    def piece(self, value: Any, start: int, stop: int) -> Any:
        first, last = start // value.dtype.itemsize, stop // value.dtype.itemsize
        if value.flags.c_contiguous:
            return value.reshape(-1)[first:last]
        out = np.empty(last - first, value.dtype)
        _copy_elements(value, first, last, out)
        return out

    def fill(self, pairs: Sequence[tuple[Any, memoryview]]) -> Capture:
        for value, host in pairs:
            if value.nbytes:
                np.copyto(value, _over(host, value.dtype, value.shape))
        return Done()

    def fill_cast(self, value: Any, saved_dtype: str, host: memoryview) -> None:
        saved = dtypes.numpy_dtype(saved_dtype)
        try:
            if saved is None:
                raise TypeError(f"it has no dtype for {saved_dtype}")
            np.copyto(value, _over(host, saved, value.shape), casting="unsafe")
        except TypeError as error:
            raise InvalidInput(
                f"numpy cannot convert {saved_dtype} to {value.dtype}: {error}; restore into an array of the saved "
                "dtype or a torch tensor, or leave it out with keys="
            ) from None

    def check_cast(self, value: Any, saved_dtype: str) -> str | None:
        pair = (saved_dtype, value.dtype)
        if pair not in self._casts:
            self._casts[pair] = self._tried_cast(value, saved_dtype)
        return self._casts[pair]

    def _tried_cast(self, value: np.ndarray[Any, Any], saved_dtype: str) -> str | None:
        """numpy's own answer is wrong for types of other packages, so one element is converted."""
        try:
            host = memoryview(bytearray(dtypes.dtype(saved_dtype).itemsize))
            self.fill_cast(np.empty(1, value.dtype), saved_dtype, host)
        except InvalidInput as error:
            return str(error)
        return None

    def check_fillable(self, value: Any, path: str) -> str | None:
        if not value.flags.writeable:
            return f"{path}: the array is read-only; pass a writable copy"
        if (
            value.nbytes
            and 0 in value.strides
            and any(stride == 0 and size > 1 for stride, size in zip(value.strides, value.shape, strict=True))
        ):
            return f"{path}: the array is broadcast, several of its elements share memory; pass a copy"
        return None

    def takes(self, value: Any, dtype: str, shape: tuple[int, ...]) -> int | None:
        if type(value) is not np.ndarray or value.shape != shape or not value.nbytes or not value.flags.writeable:
            return None
        return self.host_address(value) if dtypes.from_numpy(value.dtype) == dtype else None

    def build(self, spec: LeafSpec, host: memoryview, flags: Sequence[str], device: Any | None) -> Any:
        if device not in (None, "cpu"):
            raise InvalidInput(f'a numpy array lives on the CPU, not on {device}; load with framework="torch"')
        dtype = dtypes.numpy_dtype(spec.dtype)
        if dtype is None:
            raise UnsupportedValue(
                f'numpy has no dtype for {spec.dtype}; load with framework="torch", or read the tensor\'s bytes'
            )
        if not spec.nbytes:
            return np.empty(spec.size, dtype)
        return np.frombuffer(host, dtype=dtype).reshape(spec.size)


class BlobFamily(_HostFamily):
    """Byte strings too large for the state tree: stored as one-dimensional uint8 tensors."""

    name = "blob"

    def owns(self, value: Any) -> bool:
        return type(value) in (bytes, bytearray)

    def describe(self, value: Any, path: str, known: LeafSpec | None = None) -> LeafSpec:
        shape = (len(value),)
        return LeafSpec("uint8", shape, (0,), shape, len(value))

    def host_address(self, value: Any) -> int | None:
        return None

    def capture(self, pairs: Sequence[tuple[Any, memoryview]]) -> Capture:
        for value, host in pairs:
            host[:] = value
        return Done()

    def piece(self, value: Any, start: int, stop: int) -> Any:
        return memoryview(value)[start:stop]

    def fill(self, pairs: Sequence[tuple[Any, memoryview]]) -> Capture:
        raise InvalidInput("a byte string cannot be filled in place")

    def fill_cast(self, value: Any, saved_dtype: str, host: memoryview) -> None:
        raise InvalidInput("a byte string has no dtype to cast to")

    def check_cast(self, value: Any, saved_dtype: str) -> str | None:
        return "a byte string has no dtype to cast to"

    def check_fillable(self, value: Any, path: str) -> str | None:
        return None  # replaced, never filled

    def takes(self, value: Any, dtype: str, shape: tuple[int, ...]) -> int | None:
        return None

    def build(self, spec: LeafSpec, host: memoryview, flags: Sequence[str], device: Any | None) -> Any:
        return bytes(host)


_LITTLE = sys.byteorder == "little"


def _as_stored(value: np.ndarray[Any, Any]) -> bool:
    """Whether the bytes lie in memory as they will in a pack: dense, in C order and little-endian."""
    # Of a descriptor in several byte orders only the little-endian one is already as stored.
    return value.flags.c_contiguous and (value.dtype.isnative or value.dtype.itemsize == 1) and _LITTLE


def _over(host: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """View host bytes, which are little-endian, as an array."""
    return np.frombuffer(host, dtype=dtype.newbyteorder("<") if dtype.kind != "V" else dtype).reshape(shape)


def _copy_elements(source: np.ndarray[Any, Any], first: int, last: int, out: np.ndarray[Any, Any]) -> None:
    """Copy the elements ``first`` to ``last``, counted in C order, of an array with any strides."""
    if source.ndim == 1:
        out[:] = source[first:last]
        return
    row = source[0].size
    above, below = -(-first // row), last // row  # the whole rows
    if above > below:
        return _copy_elements(source[below], first - below * row, last - below * row, out)
    head, middle = above * row - first, (below - above) * row
    if head:
        _copy_elements(source[above - 1], row - head, row, out[:head])
    out[head : head + middle].reshape((below - above, *source.shape[1:]))[...] = source[above:below]
    if head + middle < last - first:
        _copy_elements(source[below], 0, last - below * row, out[head + middle :])
    return None


def memory_at(address: int, nbytes: int) -> memoryview:
    """A writable view of ``nbytes`` at ``address``. The caller keeps the owner of the memory alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
