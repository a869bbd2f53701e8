"""``ckptfmt export --ocdbt``: what plain TensorStore opens by a JSON spec where there is no ckptfmt."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from reshard_rig import MANIFEST, lay_out, merged, on_disk, open_folder, write_rank
from reshard_rig import grid as boxes_between

import ckptfmt
from ckptfmt.engine.opened import Opened
from ckptfmt.errors import Conflict, Corrupt, NotFound, Unavailable
from ckptfmt.exchange.ocdbt_export import OcdbtExport, export_ocdbt, index_when_committed
from ckptfmt.format import ocdbt
from ckptfmt.format.dtypes import DTYPES
from ckptfmt.pending import PendingSave
from ckptfmt.testing.faults import Call, Fault, FaultyBackend
from ckptfmt.views import grid as grids
from ckptfmt.views.zarr_nodes import TENSORSTORE, node_name

READER = """
import json, os, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ckptfmt":
            raise ImportError("ckptfmt is not there")

sys.meta_path.insert(0, Blocked())
try:
    import ckptfmt
except ImportError:
    pass
else:
    sys.exit("ckptfmt can be imported")
import tensorstore

place = json.loads(sys.argv[1])
keys = tensorstore.KvStore.open(place).result().list().result()
found = {}
for key in keys:
    name, _, rest = key.decode().partition("/")
    if rest == "zarr.json":
        array = tensorstore.open({"driver": "zarr3", "kvstore": place | {"path": name + "/"}}, read=True).result()
        found[name] = [array.dtype.name, list(array.shape), array.read().result().tobytes().hex()]
print(json.dumps([len(keys), found]))
"""


def read_elsewhere(place: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Number of keys, and node -> (dtype, shape, bytes), as a process without ckptfmt reads it."""
    done = subprocess.run([sys.executable, "-c", READER, json.dumps(place)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, found = json.loads(done.stdout)
    return count, {name: (dtype, tuple(shape), bytes.fromhex(data)) for name, (dtype, shape, data) in found.items()}


def place_of(report: OcdbtExport) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": report.base}


class InMemory:
    """The objects of a generation in TensorStore's own memory, opened there."""

    def __init__(self, opened: Opened) -> None:
        self._context = tensorstore.Context()
        place = tensorstore.KvStore.open("memory://", context=self._context).result()
        backend = opened.site.backend
        for info in backend.list(opened.folder):
            data = bytearray(info.nbytes)
            backend.read_into(info.key, 0, memoryview(data))
            place.write(info.key.removeprefix(f"{opened.folder}/"), bytes(data)).result()

    def array(self, node: str) -> Any:
        kvstore = {"driver": "ocdbt", "base": "memory://", "path": f"{node}/"}
        return tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True, context=self._context).result()


def damage(opened: Opened, tensor: str) -> None:
    box = opened.stored.find(tensor, None).boxes[0]
    backend = opened.site.backend
    data = bytearray(backend.read(box.pack, limit=1 << 20))
    data[box.offset] ^= 1
    backend.delete(box.pack)
    backend.create(box.pack, bytes(data))


NO_GRID = [((0, 0), (2, 3)), ((0, 3), (5, 1)), ((2, 0), (3, 3))]


def test_every_element_type_is_read_elsewhere_bit_for_bit(tmp_path: Path, quick: None) -> None:
    state: dict[str, Any] = {"none": np.zeros((0, 3)), "scalar": np.full((), 7), "odd/name %2F ü": np.ones(3)}
    for name in DTYPES:
        if hasattr(torch, name):
            data = torch.arange(6 * DTYPES[name].itemsize, dtype=torch.uint8)
            data = data % 2 if name == "bool" else data
            state[name] = data.view(getattr(torch, name)).reshape(2, 3)
    generation = ckptfmt.save(state, tmp_path / "a repository")
    report = export_ocdbt(generation._opened)
    keys, found = read_elsewhere(place_of(report))
    assert set(found) == {node_name(name) for name in generation}
    assert keys == report.references + report.arrays + 1
    for name, value in state.items():
        raw = value.view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor) else value.tobytes()
        dtype, shape, data = found[node_name(name)]
        assert data == raw, name
        if generation[name].dtype in TENSORSTORE:
            assert (dtype, shape) == (generation[name].dtype, generation[name].shape)
        else:
            assert dtype == "uint8"
            assert node_name(name) in report.as_bytes


