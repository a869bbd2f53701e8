"""Tensors: described, captured, filled and rebuilt bit by bit."""

from __future__ import annotations

import struct
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptfmt.errors import InvalidInput, UnsupportedValue
from ckptfmt.format import dtypes
from ckptfmt.torch.family import TorchFamily

ALL_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
STORED = [d for d in ALL_DTYPES if str(d).removeprefix("torch.") in dtypes.DTYPES]
REFUSED = [d for d in ALL_DTYPES if d not in STORED]


def patterned(dtype: torch.dtype, count: int) -> torch.Tensor:
    """``count`` elements of every bit pattern that fits, NaN payloads and impossible bools included."""
    data = bytearray((37 * i + 255) % 256 for i in range(count * dtype.itemsize))
    return torch.frombuffer(data, dtype=dtype)


SHAPES: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "vector": lambda d: patterned(d, 3),
    "scalar": lambda d: patterned(d, 1).view(()),
    "empty": lambda d: patterned(d, 2)[:0],
    "empty-inside": lambda d: patterned(d, 2)[:0].view(3, 0, 2),
    "strided": lambda d: patterned(d, 16)[::2],
    "offset": lambda d: patterned(d, 16)[3:9],
    "transposed": lambda d: patterned(d, 12).view(3, 4).t(),
    "permuted-5d": lambda d: patterned(d, 48).view(1, 2, 2, 3, 4).permute(4, 1, 0, 3, 2),
    "expanded": lambda d: patterned(d, 3).view(3, 1).expand(3, 5),
    "overlapping": lambda d: patterned(d, 8).as_strided((3, 4), (1, 1)),
    "channels-last": lambda d: patterned(d, 24).view(1, 2, 4, 3).permute(0, 3, 1, 2),
    "channels-last-3d": lambda d: patterned(d, 48).view(1, 2, 2, 4, 3).permute(0, 4, 1, 2, 3),
}


def capture(family: TorchFamily, value: torch.Tensor) -> bytearray:
    host = bytearray(b"\xa5" * value.nbytes)
    family.capture([(value, memoryview(host))]).wait()
    return host


def test_every_torch_dtype_is_stored_or_refused_by_name() -> None:
    assert {str(d).removeprefix("torch.") for d in REFUSED} == set(dtypes.REFUSED)
    for d in STORED:
        assert dtypes.DTYPES[str(d).removeprefix("torch.")].itemsize == d.itemsize


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_bytes_round_trip(
    family: TorchFamily, bytes_of: Callable[[torch.Tensor], bytes], dtype: torch.dtype, shape: str
) -> None:
    value = SHAPES[shape](dtype)
    spec = family.describe(value, "x")
    assert (spec.dtype, spec.size, spec.nbytes) == (str(dtype).removeprefix("torch."), tuple(value.shape), value.nbytes)
    host = capture(family, value)
    assert bytes(host) == bytes_of(value)
    built = family.build(spec, memoryview(host), family.describe(value, "x").flags, None)
    assert built.dtype is dtype
    assert built.shape == value.shape
    assert type(built) is torch.Tensor
    assert bytes_of(built) == bytes(host)
    if "channels_last" in str(family.describe(value, "x").flags):
        assert built.stride() == value.stride()
    else:
        assert built.is_contiguous()
    assert bytes_of(family.build(spec, memoryview(host), (), "cpu")) == bytes(host)


@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in ("expanded", "overlapping")])
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_fill_reaches_every_live_element_and_no_other(
    family: TorchFamily, bytes_of: Callable[[torch.Tensor], bytes], dtype: torch.dtype, shape: str
) -> None:
    value = SHAPES[shape](dtype)
    storage = bytes(value.untyped_storage())
    assert family.check_fillable(value, "x") is None
    wanted = bytearray((91 * i + 7) % 256 for i in range(value.nbytes))
    version = value._version
    family.fill([(value, memoryview(wanted))]).wait()
    assert bytes_of(value) == bytes(wanted)
    if value.nbytes:
        assert value._version > version  # autograd must notice
    family.fill([(value, memoryview(capture(family, value)))]).wait()
    touched = sum(a != b for a, b in zip(storage, bytes(value.untyped_storage()), strict=True))
    assert touched <= value.nbytes


