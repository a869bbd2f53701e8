"""Buffers as flat bytes, their addresses, and which bytes of an object have been written."""

from __future__ import annotations

import ctypes
import threading

from ckptfmt.errors import InvalidInput
from ckptfmt.ports.backend import Buffer

_BYTES_AS_THEY_ARE = 0  # PyBUF_SIMPLE


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer`` (stable ABI since 3.11)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None


def flat_bytes(data: Buffer, what: str) -> memoryview:
    """Return ``data`` as a one-dimensional view of bytes, without a copy. ``InvalidInput`` if it is not contiguous."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise InvalidInput(f"{what}: the buffer is not contiguous in C order; pass a contiguous copy")
    # cast() refuses zero-size shapes, and any empty buffer is as good as another.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of ``view``, also of a read-only one."""
    record = _PyBuffer()
    _get_buffer(view, ctypes.byref(record), _BYTES_AS_THEY_ARE)
    try:
        return int(record.buf or 0)
    finally:
        _release_buffer(ctypes.byref(record))


def copy_into(target: memoryview, source: memoryview) -> None:
    """As ``target[:] = source`` for flat bytes, but other threads go on meanwhile."""
    if len(target) != len(source) or target.readonly:
        raise ValueError(f"{len(source)} bytes do not fit into {len(target)}, or may not be written there")
    ctypes.memmove(address_of(target), address_of(source), len(source))


class Coverage:
    """Which bytes of an object of ``nbytes`` bytes have been written. Thread-safe."""

    def __init__(self, name: str, nbytes: int) -> None:
        self._name = name
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._written: list[tuple[int, int]] = []

    def check(self, offset: int, length: int) -> None:
        """Raise ``InvalidInput`` unless the range lies within the object."""
        if offset < 0 or offset + length > self._nbytes:
            raise InvalidInput(
                f"write {self._name}: bytes {offset} to {offset + length} lie outside the announced "
                f"{self._nbytes} bytes; open the writer with the object's full size"
            )

    def add(self, offset: int, length: int) -> None:
        if length:
            with self._lock:
                self._written.append((offset, length))

    def require_whole(self) -> None:
        """Raise ``InvalidInput`` unless every byte was written exactly once."""
        with self._lock:
            written = sorted(self._written)
        end = 0
        for offset, length in written:
            if offset != end:
                raise InvalidInput(self._complaint(end, offset))
            end += length
        if end != self._nbytes:
            raise InvalidInput(self._complaint(end, self._nbytes))

    def _complaint(self, end: int, offset: int) -> str:
        if offset > end:
            problem = f"bytes {end} to {offset} of {self._nbytes} were never written"
        else:
            problem = f"bytes {offset} to {end} were written twice"
        return f"finish {self._name}: {problem}; write every byte once, else abort"
