"""``Generation.zarr``: every tensor of every layout is there bit for bit, verified, and nothing can be written."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import pickle
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_rig import MANIFEST, Reads, front, lay_out, merged, on_disk, open_folder, save, write_rank
from reshard_rig import grid as boxes_between
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.dtype import data_type_registry

import ckptfmt
from ckptfmt.errors import Corrupt, InvalidInput, NotFound
from ckptfmt.format.dtypes import DTYPES, numpy_dtype
from ckptfmt.views import grid as grids
from ckptfmt.views.zarr_dtypes import register
from ckptfmt.views.zarr_nodes import CORE, EXTENDED, Nodes, node_name

READINGS = [{"mmap": mmap, "verify": verify} for mmap, verify in itertools.product((False, True), repeat=2)]


@pytest.fixture
def saved(tmp_path: Path, quick: None) -> Callable[..., ckptfmt.Generation]:
    """``saved(state)``: a generation on disk."""

    def make(state: Any) -> ckptfmt.Generation:
        return ckptfmt.save(state, tmp_path / "r")

    return make


def raw(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def pack_of(generation: ckptfmt.Generation, root: Path) -> Path:
    return root / "r" / generation._opened.stored.all[0].boxes[0].pack


def everything() -> dict[str, Any]:
    """One small torch tensor of every element type that torch can make and the format can store."""
    found = {}
    for name in DTYPES:
        if not hasattr(torch, name):
            continue
        width = DTYPES[name].itemsize
        data = torch.arange(6 * width, dtype=torch.uint8)
        data = data % 2 if name == "bool" else data
        found[name] = data.view(getattr(torch, name)).reshape(2, 3)
    return found


# -- what is in it ----------------------------------------------------------------------------------
@pytest.mark.parametrize("reading", READINGS, ids=str)
def test_every_element_type_is_there_bit_for_bit(saved: Callable[..., Any], reading: dict[str, bool]) -> None:
    state = everything()
    group = saved(state).zarr_group(**reading)
    assert set(group.array_keys()) == set(state)
    for name, tensor in state.items():
        array = group[name]
        assert raw(array[...]) == tensor.view(torch.uint8).numpy().tobytes(), name
        assert array.attrs["ckptfmt"]["dtype"] == name
        if name in CORE | EXTENDED:
            assert array.dtype == numpy_dtype(name)
            assert array.shape == tensor.shape
        else:
            width = DTYPES[name].itemsize
            assert array.dtype == np.uint8
            assert array.shape == ((2, 3, width) if width > 1 else (2, 3))


def test_scalars_and_empty_tensors(saved: Callable[..., Any]) -> None:
    group = saved({"scalar": np.full((), 2.5), "none": np.zeros((0, 3)), "nan": np.array([np.nan])}).zarr_group()
    assert group["scalar"][...] == 2.5
    assert group["scalar"].shape == ()
    assert group["none"][...].shape == (0, 3)
    assert np.isnan(group["nan"][...]).all()


def test_tied_tensors_stand_under_all_their_names(saved: Callable[..., Any]) -> None:
    shared = torch.arange(6.0)
    group = saved({"a": shared, "b": {"c": shared}}).zarr_group()
    assert raw(group["b.c"][...]) == raw(group["a"][...]) == raw(shared)
    assert group["b.c"].attrs["ckptfmt"]["same_as"] == "a"


ODD_NAMES = [
    "x/y",
    "a\\b",
    ".",
    "..",
    "zarr.json",
    "c",
    "__x",
    "50%",
    "a%2Fb",
    "a@3",
    "tab\there",
    "ünï",
    "a.b.c",
    " ",
    "{{u}}",
]


def test_odd_names_are_nodes_and_lead_back(saved: Callable[..., Any]) -> None:
    state = {name: np.full(3, number) for number, name in enumerate(ODD_NAMES)}
    group = saved(state).zarr_group()
    assert {array.attrs["ckptfmt"]["tensor"] for array in group.array_values()} == set(ODD_NAMES)
    for name, value in state.items():
        assert raw(group[node_name(name)][...]) == raw(value), name
    assert "a.b.c" in group  # dots verbatim


@given(st.lists(st.tuples(st.text(max_size=6), st.none() | st.integers(0, 12)), unique=True, max_size=20))
def test_no_two_tensors_share_a_node(tensors: list[tuple[str, int | None]]) -> None:
    names = [node_name(*tensor) for tensor in tensors]
    assert len(set(names)) == len(names)
    assert all(name and "/" not in name and name.strip(".") and not name.startswith("__") for name in names)


def test_each_rank_s_own_has_a_node(tmp_path: Path) -> None:
    states = [{"rng": ckptfmt.PerRank(np.full(4, rank)), "w": np.ones(2)} for rank in range(3)]
    group = front(save(states)).zarr_group()
    assert set(group.array_keys()) == {"rng@0", "rng@1", "rng@2", "w"}
    assert group["rng@2"][...].tolist() == [2, 2, 2, 2]
    assert group["rng@2"].attrs["ckptfmt"] == {"tensor": "rng", "dtype": "int64", "rank": 2}


def test_one_rank_s_own_keeps_its_plain_name(saved: Callable[..., Any]) -> None:
    assert set(saved({"rng": ckptfmt.PerRank(np.ones(4))}).zarr_group().array_keys()) == {"rng"}


def test_the_group_tells_where_it_comes_from(saved: Callable[..., Any]) -> None:
    generation = saved({"w": np.ones(2)})
    facts = generation.zarr_group().attrs["ckptfmt"]
    assert facts == {"run": "default", "id": generation.id, "key": generation.key, "step": 0}


# -- layouts ----------------------------------------------------------------------------------------
@st.composite
def layouts(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[Any], int]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    dtype = draw(st.sampled_from(["uint8", "int16", "float64", "bfloat16"]))
    count = int(np.prod(shape))
    array = np.arange(count).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).reshape(shape)
    boxes = boxes_between(shape, [draw(st.lists(st.integers(0, n), max_size=3)) for n in shape])
    if len(shape) == 2 and shape[0] > 2 and shape[1] > 2 and draw(st.booleans()):  # no grid at all
        n, m = shape
        boxes = [((0, 0), (2, m - 1)), ((0, m - 1), (n, 1)), ((2, 0), (n - 2, m - 1))]
    return array, boxes, draw(st.sampled_from([8, 20, 64, 1 << 20]))


@pytest.mark.slow
@given(layouts(), st.booleans(), st.sampled_from([16, 64, 4 << 20]))
@settings(max_examples=120, deadline=None)
def test_any_boxes_are_shown_as_one_tensor(
    case: tuple[np.ndarray[Any, Any], list[Any], int], verify: bool, target: int
) -> None:
    array, boxes, chunk_bytes = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "TARGET_BYTES", target)
        patch.setattr(grids, "_HANDY", (target // 4, target * 4))
        shown = front(lay_out({"w": (array, boxes)}, chunk_bytes=chunk_bytes)).zarr_group(verify=verify)["w"]
        assert raw(shown[...]) == raw(array)
        if array.ndim and array.shape[0] > 1:
            assert raw(shown[1:]) == raw(array[1:])


@pytest.mark.parametrize("reading", READINGS, ids=str)
@pytest.mark.parametrize("cuts", [[[3, 6], []], [[4], [5]], [[1, 2, 9], [3]]], ids=["uneven", "2-D", "odd"])
def test_ranks_on_disk(tmp_path: Path, reading: dict[str, bool], cuts: list[list[int]]) -> None:
    """What several ranks wrote into packs of their own."""
    array = np.arange(10 * 10, dtype=np.float32).reshape(10, 10)
    boxes = boxes_between(array.shape, cuts)
    backend = on_disk(tmp_path)
    states = [
        {"w": ckptfmt.Sharded(np.ascontiguousarray(array[a : a + n, b : b + m]), array.shape, (a, b))}
        for (a, b), (n, m) in boxes
    ]
    parts = [write_rank(backend, state, rank, len(states)) for rank, state in enumerate(states)]
    backend.create(f"g/{MANIFEST}", merged(parts))
    assert raw(front(open_folder(tmp_path)).zarr_group(**reading)["w"][...]) == raw(array)


# -- bytes ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mmap", [False, True])
def test_damage_is_told_and_never_shown(saved: Callable[..., Any], tmp_path: Path, mmap: bool) -> None:
    generation = saved({"w": np.arange(1000)})
    box = generation._opened.stored.all[0].boxes[0]
    with open(pack_of(generation, tmp_path), "r+b") as file:
        file.seek(box.offset + 8)
        file.write(b"\xff")
    with pytest.raises(Corrupt, match="tensor 'w'"):
        generation.zarr_group(mmap=mmap)["w"][...]
    assert generation.zarr_group(mmap=mmap, verify=False)["w"][0] == 0


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("change", ["cut", "gone"])
def test_a_pack_that_is_short_or_gone(saved: Callable[..., Any], tmp_path: Path, mmap: bool, change: str) -> None:
    generation = saved({"w": np.arange(100_000)})
    group = generation.zarr_group(mmap=mmap)
    path = pack_of(generation, tmp_path)
    if change == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    with pytest.raises((Corrupt, NotFound), match=path.name):
        group["w"][...]


@pytest.mark.slow
def test_a_pack_that_is_cut_while_it_is_mapped_is_an_error_and_no_signal(
    saved: Callable[..., Any], tmp_path: Path
) -> None:
    array = np.arange(3 << 20, dtype=np.float64)  # three digests
    generation = saved({"w": array})
    shown = generation.zarr_group(mmap=True, verify=False)["w"]
    assert shown[0] == 0
    box = generation._opened.stored.all[0].boxes[0]
    os.truncate(pack_of(generation, tmp_path), box.offset + (9 << 20))
    with pytest.raises(Corrupt, match="truncated"):
        shown[-1]
    with pytest.raises(Corrupt, match="truncated"):
        generation.zarr_group()["w"][-1]


def test_chunks_are_read_once_for_all_that_lie_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "TARGET_BYTES", 1 << 10)
    monkeypatch.setattr(grids, "_HANDY", (1 << 8, 1 << 12))
    array = np.arange(4096, dtype=np.float64)
    opened = lay_out({"w": (array, [((0,), (4096,))])}, chunk_bytes=4096)
    reads = Reads(opened, monkeypatch)
    assert raw(front(opened).zarr_group()["w"][...]) == raw(array)
    assert len(reads.ranges) == 8


def test_without_verification_no_byte_more_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "TARGET_BYTES", 1 << 10)
    monkeypatch.setattr(grids, "_HANDY", (1 << 8, 1 << 12))
    array = np.arange(4096, dtype=np.float64)
    opened = lay_out({"w": (array, [((0,), (4096,))])}, chunk_bytes=1 << 20)
    reads = Reads(opened, monkeypatch)
    assert front(opened).zarr_group(verify=False)["w"][200] == 200
    assert [nbytes for *_, nbytes in reads.ranges] == [1 << 10]


def test_a_failed_read_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(100)
    opened = lay_out({"w": (array, [((0,), (100,))])}, chunk_bytes=1 << 20)
    group = front(opened).zarr_group()
    plain = opened.site.backend.read_into
    with monkeypatch.context() as patch:
        patch.setattr(opened.site.backend, "read_into", lambda *_: (_ for _ in ()).throw(NotFound("away")))
        with pytest.raises(NotFound, match="away"):
            group["w"][...]
    assert opened.site.backend.read_into == plain
    assert raw(group["w"][...]) == raw(array)


@pytest.mark.slow
def test_many_packs_are_mapped_with_few_descriptors(tmp_path: Path) -> None:
    backend = on_disk(tmp_path)
    array = np.arange(400, dtype=np.int32).reshape(100, 4)
    states = [{"w": ckptfmt.Sharded(array[rank : rank + 1].copy(), array.shape, (rank, 0))} for rank in range(100)]
    parts = [write_rank(backend, state, rank, len(states)) for rank, state in enumerate(states)]
    backend.create(f"g/{MANIFEST}", merged(parts))
    shown = front(open_folder(tmp_path)).zarr_group(mmap=True)["w"]
    before = len(os.listdir("/proc/self/fd"))
    assert raw(shown[...]) == raw(array)
    assert len(os.listdir("/proc/self/fd")) - before <= 64


def test_a_mapping_needs_a_local_file_system() -> None:
    opened = lay_out({"w": (np.ones(3), [((0,), (3,))])}, chunk_bytes=64)
    with pytest.raises(InvalidInput, match="leave out mmap=True"):
        front(opened).zarr(mmap=True)


def test_a_mapped_chunk_is_no_copy(saved: Callable[..., Any]) -> None:
    generation = saved({"w": np.arange(1 << 16, dtype=np.float32)})
    store = generation.zarr(mmap=True)
    found = store.get_sync("w/c/0", prototype=default_buffer_prototype())
    assert found is not None
    array = found.as_numpy_array()
    assert not array.flags.writeable
    assert not array.flags.owndata


# -- a store like others ----------------------------------------------------------------------------
def test_nothing_can_be_written(saved: Callable[..., Any]) -> None:
    group = saved({"w": np.ones(3)}).zarr_group()
    with pytest.raises(ValueError, match="read-only"):
        group["w"][0] = 2
    with pytest.raises(ValueError, match="read-only"):
        group.create_array("new", shape=(1,), dtype="i4")


def test_keys_that_name_nothing(saved: Callable[..., Any]) -> None:
    store = saved({"w": np.ones((3, 2)), "s": np.ones(())}).zarr()
    present = ["zarr.json", "w/zarr.json", "w/c/0/0", "s/c"]
    absent = [
        "",
        "w",
        "w/c",
        "w/c/0",
        "w/c/1/0",
        "w/c/0/0/0",
        "w/c/00/0",
        "w/c/-1/0",
        "w/c/٣/0",
        "w/zarr.json/",
        "c/0",
        "v/c/0",
    ]
    assert all(asyncio.run(store.exists(key)) for key in present)
    assert not any(asyncio.run(store.exists(key)) for key in absent)
    assert all(store.get_sync(key) is None for key in absent)


def test_a_range_that_passes_the_end_is_cut(saved: Callable[..., Any]) -> None:
    store = saved({"w": np.arange(4, dtype=np.uint8)}).zarr()
    for start, end, expected in [(1, 100, b"\x01\x02\x03"), (9, 12, b""), (3, 1, b"")]:
        found = store.get_sync("w/c/0", byte_range=RangeByteRequest(start, end))
        assert found is not None
        assert found.to_bytes() == expected


@pytest.mark.slow
def test_a_store_is_pickled_as_its_url(saved: Callable[..., Any], tmp_path: Path) -> None:
    group = saved({"w": np.arange(5)}).zarr_group(mmap=True)
    data = pickle.dumps(group["w"])
    assert len(data) < 4096
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())[...].sum())"
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True)
    assert done.stdout.decode().strip() == "10", done.stderr.decode()


def test_a_pickled_store_of_another_generation_is_refused(saved: Callable[..., Any]) -> None:
    store = saved({"w": np.arange(5)}).zarr()
    state = store.__getstate__() | {"key": "0" * 32}
    with pytest.raises(Corrupt, match="expected 000"):
        store.__setstate__(state)


def readers(root: Path) -> int:
    with contextlib.closing(sqlite3.connect(root / "catalog.sqlite")) as connection:
        return int(connection.execute("SELECT count(*) FROM readers").fetchone()[0])


def test_an_open_store_is_a_registered_reader(tmp_path: Path, quick: None) -> None:
    with ckptfmt.open(tmp_path / "r") as repo:
        with repo.checkpointer() as checkpointer:
            pending = checkpointer.save({"w": np.ones(3)}, step=1)
            assert pending is not None
            generation = pending.result()
        store = generation.zarr()
        assert readers(tmp_path / "r") == 1
        store.close()
        assert readers(tmp_path / "r") == 0
        forgotten = generation.zarr()
        again = forgotten.with_read_only(True)
        del forgotten
        gc.collect()
        assert readers(tmp_path / "r") == 1  # for the copy
        del again
        gc.collect()
        assert readers(tmp_path / "r") == 0


LEAVES_A_STORE_OPEN = """
import os, sys
import ckptfmt
repo = ckptfmt.open(sys.argv[1])
store = repo.latest("default").zarr()
if not os.fork():
    del store
    sys.exit()
