"""Scalars of a state tree that JSON has no exact form for, as ``{tag: payload}``.

``ENCODERS`` maps an exact Python type to a function from value to node, ``DECODERS`` a tag to a
function from payload to value. Decoders may raise the usual ``ValueError``, ``TypeError``,
``LookupError`` and ``ArithmeticError`` for a malformed payload; the tree codec makes them FormatErrors.
"""

from __future__ import annotations

import base64
import datetime as dt
import math
import pathlib
import re
import struct
import sys
import uuid
import zoneinfo
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from ckptfmt.format import dtypes

if TYPE_CHECKING:
    import numpy as np

Node = Any
"""A JSON value: None, bool, str, int, float, a list of nodes, or a dict of exactly one member."""

INT_MAX: Final = 2**53
"""JSON numbers beyond this magnitude aren't exact in every reader; larger integers get a tag."""
FRACTION_BITS_MAX: Final = 1 << 16
"""Of numerator and denominator. Reducing a fraction takes time that grows with the square of their lengths."""
_NAN = 0x7FF8000000000000
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufcSUMmVO][0-9]*(\[[0-9a-zA-Z]{1,8}\])?", re.ASCII)


def from_int(value: int) -> Node:
    if -INT_MAX <= value <= INT_MAX:
        return value
    # Hexadecimal: linear in the length, and free of Python's limit on decimal digits.
    return {"int": hex(value)}


def from_float(value: float) -> Node:
    if math.isfinite(value):
        return value
    if value == math.inf:
        return {"float": "inf"}
    if value == -math.inf:
        return {"float": "-inf"}
    (bits,) = struct.unpack("<Q", struct.pack("<d", value))
    return {"float": "nan" if bits == _NAN else f"nan:{bits:016x}"}


def from_str(value: str) -> Node:
    if value.isascii():
        return value
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return {"str": _base64(value.encode("utf-8", "surrogatepass"))}
    return value


def inline_bytes(value: bytes | bytearray) -> Node:
    return {type(value).__name__: _base64(value)}


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


def _from_path(value: pathlib.PurePath) -> Node:
    return {"path": [type(value).__name__, from_str(str(value))]}


