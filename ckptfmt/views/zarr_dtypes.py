"""Element types of training that zarr-python lacks, by their registered names: bfloat16 and the kinds of float8.

zarr-python 3.1 declares an entry point for element types and never loads it, so ``register`` is called where a
generation is opened as Zarr; from 3.4 on the entry point of this package serves other stores, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Self, overload

import ml_dtypes
import numpy as np
from zarr.core.common import JSON, ZarrFormat
from zarr.core.dtype.common import DataTypeValidationError, DTypeConfig_V2, DTypeJSON, HasEndianness, HasItemSize
from zarr.core.dtype.npy.common import check_json_float_v3, float_from_json_v3, float_to_json_v3
from zarr.dtype import ZDType, data_type_registry


@dataclass(frozen=True, kw_only=True)
class _MlFloat(ZDType[Any, Any], HasItemSize):
    """A floating-point type of ml_dtypes. Fill values are JSON numbers, ``"NaN"``, ``"Infinity"``, ``"-Infinity"``, or
    the bits of an element in hex."""

    _scalar: ClassVar[type]

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if cls._check_native_dtype(dtype):
            return cls()
        raise DataTypeValidationError(f"Invalid data type: {dtype}. Expected an instance of {cls.dtype_cls}")

    def to_native_dtype(self) -> Any:
        if getattr(self, "endianness", "little") == "big":
            raise DataTypeValidationError(f"{self._zarr_v3_name} is read in little-endian order only")
        return np.dtype(self._scalar)

    @classmethod
    def _from_json_v2(cls, data: DTypeJSON) -> Self:
        raise DataTypeValidationError(f"{cls._zarr_v3_name} is no data type of Zarr v2")

    @classmethod
    def _from_json_v3(cls, data: DTypeJSON) -> Self:
        if data == cls._zarr_v3_name:
            return cls()
        raise DataTypeValidationError(f"Invalid JSON of {cls.__name__}: {data!r}, expected {cls._zarr_v3_name!r}")

    @overload
    def to_json(self, zarr_format: Literal[2]) -> DTypeConfig_V2[str, None]: ...
    @overload
    def to_json(self, zarr_format: Literal[3]) -> str: ...
    def to_json(self, zarr_format: ZarrFormat) -> DTypeConfig_V2[str, None] | str:
        if zarr_format == 3:
            return self._zarr_v3_name
        raise ValueError(f"{self._zarr_v3_name} is no data type of Zarr v2: write zarr_format=3")

    @property
    def item_size(self) -> int:
        return np.dtype(self._scalar).itemsize

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (float, int, np.floating, np.integer, self._scalar))

    def cast_scalar(self, data: object) -> Any:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} of type {type(data).__name__} is no scalar of {self._zarr_v3_name}")
        return self._scalar(data)

    def default_scalar(self) -> Any:
        return self._scalar(0)

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> Any:
        if isinstance(data, str) and data.startswith("0x"):
            raw = bytes.fromhex(data[2:])
            if len(raw) != self.item_size:
                raise TypeError(f"{data!r} has {len(raw)} bytes; {self._zarr_v3_name} has {self.item_size}")
            return np.frombuffer(raw[::-1], np.dtype(self._scalar))[0]
        if check_json_float_v3(data):
            return self._scalar(float_from_json_v3(data))
        raise TypeError(f"{data!r} is no fill value of {self._zarr_v3_name}")

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> JSON:
        scalar = self.cast_scalar(data)
        plain: JSON = float_to_json_v3(np.float64(scalar))
        if plain != "NaN":
            return plain
        raw = np.asarray(scalar, np.dtype(self._scalar)).tobytes()  # which of the NaNs
        return f"0x{raw[::-1].hex()}"


@dataclass(frozen=True, kw_only=True)
class BFloat16(_MlFloat, HasEndianness):
    dtype_cls = type(np.dtype(ml_dtypes.bfloat16))
    _scalar = ml_dtypes.bfloat16
    _zarr_v3_name = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(_MlFloat):
    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fn))
    _scalar = ml_dtypes.float8_e4m3fn
    _zarr_v3_name = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FNUZ(_MlFloat):
    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fnuz))
    _scalar = ml_dtypes.float8_e4m3fnuz
    _zarr_v3_name = "float8_e4m3fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(_MlFloat):
    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2))
    _scalar = ml_dtypes.float8_e5m2
    _zarr_v3_name = "float8_e5m2"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2FNUZ(_MlFloat):
    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2fnuz))
    _scalar = ml_dtypes.float8_e5m2fnuz
    _zarr_v3_name = "float8_e5m2fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E8M0FNU(_MlFloat):
    dtype_cls = type(np.dtype(ml_dtypes.float8_e8m0fnu))
    _scalar = ml_dtypes.float8_e8m0fnu
    _zarr_v3_name = "float8_e8m0fnu"

    def default_scalar(self) -> Any:
        return self._scalar(1)  # it has no zero


DTYPES: Final = (BFloat16, Float8E4M3FN, Float8E4M3FNUZ, Float8E5M2, Float8E5M2FNUZ, Float8E8M0FNU)


def register() -> None:
    """Teach zarr-python the types that it does not know yet. Again: nothing happens."""
    for kind in DTYPES:
        if kind._zarr_v3_name not in data_type_registry.contents:
            data_type_registry.register(kind._zarr_v3_name, kind)
