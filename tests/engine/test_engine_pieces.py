"""A piece of a value is the same bytes as the piece of its copy, however the value lies in memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.engine.numpy_family import BlobFamily, NumpyFamily

torch = pytest.importorskip("torch")

from ckptfmt.torch.family import TorchFamily  # noqa: E402
from ckptfmt.torch.pieces import piece_of  # noqa: E402

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(lambda shape: math.prod(shape) > 0)


def captured(family: Any, value: Any, nbytes: int) -> bytes:
    host = bytearray(nbytes)
    family.capture([(value, memoryview(host))]).wait()
    return bytes(host)


def check(family: Any, value: Any, data: Any) -> None:
    nbytes = value.nbytes
    width = nbytes // math.prod(value.shape)
    whole = captured(family, value, nbytes)
    count = nbytes // width
    first, last = sorted((data.draw(st.integers(0, count)), data.draw(st.integers(0, count))))
    if first < last:
        piece = family.piece(value, first * width, last * width)
        assert piece.nbytes == (last - first) * width
        assert captured(family, piece, piece.nbytes) == whole[first * width : last * width]


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.data(), st.sampled_from(["<f4", ">i8", "c16", "u1", "bool"]))
def test_of_numpy(shape: list[int], data: Any, dtype: str) -> None:
    value = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    value = value.transpose(data.draw(st.permutations(range(len(shape)))))
    value = value[tuple(slice(None, None, data.draw(st.sampled_from([1, 2, -1]))) for _ in shape)]
    check(NumpyFamily(), value, data)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.data(), st.sampled_from(["bfloat16", "float64", "complex64", "complex128", "bool", "float8_e5m2"]))
def test_of_torch(shape: list[int], data: Any, dtype: str) -> None:
    value = torch.arange(math.prod(shape)).to(getattr(torch, dtype)).reshape(shape)
    value = value.permute(data.draw(st.permutations(range(len(shape)))))
    value = value[tuple(slice(None, None, data.draw(st.sampled_from([1, 2]))) for _ in shape)]
    if value.is_complex() and data.draw(st.booleans()):
        value = value.conj()
    check(TorchFamily(), value.requires_grad_() if value.is_floating_point() else value, data)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_of_half_precision_complex_numbers_that_are_conjugated() -> None:
    value = torch.view_as_complex(torch.arange(24, dtype=torch.float16).reshape(4, 3, 2)).t().conj()
    whole = captured(TorchFamily(), value, 48)
    assert captured(TorchFamily(), piece_of(value, 8, 40), 32) == whole[8:40]


def test_of_a_dense_tensor_is_a_view_and_of_a_strided_one_no_larger_than_the_piece() -> None:
    dense = torch.arange(1000.0)
    assert piece_of(dense, 400, 800).data_ptr() == dense.data_ptr() + 400
    strided = torch.arange(1000.0).reshape(2, 500).t()
    piece = piece_of(strided, 400, 800)
    assert piece.untyped_storage().nbytes() == 400
    array = np.arange(1000.0).reshape(2, 500).T
    assert NumpyFamily().piece(array, 400, 800).base is None


def test_of_a_byte_string() -> None:
    for blob in (b"0123456789", bytearray(b"0123456789")):
        assert captured(BlobFamily(), BlobFamily().piece(blob, 3, 7), 4) == b"3456"