@pytest.mark.parametrize("name", ["conj", "neg", "conj-strided", "conj-double"])
def test_lazy_conjugates_are_resolved(family: TorchFamily, bytes_of: Any, name: str) -> None:
    base = torch.randn(6, dtype=torch.complex128 if name == "conj-double" else torch.complex64)
    value = {"conj": base.conj(), "neg": base.conj().imag, "conj-strided": base[::2].conj()}.get(name, base.conj())
    spec = family.describe(value, "x")
    assert spec.alias is None
    assert family.host_address(value) is None
    host = capture(family, value)
    assert torch.equal(family.build(spec, memoryview(host), (), None), value)
    target = torch.zeros_like(base).conj() if name != "neg" else torch.zeros_like(base).conj().imag
    target = target if target.shape == value.shape else target[::2]
    family.fill([(target, memoryview(host))]).wait()
    assert torch.equal(target, value)


def test_nan_payloads_and_negative_zero_survive(family: TorchFamily) -> None:
    words = [0x7F800001, 0xFFC12345, 0x80000000, 0x7F800000]
    value = torch.frombuffer(bytearray(struct.pack("<4I", *words)), dtype=torch.float32)
    for one in (value, torch.stack([value, value], 1)[:, 0]):
        assert struct.unpack("<4I", capture(family, one)) == tuple(words)


