"""``Generation.tensorstore``: a tensor of any layout as a virtual array, verified as it is read."""

from __future__ import annotations

import gc
import itertools
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_rig import front, lay_out, save
from reshard_rig import grid as boxes_between

import ckptfmt
from ckptfmt.errors import Corrupt, InvalidInput, Mismatch
from ckptfmt.format.dtypes import DTYPES
from ckptfmt.views import grid as grids
from ckptfmt.views.zarr_nodes import TENSORSTORE

READINGS = [{"mmap": mmap, "verify": verify} for mmap, verify in itertools.product((False, True), repeat=2)]


@pytest.fixture
def saved(tmp_path: Path, quick: None) -> Callable[..., ckptfmt.Generation]:
    """``saved(state)``: a generation on disk."""

    def make(state: Any) -> ckptfmt.Generation:
        return ckptfmt.save(state, tmp_path / "r")

    return make


def raw(array: Any) -> bytes:
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("reading", READINGS, ids=str)
def test_every_element_type_is_there_bit_for_bit(saved: Callable[..., Any], reading: dict[str, bool]) -> None:
    state = {}
    for name in DTYPES:
        if hasattr(torch, name):
            data = torch.arange(6 * DTYPES[name].itemsize, dtype=torch.uint8)
            data = data % 2 if name == "bool" else data
            state[name] = data.view(getattr(torch, name)).reshape(2, 3)
    generation = saved(state)
    for name, tensor in state.items():
        array = generation.tensorstore(name, **reading)
        assert raw(array.read().result()) == tensor.view(torch.uint8).numpy().tobytes(), name
        if name in TENSORSTORE:
            assert (array.dtype.name, array.shape) == (name, (2, 3))
        else:
            width = DTYPES[name].itemsize
            assert (array.dtype.name, array.shape) == ("uint8", (2, 3, width) if width > 1 else (2, 3))


def test_the_known_element_types_are_those_that_tensorstore_has() -> None:
    def known(name: str) -> bool:
        try:
            tensorstore.dtype(name)
        except (TypeError, ValueError):
            return False
        return True

    assert {name for name in DTYPES if known(name)} == TENSORSTORE


def test_scalars_empty_and_tied_tensors(saved: Callable[..., Any]) -> None:
    shared = torch.arange(6.0)
    generation = saved({"scalar": np.full((), 2.5), "none": np.zeros((0, 3)), "a": shared, "b": {"c": shared}})
    assert generation.tensorstore("scalar").read().result() == 2.5
    assert generation.tensorstore("none").read().result().shape == (0, 3)
    assert raw(generation.tensorstore("b.c").read().result()) == raw(shared)


