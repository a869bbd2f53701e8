"""Every torch dtype of the installed torch is in the table or refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckptfmt.errors import FormatError
from ckptfmt.format import dtypes

TORCH = sorted({str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)})


@pytest.mark.parametrize("name", TORCH)
def test_every_torch_dtype_is_stored_or_refused(name: str) -> None:
    if name in dtypes.REFUSED:
        assert name not in dtypes.DTYPES
        assert dtypes.REFUSED[name]
    else:
        assert dtypes.dtype(name).itemsize == getattr(torch, name).itemsize


def test_stored_words_are_known_to_safetensors_readers() -> None:
    from safetensors.torch import _TYPES

    words = {row.stored for row in dtypes.DTYPES.values()}
    assert words <= set(_TYPES)
    assert words == set(dtypes.STORED_ITEMSIZE)


@pytest.mark.parametrize("row", dtypes.DTYPES.values(), ids=lambda row: row.name)
def test_stored_form_has_the_same_size(row: dtypes.DType) -> None:
    extra = int(np.prod(row.stored_suffix, dtype=int))
    assert extra * dtypes.STORED_ITEMSIZE[row.stored] == row.itemsize


@pytest.mark.parametrize("name", dtypes.DTYPES)
def test_numpy_round_trip(name: str) -> None:
    found = dtypes.numpy_dtype(name)
    if found is not None:
        assert found.itemsize == dtypes.dtype(name).itemsize
        assert dtypes.from_numpy(found) == name


def test_numpy_has_what_people_use() -> None:
    lacking = {name for name in dtypes.DTYPES if dtypes.numpy_dtype(name) is None}
    assert lacking.isdisjoint(
        {"float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex128", "bool", "int4", "uint64"}
    )


@pytest.mark.parametrize("word", ["O", "U3", "S3", "V4", "M8[ns]", "m8[s]", "i4,f4"])
def test_numpy_types_without_a_place(word: str) -> None:
    assert dtypes.from_numpy(np.dtype(word)) is None


def test_extended_floats_have_no_place() -> None:
    if np.dtype(np.longdouble).itemsize > 8:
        assert dtypes.from_numpy(np.dtype(np.longdouble)) is None


def test_byte_order_is_a_matter_of_memory() -> None:
    assert dtypes.from_numpy(np.dtype(">f4")) == "float32" == dtypes.from_numpy(np.dtype("<f4"))


def test_ml_dtypes_that_torch_lacks_are_unsupported() -> None:
    import ml_dtypes

    assert dtypes.from_numpy(np.dtype(ml_dtypes.float8_e4m3b11fnuz)) is None
    assert dtypes.from_numpy(np.dtype(ml_dtypes.float4_e2m1fn)) is None


def test_unknown_name() -> None:
    with pytest.raises(FormatError, match="float7"):
        dtypes.dtype("float7")