@pytest.mark.parametrize("cuts", [[[3, 6], []], [[4], [5]], [[1, 2, 9], [3]]], ids=["uneven", "2-D", "odd"])
def test_what_many_ranks_saved_is_read_elsewhere(tmp_path: Path, cuts: list[list[int]]) -> None:
    array = np.arange(100, dtype=np.float32).reshape(10, 10).astype(ml_dtypes.bfloat16)
    boxes = boxes_between(array.shape, cuts)
    backend = on_disk(tmp_path / "r")
    states = [
        {
            "w": ckptfmt.Sharded(np.ascontiguousarray(array[a : a + n, b : b + m]), array.shape, (a, b)),
            "own": ckptfmt.PerRank(np.full(2, rank, np.int32)),
        }
        for rank, ((a, b), (n, m)) in enumerate(boxes)
    ]
    parts = [write_rank(backend, state, rank, len(states)) for rank, state in enumerate(states)]
    backend.create(f"g/{MANIFEST}", merged(parts))
    report = export_ocdbt(open_folder(tmp_path / "r"))
    _, found = read_elsewhere(place_of(report))
    own = {f"own@{rank}": ("int32", (2,), np.full(2, rank, np.int32).tobytes()) for rank in range(len(states))}
    assert found == {"w": ("bfloat16", (10, 10), array.tobytes())} | own


def test_a_folder_that_was_copied_elsewhere_opens_there(tmp_path: Path, quick: None) -> None:
    generation = ckptfmt.save({"w": np.arange(6.0)}, tmp_path / "r")
    export_ocdbt(generation._opened)
    shutil.move(tmp_path / "r" / generation._opened.folder, tmp_path / "moved")
    array = tensorstore.open(f"file://{tmp_path}/moved/|ocdbt:w/", read=True).result()
    assert list(array.read().result()) == [0, 1, 2, 3, 4, 5]


def test_packs_of_other_generations_are_found_from_the_run_s_folder(tmp_path: Path, quick: None) -> None:
    opened = ckptfmt.save({"w": np.arange(6.0)}, tmp_path / "r")._opened
    other = "c" * 32
    run = tmp_path / "r" / opened.folder.rpartition("/")[0]
    (run / other).mkdir()
    pack = opened.manifest.packs[0]
    (run / opened.info.key / pack.name).rename(run / other / pack.name)
    moved = replace(opened.manifest, packs=[replace(pack, generation=other)])
    report = export_ocdbt(dataclasses.replace(opened, manifest=moved))
    assert report.base != report.manifest
    place = {"driver": "ocdbt", "base": report.base, "manifest": report.manifest, "path": "w/"}
    array = tensorstore.open({"driver": "zarr3", "kvstore": place}, read=True).result()
    assert list(array.read().result()) == [0, 1, 2, 3, 4, 5]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[Any]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    array = np.arange(int(np.prod(shape))).astype(draw(st.sampled_from([np.uint8, np.float64]))).reshape(shape)
    boxes = boxes_between(shape, [draw(st.lists(st.integers(0, n), max_size=3)) for n in shape])
    if len(shape) == 2 and shape[0] > 2 and shape[1] > 2 and draw(st.booleans()):  # no grid at all
        n, m = shape
        boxes = [((0, 0), (2, m - 1)), ((0, m - 1), (n, 1)), ((2, 0), (n - 2, m - 1))]
    return array, boxes


@given(layouts(), st.sampled_from([16, 64, 4 << 20]))
@settings(max_examples=100, deadline=None)
def test_any_boxes_are_read_as_one_tensor(case: tuple[np.ndarray[Any, Any], list[Any]], target: int) -> None:
    array, boxes = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "TARGET_BYTES", target)
        opened = lay_out({"w": (array, boxes), "v": (array, boxes)}, chunk_bytes=64)
        export_ocdbt(opened)
    memory = InMemory(opened)
    for name in "wv":
        found = memory.array(name).read().result()
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)


def test_only_what_passes_the_end_of_a_pack_is_copied(tmp_path: Path, quick: None) -> None:
    values = np.random.default_rng(0).standard_normal((50_257, 64))
    generation = ckptfmt.save({"w": values, "v": np.ones((1024, 1024))}, tmp_path / "r")
    report = export_ocdbt(generation._opened)
    assert 0 < report.copied_nbytes < 9 << 20  # of 34 MB
    assert report.references == 5
    assert [key.rpartition(".")[2] for key in report.objects] == ["copies", "nodes", "ocdbt"]
    array = tensorstore.open(f"{report.base}|ocdbt:w/", read=True).result()
    assert np.array_equal(array.read().result(), values)
    assert np.array_equal(array[50_000:, 3].read().result(), values[50_000:, 3])


def test_there_is_one_database_and_a_second_one_leaves_nothing(tmp_path: Path, quick: None) -> None:
    opened = ckptfmt.save({"w": np.arange(6.0)}, tmp_path / "r")._opened
    report = export_ocdbt(opened)
    before = opened.site.backend.list(opened.folder)
    with pytest.raises(Conflict, match="has an OCDBT database already"):
        export_ocdbt(opened)
    assert opened.site.backend.list(opened.folder) == before
    assert set(report.objects) <= {info.key for info in before}