def test_slices_read_their_chunks_only(saved: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "TARGET_BYTES", 1 << 19)
    values = np.random.default_rng(0).standard_normal((50_257, 16)).astype(np.float32)
    array = saved({"w": values}).tensorstore("w", verify=False)
    seen: list[tuple[int, int]] = []
    read = grids.Presented.place
    monkeypatch.setattr(grids.Presented, "place", lambda self, index: seen.append(index) or read(self, index))
    assert np.array_equal(array[40_000:40_010:3, 5].read().result(), values[40_000:40_010:3, 5])
    assert set(seen) == {(40_000 // array.chunk_layout.read_chunk.shape[0], 0)}
    assert np.array_equal(array[...].read().result(), values)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[Any]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    array = np.arange(int(np.prod(shape))).astype(draw(st.sampled_from([np.uint8, np.float64]))).reshape(shape)
    boxes = boxes_between(shape, [draw(st.lists(st.integers(0, n), max_size=3)) for n in shape])
    if len(shape) == 2 and shape[0] > 2 and shape[1] > 2 and draw(st.booleans()):  # no grid at all
        n, m = shape
        boxes = [((0, 0), (2, m - 1)), ((0, m - 1), (n, 1)), ((2, 0), (n - 2, m - 1))]
    return array, boxes


@pytest.mark.slow
@given(layouts(), st.sampled_from([16, 64, 4 << 20]))
@settings(max_examples=100, deadline=None)
def test_any_boxes_are_shown_as_one_tensor(case: tuple[np.ndarray[Any, Any], list[Any]], target: int) -> None:
    array, boxes = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "TARGET_BYTES", target)
        found = front(lay_out({"w": (array, boxes)}, chunk_bytes=64)).tensorstore("w").read().result()
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def test_what_each_rank_kept_is_asked_for_by_rank() -> None:
    states = [{"own": ckptfmt.PerRank(np.full(3, rank)), "w": np.ones(2)} for rank in range(2)]
    generation = front(save(states))
    assert list(generation.tensorstore("own", rank=1).read().result()) == [1, 1, 1]
    assert list(generation.tensorstore("w", rank=1).read().result()) == [1, 1]
    with pytest.raises(Mismatch, match="ranks 0, 1 kept it"):
        generation.tensorstore("own")
    with pytest.raises(InvalidInput, match="not by 2"):
        generation.tensorstore("own", rank=2)
    with pytest.raises(KeyError, match="no tensor 'other'"):
        generation.tensorstore("other")


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_damage_is_an_error_of_ours(saved: Callable[..., Any], tmp_path: Path, mmap: bool) -> None:
    generation = saved({"w": np.ones(5000)})
    box = generation._opened.stored.all[0].boxes[0]
    with (tmp_path / "r" / box.pack).open("r+b") as pack:
        pack.seek(box.offset + 100)
        pack.write(b"\xff")
    with pytest.raises(Corrupt, match="tensor 'w'"):
        generation.tensorstore("w", mmap=mmap).read().result()
    assert raw(generation.tensorstore("w", mmap=mmap, verify=False).read().result()) != raw(np.ones(5000))


def test_nothing_can_be_written(saved: Callable[..., Any]) -> None:
    array = saved({"w": np.ones(3)}).tensorstore("w")
    assert not array.writable
    with pytest.raises(ValueError, match="not support writing"):
        array[...] = 2


@pytest.mark.slow
def test_it_is_a_registered_reader_until_it_is_forgotten(tmp_path: Path, quick: None) -> None:
    def readers() -> int:
        with closing(sqlite3.connect(tmp_path / "r" / "catalog.sqlite")) as connection:
            return int(connection.execute("SELECT count(*) FROM readers").fetchone()[0])

    ckptfmt.save({"w": np.ones(3)}, tmp_path / "r")
    with ckptfmt.open(tmp_path / "r") as repo:
        array = repo.latest("default").tensorstore("w")
        part = array[1:]
        del array
        gc.collect()
        assert readers() == 1
        del part
        gc.collect()
    assert readers() == 0  # closed at the latest when the repository is


def test_without_tensorstore_the_error_says_what_to_install(
    saved: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = saved({"w": np.ones(3)})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'ckptfmt\[tensorstore\]'"):
        generation.tensorstore("w")


_DROPPED = """
import sys, threading, time
import numpy as np
import ckptfmt
from ckptfmt.catalog.sql import SqlCatalog

closed = []
close_reader = SqlCatalog.close_reader

def slowly(catalog, reader):
    time.sleep(0.2)  # others run meanwhile
    close_reader(catalog, reader)
    closed.append(threading.current_thread().name)

SqlCatalog.close_reader = slowly
with ckptfmt.open(sys.argv[1]) as repository:
    generation = repository.latest("run")
    for _ in range(20):
        assert generation.tensorstore("w").read().result().shape == (100,)
print(closed)
"""


def test_what_tensorstore_drops_is_closed_elsewhere(saved: Callable[..., Any], tmp_path: Path) -> None:
    """It holds a lock when it drops the last reference to a view, and waits for that lock with the interpreter's own
    held: a view that closed its reader there stopped both for ever."""
    ckptfmt.save({"w": np.zeros(100)}, tmp_path / "r", run="run")
    ran = subprocess.run(
        [sys.executable, "-c", _DROPPED, str(tmp_path / "r")], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(["ckptfmt-dropped"] * 20)
