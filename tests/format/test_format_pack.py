"""Packs: other people's readers open them, and hostile headers are refused."""

from __future__ import annotations

import json
import pathlib
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file, save

from ckptfmt.errors import Corrupt, FormatError, InvalidInput
from ckptfmt.format import checksum, dtypes, pack
from ckptfmt.format.pack import PackEntry


def entry(name: str, dtype: str, size: tuple[int, ...], start: tuple[int, ...] | None = None,
          shape: tuple[int, ...] | None = None) -> PackEntry:  # fmt: skip
    nbytes = int(np.prod(size, dtype=object)) * dtypes.dtype(dtype).itemsize
    return PackEntry(name, dtype, size, start or (0,) * len(size), shape if shape is not None else size, nbytes)


def write(path: pathlib.Path, entries: list[PackEntry], data: list[bytes], **metadata: str) -> pack.PackLayout:
    plan = pack.layout_pack(entries, metadata)
    assert [len(raw) for raw in data] == [e.nbytes for e in entries]
    path.write_bytes(plan.header + b"".join(data))
    assert path.stat().st_size == plan.nbytes
    for e, raw, offset in zip(entries, data, plan.offsets, strict=True):
        assert path.read_bytes()[offset : offset + e.nbytes] == raw
    return plan


def test_every_element_type_opens_in_safetensors(tmp_path: pathlib.Path) -> None:
    entries, data = [], []
    for name, row in dtypes.DTYPES.items():
        for label, size in (("", (2, 3)), (".scalar", ()), (".empty", (0, 2))):
            entries.append(entry(name + label, name, size))
            data.append(bytes(range(entries[-1].nbytes)) if row.stored != "BOOL" else b"\x01" * entries[-1].nbytes)
    write(tmp_path / "p.safetensors", entries, data)
    loaded = load_file(tmp_path / "p.safetensors")
    assert sorted(loaded) == sorted(e.name for e in entries)
    for e, raw in zip(entries, data, strict=True):
        stored, shape = pack.stored_form(e.dtype, e.size)
        tensor = loaded[e.name]
        assert tuple(tensor.shape) == shape
        assert tensor.element_size() == dtypes.STORED_ITEMSIZE[stored]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == raw, e.name
    with safe_open(tmp_path / "p.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "ckptfmt": "1"}
        assert file.get_slice("float32").get_dtype() == "F32"


def test_numpy_reader_opens_ordinary_packs(tmp_path: pathlib.Path) -> None:
    values = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7, np.int64)}
    entries = [entry(name, value.dtype.name, value.shape) for name, value in values.items()]
    write(tmp_path / "p.safetensors", entries, [value.tobytes() for value in values.values()], step="5")
    loaded = load_numpy(tmp_path / "p.safetensors")
    assert all(np.array_equal(loaded[name], value) for name, value in values.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reshards_two_packs(tmp_path: pathlib.Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    full = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
    wide = torch.complex(full.double(), -full.double())
    bias = torch.arange(5, dtype=torch.int32)
    raw = [full[:4], wide[:, :2], bias], [full[4:], wide[:, 2:]]
    places = [((0, 0), (0, 0), (0,)), ((4, 0), (0, 2))]
    for rank, (tensors, starts) in enumerate(zip(raw, places, strict=True)):
        entries = [
            entry(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), start, shape)
            for name, t, start, shape in zip(
                ("w", "wide", "b"), tensors, starts, ((10, 6), (10, 6), (5,)), strict=False
            )
        ]
        data = [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
        write(tmp_path / f"r{rank:05d}-p000.safetensors", entries, data)
    state = {
        "w": torch.zeros(10, 6),
        "b": torch.zeros(5, dtype=torch.int32),
        "wide": torch.zeros(10, 6, 2, dtype=torch.float64),
    }
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(state["w"], full)
    assert torch.equal(state["b"], bias)
    assert torch.equal(torch.view_as_complex(state["wide"]), wide)


def test_order_and_alignment() -> None:
    sizes = [("a", "uint8", (5,)), ("b", "float32", (1024,)), ("c", "float64", (3,)), ("d", "bfloat16", (2048, 3))]
    sizes += [("e", "complex128", (1,)), ("f", "float32", (7,)), ("z", "float32", (0,))]
    entries = [entry(*row) for row in sizes]
    order = pack.order(entries)
    assert [entries[i].name for i in order] == ["b", "z", "d", "e", "c", "f", "a"]
    plan = pack.layout_pack([entries[i] for i in order])
    assert len(plan.header) % pack.ALIGNMENT == 0
    position = len(plan.header)
    for i, offset in zip(order, plan.offsets, strict=True):
        assert offset == position, "no holes"
        assert offset % dtypes.dtype(entries[i].dtype).itemsize == 0
        assert entries[i].nbytes % pack.ALIGNMENT or offset % pack.ALIGNMENT == 0
        position += entries[i].nbytes
    assert plan.nbytes == position
    assert plan.header_digest == checksum.hex_digest(plan.header)


def test_split_by_size_and_by_box() -> None:
    entries = [
        entry("a", "uint8", (6,)),
        entry("b", "uint8", (3,)),
        entry("c", "uint8", (20,)),
        entry("d", "uint8", (4,)),
    ]
    packs = pack.split(entries, limit=10)
    assert sorted(i for members in packs for i in members) == [0, 1, 2, 3]
    assert [2] in packs
    assert all(len(m) == 1 or sum(entries[i].nbytes for i in m) <= 10 for m in packs)
    boxes = [entry("w", "uint8", (1,), (i,), (5,)) for i in range(5)]
    assert pack.split(boxes) == [[0], [1], [2], [3], [4]]
    with pytest.raises(InvalidInput, match="two boxes"):
        pack.layout_pack(boxes)


def test_long_names_do_not_make_headers_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "HEADER_BYTES_MAX", 1 << 20)
    entries = [entry(f"{i:05d}" + "x" * 1000, "uint8", (1,)) for i in range(2000)]
    packs = pack.split(entries)
    assert len(packs) > 1
    assert all(len(pack.layout_pack([entries[i] for i in members]).header) <= 1 << 20 for members in packs)


def test_more_than_2_to_the_31_elements_need_no_memory() -> None:
    plan = pack.layout_pack(
        [entry("big", "uint8", (2**31 + 1,)), entry("bigger", "float64", (3, 2**33)), entry("end", "int8", (1,))]
    )
    parsed = pack.parse_header(plan.header, plan.nbytes)
    assert [e.nbytes for e in parsed.entries] == [2**31 + 1, 3 * 2**36, 1]
    assert parsed.entries[2].offset == plan.offsets[2] == len(plan.header) + 2**31 + 1 + 3 * 2**36


def test_names_are_taken_as_they_are(tmp_path: pathlib.Path) -> None:
    names = ["", "a/b", "..", 'q"uo\\te', "grün 雪", "__metadata__", "__metadata__~", "x\ny", "dtype"]
    entries = [entry(name, "uint8", (1,)) for name in names]
    plan = write(tmp_path / "p.safetensors", entries, [bytes([i]) for i in range(len(names))])
    loaded = load_file(tmp_path / "p.safetensors")
    assert loaded['q"uo\\te'].item() == 3
    assert {*names, "__metadata__~~"} - {"__metadata__"} == set(loaded)
    assert len(pack.parse_header(plan.header, plan.nbytes).entries) == len(names)
    with pytest.raises(InvalidInput, match="Unicode"):
        pack.layout_pack([entry("\ud800", "uint8", (1,))])


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="'w'"):
        pack.layout_pack([PackEntry("w", "float32", (2,), (0,), (2,), 7)])
    with pytest.raises(InvalidInput, match="qint8"):
        pack.order([PackEntry("w", "qint8", (2,), (0,), (2,), 2)])