os.wait()
import sqlite3
print(sqlite3.connect(sys.argv[1] + "/catalog.sqlite").execute("SELECT count(*) FROM readers").fetchone()[0])
"""


def test_a_process_that_ends_is_no_reader_and_its_child_takes_nothing_away(tmp_path: Path, quick: None) -> None:
    ckptfmt.save({"w": np.ones(3)}, tmp_path / "r")
    command = [sys.executable, "-c", LEAVES_A_STORE_OPEN, str(tmp_path / "r")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert readers(tmp_path / "r") == 0


def test_dask_and_xarray_open_it(saved: Callable[..., Any]) -> None:
    import dask.array
    import xarray

    weight = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    generation = saved(
        {"model": {"w": weight, "half": weight.to(torch.bfloat16)}, "kernel": weight, "kernel:0": weight[0]}
    )
    lazy = dask.array.from_zarr(generation.zarr_group()["model.w"])
    assert float(lazy.sum().compute(scheduler="synchronous")) == float(weight.sum())
    data = xarray.open_zarr(generation.zarr(), consolidated=False, chunks=None)
    assert set(data) == {"model.w", "model.half", "kernel", "kernel:0"}
    assert raw(data["model.w"]) == raw(weight)
    assert data["model.half"].dtype == ml_dtypes.bfloat16


# -- element types ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(EXTENDED))
def test_zarr_writes_and_reads_our_element_types(name: str) -> None:
    register()
    native = np.dtype(getattr(ml_dtypes, name))
    values = np.arange(1, 9).astype(native).reshape(2, 4)
    store = zarr.storage.MemoryStore()
    written = zarr.create_array(store, data=values, chunks=(1, 4))
    assert written.metadata.to_dict()["data_type"] == name
    read = zarr.open_array(store, mode="r")
    assert read.dtype == native
    assert raw(read[...]) == raw(values)


@pytest.mark.parametrize("name", sorted(EXTENDED))
@pytest.mark.parametrize("bits", [0x00, 0x3C, 0x7F, 0x80, 0xFF])
def test_fill_values_come_back_bit_for_bit(name: str, bits: int) -> None:
    kind = next(kind for kind in map(data_type_registry.get, [name]))()
    native = kind.to_native_dtype()
    scalar = np.frombuffer(bytes([bits] * native.itemsize), native)[0]
    document = json.loads(json.dumps(kind.to_json_scalar(scalar, zarr_format=3)))
    assert raw(kind.from_json_scalar(document, zarr_format=3)) == raw(scalar)


def test_registering_again_changes_nothing_and_takes_no_name_away(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    theirs = type("Theirs", (), {})
    monkeypatch.setitem(data_type_registry.contents, "bfloat16", theirs)
    register()
    assert data_type_registry.contents["bfloat16"] is theirs


def test_the_entry_points_lead_to_the_types() -> None:
    from importlib.metadata import entry_points

    found = {
        point.name: point.load() for point in entry_points(group="zarr.data_type") if point.module.startswith("ckptfmt")
    }
    assert {name: kind._zarr_v3_name for name, kind in found.items()} == {name: name for name in EXTENDED}


# -- without zarr -----------------------------------------------------------------------------------
def test_without_zarr_the_error_says_what_to_install(
    saved: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = saved({"w": np.ones(3)})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'ckptfmt\[zarr\]'"):
        generation.zarr()


def test_a_thousand_arrays_are_not_looked_at_one_by_one() -> None:
    opened = lay_out({f"t{n}": (np.ones(2), [((0,), (2,))]) for n in range(1000)}, chunk_bytes=64)
    group = front(opened).zarr_group()
    store = group.store
    assert len(store._nodes) == 1000
    assert not store._nodes._made  # documents are made when they are asked for
    assert isinstance(store._nodes, Nodes)


# -- notebooks --------------------------------------------------------------------------------------
def test_a_notebook_shows_a_generation(saved: Callable[..., Any]) -> None:
    html = saved({f"<b>{n}": np.ones(n + 1) for n in range(30)})._repr_html_()
    assert "Generation #1" in html
    assert "&lt;b&gt;29" in html
    assert "<b>29" not in html
    assert "and 10 smaller tensors" in html