def _from_timezone(value: dt.timezone) -> Node:
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
    return {"timezone": [offset // dt.timedelta(microseconds=1), from_str(name[0]) if name else None]}


def zone(value: dt.tzinfo | None) -> Node:
    """Return the node of a time zone; ``TypeError`` for one of an unknown class."""
    if value is None:
        return None
    if type(value) is dt.timezone:
        return _from_timezone(value)
    if type(value) is zoneinfo.ZoneInfo and value.key:
        return {"zoneinfo": value.key}
    raise TypeError(f"time zone of type {type(value).__name__}")


def _from_datetime(value: dt.datetime) -> Node:
    return {"datetime": [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, zone(value.tzinfo)]}


def _from_time(value: dt.time) -> Node:
    return {"time": [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, zone(value.tzinfo)]}


PATHS: Final[Mapping[str, type[pathlib.PurePath]]] = {
    cls.__name__: cls
    for cls in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}


def _is_long(numerator: int, denominator: int) -> bool:
    return max(numerator.bit_length(), denominator.bit_length()) > FRACTION_BITS_MAX


def _from_fraction(value: Fraction) -> Node:
    if _is_long(value.numerator, value.denominator):
        raise TypeError(
            f"a fraction of more than {FRACTION_BITS_MAX} bits; store numerator and denominator by themselves"
        )
    return {"fraction": [from_int(value.numerator), from_int(value.denominator)]}


ENCODERS: Final[dict[type, Callable[[Any], Node]]] = {
    type(None): lambda value: None,
    bool: lambda value: value,
    int: from_int,
    float: from_float,
    str: from_str,
    complex: lambda value: {"complex": [from_float(value.real), from_float(value.imag)]},
    range: lambda value: {"range": [from_int(value.start), from_int(value.stop), from_int(value.step)]},
    dt.datetime: _from_datetime,
    dt.date: lambda value: {"date": value.isoformat()},
    dt.time: _from_time,
    dt.timedelta: lambda value: {"timedelta": [value.days, value.seconds, value.microseconds]},
    dt.timezone: _from_timezone,
    zoneinfo.ZoneInfo: zone,
    uuid.UUID: lambda value: {"uuid": str(value)},
    Decimal: lambda value: {"decimal": str(value)},
    Fraction: _from_fraction,
    **dict.fromkeys(PATHS.values(), _from_path),
}


def from_numpy(value: Any) -> Node | None:
    """Return the node of a numpy scalar or dtype, or None if ``value`` is neither, or one that cannot be stored."""
    np = sys.modules.get("numpy")
    if np is None:
        return None
    if isinstance(value, np.generic):
        name = dtypes.from_numpy(value.dtype)
        if name is None:
            return None
        raw = np.asarray(value, dtype=dtypes.numpy_dtype(name)).tobytes()
        return {"numpy.scalar": [name, raw.hex()]}
    if isinstance(value, np.dtype):
        text = value.name if value.kind == "V" and value.names is None and value.name in dtypes.DTYPES else value.str
        exact = value.metadata is None and _to_numpy_dtype_or_none(text) == value
        return {"numpy.dtype": text} if exact else None
    return None


def _to_numpy_dtype_or_none(text: str) -> np.dtype[Any] | None:
    try:
        return _to_numpy_dtype(text)
    except (ValueError, TypeError):
        return None


def _to_numpy_dtype(text: str) -> np.dtype[Any]:
    if text in dtypes.DTYPES:
        known = dtypes.numpy_dtype(text)
        if known is None:
            raise ValueError(f"numpy has no {text}")
        return known
    if not _NUMPY_DTYPE.fullmatch(text):
        raise ValueError("not a plain numpy dtype")
    import numpy as np

    return np.dtype(text)


def _to_numpy_scalar(payload: Any) -> Any:
    name, digits = payload
    raw = bytes.fromhex(digits)
    known = dtypes.numpy_dtype(name)
    if known is None or len(raw) != known.itemsize:
        raise ValueError("wrong length, or a type that numpy lacks")
    import numpy as np

    return np.frombuffer(raw, dtype=known)[0]


def to_int(node: Node) -> int:
    if isinstance(node, dict):
        return _to_big_int(node["int"])
    if type(node) is not int:
        raise TypeError("not an integer")
    return node


def _to_big_int(text: str) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", text, re.ASCII):
        raise ValueError("not hexadecimal")
    return int(text, 16)


def _to_float(text: str) -> float:
    if text in ("nan", "inf", "-inf"):
        return float(text)
    if not re.fullmatch(r"nan:[0-9a-f]{16}", text, re.ASCII):
        raise ValueError("not a special float")
    value: float = struct.unpack("<d", struct.pack("<Q", int(text[4:], 16)))[0]
    if not math.isnan(value):
        raise ValueError("the bits are no NaN")
    return value


def to_float(node: Node) -> float:
    if isinstance(node, dict):
        return _to_float(node["float"])
    if type(node) not in (float, int):
        raise TypeError("not a number")
    return float(node)


def to_bytes(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii"), validate=True)


def to_str(node: Node) -> str:
    if isinstance(node, dict):
        return to_bytes(node["str"]).decode("utf-8", "surrogatepass")
    if type(node) is not str:
        raise TypeError("not a string")
    return node


def _to_path(payload: Any) -> pathlib.PurePath:
    name, text = payload
    cls = PATHS[name]
    # A concrete path of another system can only live on as a pure one.
    if cls is pathlib.WindowsPath and sys.platform != "win32":
        cls = pathlib.PureWindowsPath
    if cls is pathlib.PosixPath and sys.platform == "win32":
        cls = pathlib.PurePosixPath
    return cls(to_str(text))


def _to_timezone(payload: Any) -> dt.timezone:
    microseconds, name = payload
    offset = dt.timedelta(microseconds=to_int(microseconds))
    return dt.timezone(offset) if name is None else dt.timezone(offset, to_str(name))


def _to_zone(node: Node) -> dt.tzinfo | None:
    if node is None:
        return None
    ((tag, payload),) = node.items()
    return _to_timezone(payload) if tag == "timezone" else _to_zoneinfo(payload) if tag == "zoneinfo" else _no_zone(tag)


def _no_zone(tag: str) -> dt.tzinfo:
    raise ValueError(f"{tag!r} is no time zone")


def _to_zoneinfo(key: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(key)
    except OSError as error:  # a folder of the time zone database, or a name longer than names of files
        raise ValueError(f"no time zone: {error.strerror}") from error


def _to_datetime(payload: Any) -> dt.datetime:
    text, fold, tz = payload
    return dt.datetime.fromisoformat(text).replace(fold=to_int(fold), tzinfo=_to_zone(tz))


def _to_time(payload: Any) -> dt.time:
    text, fold, tz = payload
    return dt.time.fromisoformat(text).replace(fold=to_int(fold), tzinfo=_to_zone(tz))


def _to_timedelta(payload: Any) -> dt.timedelta:
    days, seconds, microseconds = map(to_int, payload)
    return dt.timedelta(days, seconds, microseconds)


def _to_fraction(payload: Any) -> Fraction:
    numerator, denominator = map(to_int, payload)
    if _is_long(numerator, denominator):
        raise ValueError(f"more than {FRACTION_BITS_MAX} bits")
    return Fraction(numerator, denominator)


def _to_complex(payload: Any) -> complex:
    real, imag = map(to_float, payload)
    return complex(real, imag)


def _to_range(payload: Any) -> range:
    start, stop, step = map(to_int, payload)
    return range(start, stop, step)


def _text(payload: Any) -> str:
    if type(payload) is not str:
        raise TypeError("not a string")
    return payload


DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "int": _to_big_int,
    "float": _to_float,
    "complex": _to_complex,
    "str": lambda payload: to_str({"str": payload}),
    "bytes": to_bytes,
    "bytearray": lambda payload: bytearray(to_bytes(payload)),
    "range": _to_range,
    "path": _to_path,
    "datetime": _to_datetime,
    "date": lambda payload: dt.date.fromisoformat(_text(payload)),
    "time": _to_time,
    "timedelta": _to_timedelta,
    "timezone": _to_timezone,
    "zoneinfo": _to_zoneinfo,
    "uuid": lambda payload: uuid.UUID(_text(payload)),
    "decimal": lambda payload: Decimal(_text(payload)),
    "fraction": _to_fraction,
    "numpy.scalar": _to_numpy_scalar,
    "numpy.dtype": lambda payload: _to_numpy_dtype(_text(payload)),
}