def test_parse_reads_what_safetensors_writes() -> None:
    tensors = {"a": torch.zeros(3, 4), "b": torch.zeros((), dtype=torch.int64), "e": torch.zeros(0, 5)}
    data = save(tensors, metadata={"k": "v"})
    parsed = pack.parse_header(data[: pack.header_length(data[:8], len(data))], len(data))
    assert {e.name: e.shape for e in parsed.entries} == {"a": (3, 4), "b": (), "e": (0, 5)}
    assert parsed.metadata == {"k": "v"}


def head(text: bytes | dict[str, Any], length: int | None = None) -> bytes:
    raw = text if isinstance(text, bytes) else json.dumps(text).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw


def one(**change: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | change}


EMPTY = b'"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
HOSTILE: dict[str, tuple[bytes, int]] = {
    "empty file": (b"", 0),
    "short file": (b"\x00" * 7, 7),
    "huge header": (head(b"{}", 2**63), 2**40),
    "header beyond the file": (head(b"{}", 100), 10),
    "no object": (head(b"[]"), 10),
    "space first": (head(b" {}"), 11),
    "cut json": (head(b'{"w":'), 13),
    "not utf-8": (head(b'{"\xff":{}}'), 16),
    "nan": (head(b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,0]}}'), 100),
    "duplicate entry": (head(b"{ " + b", ".join([EMPTY, EMPTY]) + b"}"), -1),
    "duplicate entry, compact": (head(b"{" + b",".join([EMPTY, EMPTY]) + b"}"), -1),
    "duplicate member": (head(b"{" + EMPTY.replace(b"{", b'{"dtype":"U8",') + b"}"), -1),
    "duplicate member, wide": (head(b"{" + EMPTY.replace(b"{", b'{"dtype" :"U8",') + b"}"), -1),
    "unknown dtype": (head(one(dtype="F33")), 0),
    "negative shape": (head(one(shape=[-2])), 0),
    "two negatives": (head(one(shape=[-1, -2])), 0),
    "wrong size": (head(one(shape=[3])), 0),
    "fraction": (head(one(shape=[2.5])), 0),
    "text shape": (head(one(shape="2")), 0),
    "backwards": (head(one(data_offsets=[8, 0])), 0),
    "three offsets": (head(one(data_offsets=[0, 8, 9])), 0),
    "hole first": (head(one(data_offsets=[8, 16])), 0),
    "extra member": (head(one(extra=1)), 0),
    "missing member": (head({"w": {"dtype": "F32", "shape": [2]}}), 0),
    "overlap": (head(one() | {"v": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}), 0),
    "hole": (head(one() | {"v": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]}}), 0),
    "overflowing shape": (head(one(shape=[2**62, 2**62])), 0),
    "metadata is a number": (head({"__metadata__": 5}), 0),
    "metadata holds numbers": (head({"__metadata__": {"a": 5}}), 0),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(case: str) -> None:
    data, nbytes = HOSTILE[case]
    word = "twice" if case.startswith("duplicate") else None
    with pytest.raises(FormatError, match=word):
        pack.parse_header(data, {0: len(data) + 8, -1: len(data)}.get(nbytes, nbytes) if data else 0)


def test_length_must_match_the_file() -> None:
    plan = pack.layout_pack([entry("w", "float32", (4,))])
    for nbytes in (plan.nbytes - 1, plan.nbytes + 1):
        with pytest.raises(Corrupt, match=str(nbytes)):
            pack.parse_header(plan.header, nbytes)
    with pytest.raises(InvalidInput, match="first"):
        pack.parse_header(plan.header[:-1], plan.nbytes)