def faulty(opened: Opened, *faults: Fault) -> Opened:
    backend = FaultyBackend(opened.site.backend)
    for fault in faults:
        backend.add(fault)
    return dataclasses.replace(opened, site=dataclasses.replace(opened.site, backend=backend))


def test_of_two_writers_at_a_time_one_has_written_it() -> None:
    opened = lay_out({"w": (np.ones((5, 4)), NO_GRID)}, chunk_bytes=64)
    first: list[OcdbtExport] = []

    def overtaken(call: Call) -> bool:
        if call.key.endswith(ocdbt.MANIFEST):
            first.append(export_ocdbt(opened))
        return False

    raced = faulty(opened, Fault("create", when=overtaken))
    with pytest.raises(Conflict, match="has an OCDBT database already"):
        export_ocdbt(raced)
    names = {info.key for info in opened.site.backend.list(opened.folder) if "ocdbt" in info.key}
    assert names == set(first[0].objects)
    assert np.array_equal(InMemory(opened).array("w").read().result(), np.ones((5, 4)))


def test_damage_in_what_is_copied_is_an_error_and_leaves_nothing() -> None:
    opened = lay_out({"a": (np.ones((5, 4)), NO_GRID), "b": (np.ones((5, 4)), NO_GRID)}, chunk_bytes=64)
    damage(opened, "b")
    before = opened.site.backend.list(opened.folder)
    with pytest.raises(Corrupt, match="tensor 'b'"):
        export_ocdbt(opened)
    assert opened.site.backend.list(opened.folder) == before


@pytest.mark.parametrize("name", ["copies", "nodes", ocdbt.MANIFEST])
def test_a_storage_that_fails_leaves_no_database(name: str) -> None:
    opened = lay_out({"w": (np.ones((5, 4)), NO_GRID)}, chunk_bytes=64)
    op = "finish" if name == "copies" else "create"
    failing = faulty(opened, Fault(op, error=lambda: Unavailable("gone"), when=lambda call: call.key.endswith(name)))
    with pytest.raises(Unavailable, match="gone"):
        export_ocdbt(failing)
    with pytest.raises(NotFound):
        opened.site.backend.head(f"{opened.folder}/{ocdbt.MANIFEST}")
    export_ocdbt(opened)
    assert np.array_equal(InMemory(opened).array("w").read().result(), np.ones((5, 4)))


def test_a_manifest_whose_answer_is_lost_has_what_it_refers_to() -> None:
    opened = lay_out({"w": (np.ones((5, 4)), NO_GRID)}, chunk_bytes=64)
    lost = Fault(
        "create",
        error=lambda: Unavailable("lost"),
        timing="after",
        when=lambda call: call.key.endswith(ocdbt.MANIFEST),
    )
    with pytest.raises(Unavailable, match="lost"):
        export_ocdbt(faulty(opened, lost))
    assert np.array_equal(InMemory(opened).array("w").read().result(), np.ones((5, 4)))


def test_a_save_writes_it_once_it_is_committed(tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture) -> None:
    with ckptfmt.open(tmp_path / "r") as repo:
        with repo.checkpointer() as checkpointer:
            pending = checkpointer.save({"w": np.arange(6.0)}, step=1)
            assert pending is not None
            pending.add_done_callback(index_when_committed)
        generation = repo.latest("default")
        array = tensorstore.open(f"{generation.url}/|ocdbt:w/", read=True).result()
        assert list(array.read().result()) == [0, 1, 2, 3, 4, 5]
        assert generation.verify().ok
        with caplog.at_level(logging.WARNING, "ckptfmt"):
            pending.add_done_callback(index_when_committed)  # a second time: told, and nobody's failure
        assert "no OCDBT database was written" in caplog.text


def test_a_save_that_failed_has_none_and_its_error_is_still_to_be_told() -> None:
    def never(row: object) -> Any:
        raise AssertionError("nothing was committed")

    pending = PendingSave(key="a" * 32, step=1, run="r", open_generation=never)
    pending.add_done_callback(index_when_committed)
    error = Unavailable("gone")
    pending.failed(error)
    assert pending.unseen_error() is error


def test_the_front_s_own_face_agrees(tmp_path: Path, quick: None) -> None:
    generation = ckptfmt.save({"w": np.arange(12.0).reshape(3, 4)}, tmp_path / "r")
    report = export_ocdbt(generation._opened)
    plain = tensorstore.open(f"{report.base}|ocdbt:w/", read=True).result()
    ours = generation.tensorstore("w")
    assert (plain.dtype, plain.shape) == (ours.dtype, ours.shape)
    assert plain.chunk_layout.read_chunk.shape == ours.chunk_layout.read_chunk.shape
