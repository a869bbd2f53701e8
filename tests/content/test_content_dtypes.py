"""Every element type in every layout: the same bytes come out, or the value is refused by path."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from content_fixtures import exact, patterned, tensor_bytes

import ckptfmt

SPEC = Path(__file__).resolve().parents[2] / "spec" / "format-v1.md"
TORCH_DTYPES = sorted({found for found in vars(torch).values() if isinstance(found, torch.dtype)}, key=str)


def spec_rows(section: str) -> dict[str, list[str]]:
    body = SPEC.read_text().split(f"<!-- {section} -->")[1].split("<!-- end -->")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in body.splitlines() if "`" in line]
    return {row[0]: row[1:] for row in rows}


STORED, REFUSED = spec_rows("dtypes"), spec_rows("refused")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def elements(dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(patterned(count * dtype.itemsize)), dtype=dtype)


def blank(like: torch.Tensor) -> torch.Tensor:
    """Other bytes in the same layout; dense where elements of ``like`` share memory."""
    if any(stride == 0 for stride in like.stride()):
        return elements(like.dtype, like.numel()).view(like.shape)
    storage = torch.full((like.untyped_storage().nbytes(),), 0xA5, dtype=torch.uint8).view(like.dtype)
    return storage.as_strided(like.shape, like.stride(), like.storage_offset())


LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "vector": lambda d: elements(d, 3),
    "scalar": lambda d: elements(d, 1).view(()),
    "empty": lambda d: elements(d, 2)[:0],
    "empty-inside": lambda d: elements(d, 2)[:0].view(3, 0, 2),
    "strided": lambda d: elements(d, 16)[3::2],
    "transposed": lambda d: elements(d, 12).view(3, 4).t(),
    "expanded": lambda d: elements(d, 3).view(3, 1).expand(3, 5),
    "permuted-5d": lambda d: elements(d, 48).view(1, 2, 2, 3, 4).permute(4, 1, 0, 3, 2),
    "channels-last": lambda d: elements(d, 24).view(1, 2, 4, 3).permute(0, 3, 1, 2),
}


def test_every_torch_dtype_stands_in_the_spec() -> None:
    """FR-059: the running torch is enumerated, never a list that somebody copied."""
    assert {name_of(dtype) for dtype in TORCH_DTYPES} <= STORED.keys() | REFUSED.keys()
    assert not STORED.keys() & REFUSED.keys()
    assert all(len(reason[0]) > 20 for reason in REFUSED.values())


def test_every_stored_torch_dtype_in_every_layout_comes_back_to_the_bit(tmp_path: Path) -> None:
    """FR-057, FR-059, FR-066: one save holds them all; NaN payloads and -0.0 are bytes like any other."""
    state: dict[str, Any] = {
        f"{name_of(dtype)}/{layout}": make(dtype)
        for dtype in TORCH_DTYPES
        if name_of(dtype) in STORED
        for layout, make in LAYOUTS.items()
    }
    ckptfmt.save(state, tmp_path)
    loaded = ckptfmt.load(tmp_path)
    assert exact(loaded) == exact(state)
    image = loaded["float32/channels-last"]
    assert image.is_contiguous(memory_format=torch.channels_last)
    targets = {key: blank(value) for key, value in state.items()}
    report = ckptfmt.restore(targets, tmp_path)
    assert report.loaded == tuple(state)
    assert {key: tensor_bytes(value) for key, value in targets.items()} == {
        key: tensor_bytes(value) for key, value in state.items()
    }


def quantised(dtype: torch.dtype) -> torch.Tensor:
    if dtype in (torch.quint4x2, torch.quint2x4):
        return torch._empty_affine_quantized((3,), scale=1.0, zero_point=0, dtype=dtype)
    return torch.quantize_per_tensor(torch.tensor([1.0, 2.0, 3.0]), 0.1, 0, dtype)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [d for d in TORCH_DTYPES if name_of(d) in REFUSED], ids=str)
def test_refused_torch_dtypes_are_named_with_the_reason(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(ckptfmt.UnsupportedValue) as caught:
        ckptfmt.save({"a": {"w": quantised(dtype)}}, tmp_path)
    assert "a.w" in str(caught.value)
    assert name_of(dtype) in str(caught.value)
    assert REFUSED[name_of(dtype)][0] in str(caught.value)
    with ckptfmt.open(tmp_path, mode="r") as repository:
        assert repository.generations(state=None) == [], "refused before anything was begun"


@pytest.mark.parametrize("wrap", ["Parameter", "Buffer", "frozen-parameter", "requires-grad", "non-persistent"])
def test_parameters_and_buffers_keep_what_they_are(tmp_path: Path, wrap: str) -> None:
    plain = elements(torch.float32, 6).view(2, 3)
    made: dict[str, Callable[[], torch.Tensor]] = {
        "Parameter": lambda: torch.nn.Parameter(plain),
        "frozen-parameter": lambda: torch.nn.Parameter(plain, requires_grad=False),
        "Buffer": lambda: torch.nn.Buffer(plain),
        "non-persistent": lambda: torch.nn.Buffer(plain, persistent=False),
        "requires-grad": lambda: plain.clone().requires_grad_(),
    }
    value = made[wrap]()
    ckptfmt.save({"w": value}, tmp_path)
    loaded = ckptfmt.load(tmp_path)["w"]
    assert exact(loaded) == exact(value)
    assert isinstance(loaded, torch.nn.Parameter) == isinstance(value, torch.nn.Parameter)
    assert isinstance(loaded, torch.nn.Buffer) == isinstance(value, torch.nn.Buffer)
    assert getattr(loaded, "persistent", None) == getattr(value, "persistent", None)


# -- numpy --------------------------------------------------------------------------------------------
PLAIN = [*"?bhilqBHILQefdFD", "intc", "longlong"]
EXTRA = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
EXTRA += ["int4", "uint4", "int2", "uint2"]
NUMPY_DTYPES = [
    *(np.dtype(word).newbyteorder(order) for word in PLAIN for order in "<>"),
    *(np.dtype(getattr(ml_dtypes, name)) for name in EXTRA),
]


def array(dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(patterned(count * dtype.itemsize)), dtype=dtype)


def read_only(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    value.flags.writeable = False
    return value


NUMPY_LAYOUTS: dict[str, Callable[[np.dtype[Any]], np.ndarray[Any, Any]]] = {
    "vector": lambda d: array(d, 3),
    "scalar": lambda d: array(d, 1).reshape(()),
    "empty": lambda d: array(d, 2)[:0],
    "empty-inside": lambda d: array(d, 2)[:0].reshape(3, 0, 2),
    "fortran": lambda d: np.asfortranarray(array(d, 12).reshape(3, 4)),
    "backwards": lambda d: array(d, 12)[::-2],
    "both-backwards": lambda d: array(d, 12).reshape(3, 4)[::-1, ::-1],
    "broadcast": lambda d: np.broadcast_to(array(d, 3), (4, 3)),
    "read-only": lambda d: read_only(array(d, 5)),
    "unaligned": lambda d: np.frombuffer(b"\0" + patterned(4 * d.itemsize), dtype=d, offset=1),
}


def test_every_numpy_dtype_in_every_layout_comes_back_to_the_bit(tmp_path: Path) -> None:
    """Values come back in native byte order, C order and writable; big-endian ones with the same values."""
    state = {
        f"{dtype.str}{dtype.name}/{layout}": make(dtype)
        for dtype in NUMPY_DTYPES
        for layout, make in NUMPY_LAYOUTS.items()
    }
    ckptfmt.save(state, tmp_path)
    loaded = ckptfmt.load(tmp_path)
    assert list(loaded) == list(state)
    for name, value in state.items():
        found = loaded[name]
        assert type(found) is np.ndarray, name
        assert found.dtype == value.dtype.newbyteorder("="), name
        assert found.shape == value.shape, name
        native = value.astype(value.dtype.newbyteorder("=")) if value.dtype.byteorder == ">" else value
        assert found.tobytes() == native.tobytes(), name
        assert found.flags.c_contiguous, name
        assert found.flags.writeable, name


def test_big_endian_arrays_are_filled_in_their_own_order(tmp_path: Path) -> None:
    saved = np.arange(7, dtype="<i4")
    ckptfmt.save({"a": saved}, tmp_path)
    target = np.zeros(7, ">i4")
    ckptfmt.restore({"a": target}, tmp_path)
    assert target.dtype.str == ">i4"
    assert target.tolist() == saved.tolist()


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()], dtype=object),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.array([1], dtype="timedelta64[s]"),
        np.zeros(2, dtype=[("x", "<f4"), ("y", "<i4")]),
        np.zeros(2, dtype="V7"),
        np.zeros(2, dtype=np.longdouble),
        np.zeros(2, dtype=np.clongdouble),
        np.zeros(2, dtype=ml_dtypes.float8_e3m4),
        np.ma.masked_array([1.0], [True]),
        np.zeros(2).view(np.recarray),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.dtype}",
)
def test_numpy_values_without_a_place_in_the_format_are_refused_by_path(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ckptfmt.UnsupportedValue, match=r"stats\.a"):
        ckptfmt.save({"stats": {"a": value}}, tmp_path)


# -- large --------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_than_two_to_the_31_elements(tmp_path: Path) -> None:
    """FR-065: counts and offsets beyond 31 and 32 bits. In a process of its own, which gives the memory back."""
    code = """
import sys, numpy as np, ckptfmt
count = 2**31 + 1
big = np.zeros(count, np.uint8)  # mapped lazily: only what is written takes memory
big[0], big[2**31 - 1], big[2**31] = 4, 5, 7
g = ckptfmt.save({"big": big, "after": np.arange(3)}, sys.argv[1])
del big
tail = g["big"][count - 4 :]
assert tail.tolist() == [0, 0, 5, 7]
loaded = ckptfmt.load(sys.argv[1])
assert loaded["big"].shape == (count,) and int(loaded["big"].sum(dtype=np.int64)) == 16
assert loaded["big"][-1] == 7 and loaded["big"][0] == 4
assert loaded["after"].tolist() == [0, 1, 2]
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path / "repo")], check=True)
