"""Element types: the name in the manifest, the bytes of one element, and the word in a pack.

Names are torch's own (``str(torch.float32)`` without the prefix). Values are stored little-endian.
``stored`` is a dtype word of the safetensors format that both its Rust core and its torch readers
know (safetensors 0.8: ``safetensors/torch.py``, ``_TYPES``); a type that either lacks is stored as
raw bytes (``U8``) or as the real numbers it consists of (``F16``, ``F64``), with extra trailing
dimensions. The true type then stands in the manifest only. See spec/format-v1.md, "Element types".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from ckptfmt.errors import FormatError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. ``itemsize`` is in bytes; ``stored_suffix`` are the extra trailing
    dimensions of the pack entry's shape (empty where the pack knows the type itself)."""

    name: str
    itemsize: int
    stored: str
    stored_suffix: tuple[int, ...] = ()


def _native() -> list[DType]:
    rows = (
        ("float64", 8, "F64"),
        ("float32", 4, "F32"),
        ("float16", 2, "F16"),
        ("bfloat16", 2, "BF16"),
        ("complex64", 8, "C64"),
        ("int64", 8, "I64"),
        ("int32", 4, "I32"),
        ("int16", 2, "I16"),
        ("int8", 1, "I8"),
        ("uint64", 8, "U64"),
        ("uint32", 4, "U32"),
        ("uint16", 2, "U16"),
        ("uint8", 1, "U8"),
        ("bool", 1, "BOOL"),
        ("float8_e4m3fn", 1, "F8_E4M3"),
        ("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
        ("float8_e5m2", 1, "F8_E5M2"),
        ("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
    )
    return [DType(name, itemsize, stored) for name, itemsize, stored in rows]


def _substituted() -> list[DType]:
    parts = [DType("complex128", 16, "F64", (2,)), DType("complex32", 4, "F16", (2,))]
    bytes_of_one = ["float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"]
    bytes_of_one += [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
    return [*parts, *(DType(name, 1, "U8") for name in bytes_of_one), DType("bits16", 2, "U8", (2,))]


DTYPES: Final[Mapping[str, DType]] = MappingProxyType({row.name: row for row in (*_native(), *_substituted())})
"""Every element type that format version 1 can store, by name."""

_QUANTISED = "a quantised tensor carries a quantiser (scale, zero point) beside its integers"
REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "qint8": _QUANTISED,
        "qint32": _QUANTISED,
        "quint8": _QUANTISED,
        "quint4x2": _QUANTISED,
        "quint2x4": _QUANTISED,
    }
)
"""torch dtypes that are refused on purpose, with the reason."""

STORED_ITEMSIZE: Final[Mapping[str, int]] = MappingProxyType(
    {row.stored: row.itemsize for row in _native()},
)
"""Bytes of one element by the pack's dtype word."""


def dtype(name: str) -> DType:
    """Return the element type called ``name``. ``FormatError`` for one that this version lacks."""
    found = DTYPES.get(name)
    if found is None:
        raise FormatError(f"element type {name!r} is not part of format version 1; a newer ckptfmt may know it")
    return found


_ML_DTYPES: Final = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex32",
    "int1",
    "int2",
    "int4",
    "uint1",
    "uint2",
    "uint4",
)
_NO_NUMPY: Final = frozenset(
    {"float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2", "bits16"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (3, 5, 6, 7)}
)


@cache
def numpy_dtype(name: str) -> np.dtype[Any] | None:
    """Return the little-endian numpy dtype of element type ``name``, from ml_dtypes where numpy itself has none.

    None where neither knows it (packed and odd-width types). ``FormatError`` for an unknown name.
    """
    row = dtype(name)
    if name in _NO_NUMPY:
        return None
    import numpy as np

    if name in _ML_DTYPES:
        import ml_dtypes

        scalar = getattr(ml_dtypes, name, None)
        return None if scalar is None else np.dtype(scalar)
    found = np.dtype(name).newbyteorder("<")
    assert found.itemsize == row.itemsize
    return found


@lru_cache(maxsize=256)
def from_numpy(dtype: np.dtype[Any]) -> str | None:
    """Return the element type's name for a numpy dtype of either byte order.

    None for what cannot be stored: objects, strings, records, datetimes, extended floats.
    """
    name = dtype.name
    if name not in DTYPES or name in _NO_NUMPY:
        return None
    known = numpy_dtype(name)
    return name if known is not None and known == dtype.newbyteorder("<") else None
