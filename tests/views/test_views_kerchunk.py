"""``ckptfmt export --kerchunk``: what zarr opens through fsspec where there is no ckptfmt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_rig import MANIFEST, front, lay_out, merged, on_disk, open_folder, write_rank
from reshard_rig import grid as boxes_between

import ckptfmt
from ckptfmt.engine.opened import Opened
from ckptfmt.errors import Conflict, Corrupt, InvalidInput, NotFound
from ckptfmt.exchange.kerchunk import export_kerchunk, reader_url
from ckptfmt.views import grid as grids
from ckptfmt.views.zarr_nodes import node_name

READER = """
import json, sys

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
import warnings
import zarr

warnings.simplefilter("error")
group = zarr.open_group("reference://", storage_options={"fo": sys.argv[1]}, mode="r")
found = {}
for name in group.array_keys():
    array = group[name]
    found[name] = [str(array.dtype), list(array.shape), array[...].tobytes().hex()]
print(json.dumps(found))
"""


def read_elsewhere(path: Path) -> dict[str, Any]:
    """Node -> (dtype, shape, bytes), as a process without ckptfmt reads it."""
    done = subprocess.run([sys.executable, "-c", READER, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {
        name: (dtype, tuple(shape), bytes.fromhex(data))
        for name, (dtype, shape, data) in json.loads(done.stdout).items()
    }


def resolved(path: Path, opened: Opened) -> dict[str, bytes | str]:
    """Key -> what it refers to, read by hand; references into packs go to the backend of ``opened``."""
    root = reader_url(opened.site.backend.url)
    found: dict[str, bytes | str] = {}
    for key, value in json.loads(path.read_text())["refs"].items():
        if isinstance(value, str):
            found[key] = value
            continue
        url, offset, nbytes = value
        data = bytearray(nbytes)
        if url.startswith("file://") and not url.startswith(root):
            data[:] = Path(url.removeprefix("file://")).read_bytes()[offset : offset + nbytes]
        else:
            opened.site.backend.read_into(url.removeprefix(f"{root}/"), offset, memoryview(data))
        found[key] = bytes(data)
    return found


def test_a_process_without_ckptfmt_reads_everything(tmp_path: Path, quick: None) -> None:
    import torch

    state = {
        "model": {"w": torch.randn(70, 33), "half": torch.randn(5, 6).to(torch.bfloat16), "n": torch.arange(4)},
        "none": np.zeros((0, 3)),
        "scalar": np.full((), 7),
        "f8": torch.randn(9).to(torch.float8_e4m3fn),
        "odd/name {{u}} ü": np.ones(3),
    }
    generation = ckptfmt.save(state, tmp_path / "a repository")
    report = export_kerchunk(generation._opened, tmp_path / "refs.json")
    assert (report.arrays, report.as_bytes) == (7, ("model.half", "f8"))
    found = read_elsewhere(tmp_path / "refs.json")
    assert set(found) == {node_name(name) for name in generation}
    for name in generation:
        dtype, shape, data = found[node_name(name)]
        stored = generation[name]
        assert data == np.asarray(stored).tobytes(), name
        assert (dtype, shape) == {
            "model.half": ("uint8", (5, 6, 2)),
            "f8": ("uint8", (9,)),
        }.get(name, (stored.dtype, stored.shape))


@pytest.mark.parametrize("cuts", [[[3, 6], []], [[4], [5]], [[1, 2, 9], [3]]], ids=["uneven", "2-D", "odd"])
def test_what_many_ranks_saved_is_read_elsewhere(tmp_path: Path, cuts: list[list[int]]) -> None:
    array = np.arange(100, dtype=np.float32).reshape(10, 10)
    boxes = boxes_between(array.shape, cuts)
    backend = on_disk(tmp_path / "r")
    states = [
        {"w": ckptfmt.Sharded(np.ascontiguousarray(array[a : a + n, b : b + m]), array.shape, (a, b))}
        for (a, b), (n, m) in boxes
    ]
    parts = [write_rank(backend, state, rank, len(states)) for rank, state in enumerate(states)]
    backend.create(f"g/{MANIFEST}", merged(parts))
    export_kerchunk(open_folder(tmp_path / "r"), tmp_path / "refs.json")
    assert read_elsewhere(tmp_path / "refs.json") == {"w": ("float32", (10, 10), array.tobytes())}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[Any]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    kind = draw(st.sampled_from([np.uint8, np.int16, np.float64, ml_dtypes.bfloat16]))
    array = np.arange(int(np.prod(shape))).astype(kind).reshape(shape)
    boxes = boxes_between(shape, [draw(st.lists(st.integers(0, n), max_size=3)) for n in shape])
    if len(shape) == 2 and shape[0] > 2 and shape[1] > 2 and draw(st.booleans()):  # no grid at all
        n, m = shape
        boxes = [((0, 0), (2, m - 1)), ((0, m - 1), (n, 1)), ((2, 0), (n - 2, m - 1))]
    return array, boxes


@given(layouts(), st.sampled_from([16, 64, 4 << 20]))
@settings(max_examples=100, deadline=None)
def test_every_chunk_is_whole_and_its_bytes_are_the_tensor_s(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[np.ndarray[Any, Any], list[Any]], target: int
) -> None:
    array, boxes = case
    path = tmp_path_factory.mktemp("refs") / "refs.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "TARGET_BYTES", target)
        opened = lay_out({"w": (array, boxes)}, chunk_bytes=64)
        report = export_kerchunk(opened, path)
    found = resolved(path, opened)
    document = json.loads(found["w/zarr.json"])
    edges = tuple(document["chunk_grid"]["configuration"]["chunk_shape"])
    dtype = np.dtype("u1") if array.dtype == ml_dtypes.bfloat16 else array.dtype
    seen = np.zeros(tuple(document["shape"]), dtype)
    for key, data in found.items():
        if key.startswith("w/c"):
            at = [int(number) * edge for number, edge in zip(key.split("/")[2:], edges, strict=True)]
            inside = tuple(slice(a, a + edge) for a, edge in zip(at, edges, strict=True))
            part = seen[(*inside, ...)]
            chunk = np.frombuffer(data, dtype).reshape(edges)  # type: ignore[arg-type]
            part[...] = chunk[tuple(map(slice, part.shape))]
    assert seen.tobytes() == array.tobytes()
    assert (report.side_file is not None) == (report.copied_nbytes > 0)


def test_bytes_are_not_copied_but_for_the_end_of_a_pack(tmp_path: Path, quick: None) -> None:
    state = {"w": np.random.default_rng(0).standard_normal((50_257, 64)), "v": np.ones((1024, 1024))}
    report = export_kerchunk(ckptfmt.save(state, tmp_path / "r")._opened, tmp_path / "refs.json")
    assert report.copied_nbytes < 8 << 20  # of 34 MB
    assert report.references == 5


def test_readers_may_reach_the_repository_elsewhere(tmp_path: Path, quick: None) -> None:
    opened = ckptfmt.save({"w": np.ones(3)}, tmp_path / "r")._opened
    export_kerchunk(opened, tmp_path / "refs.json", root="s3://bucket/ckpts/")
    url, *_ = json.loads((tmp_path / "refs.json").read_text())["refs"]["w/c/0"]
    assert url == f"s3://bucket/ckpts/{opened.stored.all[0].boxes[0].pack}"


def test_nothing_is_overwritten_and_nothing_is_left_by_a_failure(tmp_path: Path, quick: None) -> None:
    generation = ckptfmt.save({"w": np.ones((5, 4))}, tmp_path / "r")
    target = tmp_path / "refs.json"
    target.write_text("mine")
    with pytest.raises(Conflict, match="is there already"):
        export_kerchunk(generation._opened, target)
    assert target.read_text() == "mine"
    with pytest.raises(NotFound, match="make the folder"):
        export_kerchunk(generation._opened, tmp_path / "no" / "refs.json")
    with pytest.raises(InvalidInput, match=r"the ending \.json"):
        export_kerchunk(generation._opened, tmp_path / "refs")
    boxes = [((0, 0), (2, 3)), ((0, 3), (5, 1)), ((2, 0), (3, 3))]
    opened = lay_out({"a": (np.ones((5, 4)), boxes), "b": (np.ones((5, 4)), boxes)}, chunk_bytes=64)
    damaged = opened.stored.find("b", None).boxes[0]
    key = damaged.pack
    data = bytearray(opened.site.backend.read(key, limit=1 << 20))
    data[damaged.offset] ^= 1
    opened.site.backend.delete(key)
    opened.site.backend.create(key, bytes(data))
    with pytest.raises(Corrupt, match="tensor 'b'"):
        export_kerchunk(opened, tmp_path / "other.json")
    assert {path.name for path in tmp_path.iterdir()} == {"r", "refs.json"}


def test_the_front_s_own_zarr_agrees(tmp_path: Path, quick: None) -> None:
    """The store and the references show a tensor that both know in the same way."""
    generation = ckptfmt.save({"w": np.arange(12.0).reshape(3, 4)}, tmp_path / "r")
    export_kerchunk(generation._opened, tmp_path / "refs.json")
    document = json.loads((tmp_path / "refs.json").read_text())["refs"]["w/zarr.json"]
    shown = front(generation._opened).zarr().get_sync("w/zarr.json")
    assert shown is not None
    assert json.loads(document) == json.loads(shown.to_bytes())