@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_quantised_dtypes_are_refused_by_name(family: TorchFamily, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates these dtypes
        value = torch.empty(4, dtype=dtype)
    with pytest.raises(UnsupportedValue, match=rf"model\.w: .*{str(dtype).removeprefix('torch.')}"):
        family.describe(value, "model.w")


class _Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


class _Plain(torch.Tensor):
    pass


def _refused() -> dict[str, tuple[Any, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._subclasses.fake_tensor import FakeTensorMode

        eye = torch.eye(4)
        with FakeTensorMode():
            fake = torch.empty(3)
        freed = torch.randn(3)
        freed.untyped_storage().resize_(0)
        return {
            "coo": (eye.to_sparse(), "layout sparse_coo"),
            "csr": (eye.to_sparse_csr(), "layout sparse_csr"),
            "csc": (eye.to_sparse_csc(), "layout sparse_csc"),
            "bsr": (eye.to_sparse_bsr((2, 2)), "layout sparse_bsr"),
            "bsc": (eye.to_sparse_bsc((2, 2)), "layout sparse_bsc"),
            "mkldnn": (eye.to_mkldnn(), "layout _mkldnn"),
            "nested": (torch.nested.nested_tensor([eye[0], eye[1]]), "nested"),
            "jagged": (torch.nested.nested_tensor([eye[0], eye[1]], layout=torch.jagged), "nested"),
            "meta": (torch.empty(3, device="meta"), "meta device"),
            "meta-empty": (torch.empty(0, device="meta"), "meta device"),
            "fake": (fake, "fake"),
            "functional": (torch._to_functional_tensor(eye), "functional"),
            "freed": (freed, "without memory"),
            "wrapper": (_Wrapper(eye), "_Wrapper"),
            "subclass": (eye.as_subclass(_Plain), "_Plain"),
            "parameter-of-subclass": (torch.nn.Parameter(eye.as_subclass(_Plain)), "_Plain"),
            "lazy-parameter": (torch.nn.UninitializedParameter(), "first forward pass"),
            "lazy-buffer": (torch.nn.UninitializedBuffer(), "first forward pass"),
        }


@pytest.mark.parametrize("name", _refused())
def test_tensors_that_are_more_than_their_bytes_are_refused(family: TorchFamily, name: str) -> None:
    value, words = _refused()[name]
    assert family.owns(value)
    with pytest.raises(UnsupportedValue, match=words) as caught:
        family.describe(value, "opt.state.w")
    assert str(caught.value).startswith("opt.state.w: ")
    reason = family.check_fillable(value, "opt.state.w")
    assert reason is not None
    assert reason.startswith("opt.state.w: ")


def test_a_tensor_inside_a_transform_is_refused(family: TorchFamily) -> None:
    def look(row: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedValue, match="transform"):
            family.describe(row, "x")
        return row

    torch.vmap(look)(torch.randn(3, 2))


def test_aliases_are_equal_for_views_of_the_same_bytes_only(family: TorchFamily) -> None:
    def alias(tensor: torch.Tensor) -> Any:
        return family.describe(tensor, "x").alias

    w = torch.nn.Parameter(torch.randn(4, 4))
    assert alias(w) == alias(w.detach()) == alias(w.view(4, 4))
    others = [w[:2], w.t(), w.view(16), w.detach().view(torch.int32), w.detach().clone()]
    assert len({alias(w), *map(alias, others)}) == len(others) + 1
    assert alias(torch.empty(0)) is None


def test_flags_rebuild_the_same_kind_of_tensor(family: TorchFamily, archive: Any) -> None:
    state = {
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "frozen": torch.nn.Parameter(torch.randn(2), requires_grad=False),
        "buffer": torch.nn.Buffer(torch.randn(2)),
        "non_persistent": torch.nn.Buffer(torch.randn(2), persistent=False),
        "grad": torch.randn(2, requires_grad=True),
        "plain": torch.randn(2),
        "images": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "volumes": torch.nn.Parameter(torch.randn(1, 3, 2, 4, 4).to(memory_format=torch.channels_last_3d)),
        "both-formats": torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last),
    }
    for name, built in archive.round_trip(state).items():
        value = state[name]
        assert type(built) is type(value)
        assert torch.equal(built, value)
        assert built.requires_grad == value.requires_grad
        assert built.is_leaf
        assert isinstance(built, torch.nn.Buffer) == isinstance(value, torch.nn.Buffer)
        assert getattr(built, "persistent", None) == getattr(value, "persistent", None)
        for form in (torch.channels_last, torch.channels_last_3d):
            if value.dim() == (4 if form is torch.channels_last else 5):
                assert built.is_contiguous(memory_format=form) == value.is_contiguous(memory_format=form)


def test_built_tensors_live_on_the_host_memory_and_keep_it(family: TorchFamily) -> None:
    value = torch.arange(8, dtype=torch.int32)
    host = capture(family, value)
    built = family.build(family.describe(value, "x"), memoryview(host), (), None)
    host[0] = 99
    assert built[0] == 99
    copied = family.build(family.describe(value, "x"), memoryview(host), (), "cpu")
    host[0] = 98
    assert copied[0] == 99
    del host
    assert built.sum() == 98 + sum(range(1, 8))


def test_unaligned_or_read_only_memory_is_copied(family: TorchFamily) -> None:
    value = torch.randn(5, dtype=torch.float64)
    spec = family.describe(value, "x")
    host = capture(family, value)
    room = bytearray(len(host) + 1)
    room[1:] = host
    for memory in (memoryview(room)[1:], memoryview(bytes(host))):
        built = family.build(spec, memory, (), None)
        assert torch.equal(built, value)
        assert built.data_ptr() % 8 == 0
        built.fill_(0)
    assert room[1:] == host


def test_build_on_an_unknown_device_says_which(family: TorchFamily) -> None:
    spec = family.describe(torch.zeros(1), "x")
    for device in ("nonsense", "cuda:99"):
        with pytest.raises(InvalidInput, match=device):
            family.build(spec, memoryview(bytearray(4)), (), device)


def test_host_address_only_where_the_bytes_lie_ready(family: TorchFamily) -> None:
    t = torch.randn(2, 3, 4, 4)
    assert family.host_address(t) == t.data_ptr()
    assert family.host_address(t[1:]) == t[1:].data_ptr()
    for other in (t.t() if t.dim() == 2 else t.transpose(1, 2), t.to(memory_format=torch.channels_last), t[:, :1]):
        assert family.host_address(other) is None
    assert family.host_address(torch.empty(0)) is None


def test_fill_without_autograd_and_in_every_mode(family: TorchFamily) -> None:
    wanted = torch.randn(4)
    host = memoryview(capture(family, wanted))
    leaf = torch.nn.Parameter(torch.zeros(4))
    with torch.inference_mode():
        inference = torch.zeros(4)
        inference_strided = torch.zeros(8)[::2]
    strided_leaf = torch.zeros(4, 2, requires_grad=True)
    targets = [leaf, inference, inference_strided, strided_leaf.detach()[:, 1], (leaf * 2)]
    for target in targets:
        assert family.check_fillable(target, "x") is None
        family.fill([(target, host)]).wait()
        assert torch.equal(target, wanted)
    assert leaf.requires_grad
    assert leaf.grad_fn is None
    with torch.inference_mode():
        family.fill([(strided_leaf[:, 0], host)]).wait()
    assert torch.equal(strided_leaf[:, 0], wanted)


def test_a_fill_spoils_a_graph_that_saved_the_old_values(family: TorchFamily) -> None:
    w = torch.nn.Parameter(torch.ones(3))
    loss = (w * w).sum()
    family.fill([(w, memoryview(capture(family, torch.zeros(3))))]).wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("value", [torch.zeros(3, 1).expand(3, 5), torch.zeros(8).as_strided((3, 4), (1, 1))])
def test_overlapping_targets_are_refused(family: TorchFamily, value: torch.Tensor) -> None:
    reason = family.check_fillable(value, "model.w")
    assert reason is not None
    assert "model.w" in reason
    assert "share memory" in reason


def test_a_meta_target_names_to_empty(family: TorchFamily) -> None:
    reason = family.check_fillable(torch.empty(3, device="meta"), "model.w")
    assert reason is not None
    assert reason.startswith("model.w: ")
    assert "to_empty" in reason


def test_fill_cast_converts_like_torch(family: TorchFamily) -> None:
    saved = torch.randn(6) * 100
    host = memoryview(capture(family, saved))
    target = torch.nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
    family.fill_cast(target, "float32", host)
    assert torch.equal(target, saved.bfloat16())
    with pytest.raises(UnsupportedValue, match="int4"):
        family.fill_cast(torch.zeros(24), "int4", host)


def test_memory_of_another_size_is_never_copied(family: TorchFamily) -> None:
    value = torch.zeros(4)
    for call in (family.capture, family.fill):
        with pytest.raises(InvalidInput, match="15 bytes"):
            call([(value, memoryview(bytearray(15)))])
        with pytest.raises(InvalidInput, match="15 bytes"):
            call([(torch.zeros(8)[::2], memoryview(bytearray(15)))])
    with pytest.raises(InvalidInput, match="15 bytes"):
        family.build(family.describe(value, "x"), memoryview(bytearray(15)), (), None)


def test_a_default_device_changes_nothing(family: TorchFamily) -> None:
    value = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    spec, flags = family.describe(value, "x"), family.describe(value, "x").flags
    with torch.device("meta"):
        host = capture(family, value)
        built = family.build(spec, memoryview(host), flags, None)
        empty = family.build(family.describe(value[:0], "x"), memoryview(bytearray()), (), None)
    assert torch.equal(built, value)
    assert empty.device.type == "cpu"


def test_pinning_without_a_device_does_nothing(family: TorchFamily) -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    undo = family.pin(memoryview(bytearray(4096)))
    undo()
    undo()


def test_describing_is_cheap(family: TorchFamily) -> None:
    values = [torch.zeros(2, 2) for _ in range(5_000)]
    best = min(_timed(family, values) for _ in range(5))
    assert best < 0.1  # 20,000 in well under half a second even beside other work; alone it is a tenth of that


def _timed(family: TorchFamily, values: list[torch.Tensor]) -> float:
    start = time.perf_counter()
    for value in values:
        family.describe(value, "x")
    return time.perf_counter() - start


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(family: TorchFamily) -> None:
    count = (1 << 31) + 5
    value = torch.zeros(count, dtype=torch.int8)
    value[-3:] = torch.tensor([1, 2, 3], dtype=torch.int8)
    spec = family.describe(value, "x")
    assert spec.nbytes == count
    host = memoryview(bytearray(count))
    family.capture([(value, host)]).wait()
    assert bytes(host[-5:]) == b"\0\0\1\2\3"
    built = family.build(spec, host, (), None)
    value.zero_()
    family.fill([(value.view(-1, 1)[:, 0], host)]).wait()
    assert value[-3:].tolist() == built[-3:].tolist() == [1, 2, 3]
