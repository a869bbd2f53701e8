"""``load`` builds: the whole or a part, as torch or numpy, with or without torch, and slices read lazily."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from content_fixtures import exact, trained
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import ckptfmt


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {"a": torch.arange(12.0).view(3, 4), "b.c": torch.ones(2, dtype=torch.bfloat16)},
        "arrays": {"x": np.arange(5), "y": np.ones((2, 2), np.float16)},
        "list": [torch.zeros(2), {"t": torch.ones(1), "n": 3}],
        "pair": (torch.full((1,), 7.0), 8),
        "own": ckptfmt.PerRank({"seed": torch.tensor([5]), "pos": 6}),
        "epoch": 4,
        "blob": bytes(range(256)) * 8,
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where: Path = tmp_path_factory.mktemp("load")
    ckptfmt.save(parts(), where, step=3, metadata={"who": "me", "n": (1, 2)}, tags=["t"])
    return where


@pytest.fixture
def generation(place: Path) -> ckptfmt.Generation:
    with ckptfmt.open(place, mode="r") as repository:
        return repository.latest()


# -- parts ------------------------------------------------------------------------------------------------
def test_a_subtree_is_loaded_by_itself(place: Path) -> None:
    state = parts()
    state["own"] = state["own"].value
    for dotted, value in [
        ("model", state["model"]),
        ("model.a", state["model"]["a"]),
        ("model.b.c", state["model"]["b.c"]),
        ("list.1", state["list"][1]),
        ("pair.0", state["pair"][0]),
        ("epoch", 4),
        ("own.pos", 6),
        ("own.seed", state["own"]["seed"]),
        ("blob", state["blob"]),
        ("", state),
    ]:
        assert exact(ckptfmt.load(place, subtree=dotted)) == exact(value), dotted
    with pytest.raises(ckptfmt.NotFound, match=r"nothing at 'modle'.*'model'"):
        ckptfmt.load(place, subtree="modle")


def test_patterns_choose_tensors(place: Path) -> None:
    found = ckptfmt.load(place, keys=["model.*", "blob"])
    state = parts()
    kept = {"model": state["model"], "arrays": {}, "own": {"pos": 6}, "epoch": 4, "blob": state["blob"]}
    assert exact(found) == exact(kept)
    found = ckptfmt.load(place, exclude=["*.a", "arrays.x", "list.*", "pair.*"])
    assert list(found["model"]) == ["b.c"]
    assert list(found["arrays"]) == ["y"]
    assert {"list", "pair"}.isdisjoint(found), "a list of which nothing is wanted goes as a whole"
    assert exact(found["own"]) == exact({"seed": torch.tensor([5]), "pos": 6})
    found = ckptfmt.load(place, subtree="model", exclude="*.a")
    assert list(found) == ["b.c"]


def test_patterns_that_tear_a_list_apart_or_match_nothing_are_errors(place: Path) -> None:
    with pytest.raises(ckptfmt.InvalidInput, match=r"leave out 'list\.0', an item of a list"):
        ckptfmt.load(place, keys=["list.1*"])
    for options in ({"keys": "nothing*"}, {"exclude": "*"}, {"keys": "model.*", "exclude": "*"}):
        with pytest.raises(ckptfmt.Mismatch, match="no tensor matches") as caught:
            ckptfmt.load(place, **options)
        assert caught.value.kind == "nothing_loaded"
    with pytest.raises(ckptfmt.InvalidInput):
        ckptfmt.load(place, keys=[""])


def test_everything_can_be_left_out_of_other_containers_too(tmp_path: Path) -> None:
    ckptfmt.save({"w": torch.ones(1), "d": deque([torch.zeros(1), 5]), "rng": ckptfmt.Rng()}, tmp_path)
    assert list(ckptfmt.load(tmp_path, keys="w")) == ["w", "rng"]
    with pytest.raises(ckptfmt.NotFound, match="nothing at"):
        ckptfmt.load(tmp_path, subtree="d.7")


def test_a_model_for_inference_comes_without_its_optimizer(tmp_path: Path) -> None:
    state = trained(1)
    ckptfmt.save(state, tmp_path)
    weights = ckptfmt.load(tmp_path, subtree="model")
    fresh = trained(2)["model"]
    fresh.load_state_dict(weights)
    assert exact(fresh) == exact(state["model"])


# -- frameworks and devices ---------------------------------------------------------------------------------
def test_frameworks(place: Path) -> None:
    as_numpy = ckptfmt.load(place, framework="numpy")
    assert as_numpy["model"]["b.c"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(as_numpy["model"]["a"], np.arange(12.0).reshape(3, 4))
    assert type(as_numpy["arrays"]["x"]) is np.ndarray
    as_torch = ckptfmt.load(place, framework="torch")
    assert as_torch["arrays"]["y"].dtype is torch.float16
    assert as_torch["arrays"]["x"].tolist() == [0, 1, 2, 3, 4]
    saved = ckptfmt.load(place)
    assert type(saved["arrays"]["x"]) is np.ndarray
    assert type(saved["model"]["a"]) is torch.Tensor
    with pytest.raises(ckptfmt.InvalidInput, match="framework='jax'"):
        ckptfmt.load(place, framework="jax")  # type: ignore[arg-type]


def test_devices(place: Path) -> None:
    assert ckptfmt.load(place, subtree="model", device="cpu")["a"].device.type == "cpu"
    with pytest.raises(ckptfmt.InvalidInput, match="meta device would hold nothing"):
        ckptfmt.load(place, subtree="model", device="meta")
    with pytest.raises(ckptfmt.InvalidInput, match=r'framework="torch"'):
        ckptfmt.load(place, subtree="arrays", device="cuda")
    with pytest.raises(ckptfmt.InvalidInput, match="nowhere"):
        ckptfmt.load(place, subtree="model", device="nowhere")


def test_what_is_loaded_is_the_callers_to_change(place: Path) -> None:
    first, second = ckptfmt.load(place), ckptfmt.load(place)
    first["model"]["a"].zero_()
    first["arrays"]["x"][:] = 9
    assert exact(second["model"]) == exact(parts()["model"])
    assert exact(ckptfmt.load(place)["arrays"]) == exact(parts()["arrays"])


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )


HIDE_TORCH = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.partition(".")[0] == "torch" else find(name, path, target)
)
import ckptfmt, numpy as np
url = sys.argv[1]
"""


def test_without_torch_its_tensors_come_as_arrays(place: Path) -> None:
    run(
        HIDE_TORCH
        + """
state = ckptfmt.load(url)
assert type(state["model"]["a"]) is np.ndarray and state["model"]["a"].shape == (3, 4)
assert state["model"]["b.c"].dtype.name == "bfloat16"
assert state["own"]["seed"].tolist() == [5] and state["epoch"] == 4
generation = ckptfmt.open(url, mode="r").latest()
assert generation["model.a"][1:, 2].tolist() == [6.0, 10.0]
assert generation.metadata == {"who": "me", "n": (1, 2)} and generation.verify().ok
try:
    ckptfmt.load(url, framework="torch")
except ckptfmt.InvalidInput as error:
    assert "torch is not installed" in str(error)
else:
    raise AssertionError
assert "torch" not in sys.modules
""",
        place,
    )


def test_without_torch_its_value_types_are_foreign_or_a_clear_error(tmp_path: Path) -> None:
    values = {"size": torch.Size([2]), "dtype": torch.bfloat16}
    ckptfmt.save({"w": torch.ones(2), "values": values}, tmp_path, metadata=values)
    code = """
generation = ckptfmt.open(url, mode="r").latest()
assert generation.metadata["size"] == ckptfmt.Foreign("torch.Size", [2])
assert generation.metadata["dtype"] == ckptfmt.Foreign("torch.dtype", "bfloat16")
assert ckptfmt.load(url, subtree="w").tolist() == [1.0, 1.0]
try:
    ckptfmt.load(url)
except ckptfmt.UnsupportedValue as error:
    assert "'torch.Size'" in str(error) and "(torch)" in str(error)
else:
    raise AssertionError
"""
    run(HIDE_TORCH + code, tmp_path)
    assert exact(ckptfmt.load(tmp_path, framework="numpy")["values"]) == exact(values)


@pytest.mark.slow
def test_torchs_value_types_are_known_wherever_torch_is(tmp_path: Path) -> None:
    """Whether or not any tensor was touched before."""
    values = {"size": torch.Size([2]), "dtype": torch.bfloat16}
    ckptfmt.save(values, tmp_path, metadata=values)
    run(
        """
import os, sys, torch, ckptfmt
values = {"size": torch.Size([2]), "dtype": torch.bfloat16}
child = os.fork()  # two processes that have loaded nothing of the library yet, for one import of torch
if child == 0:
    assert ckptfmt.load(sys.argv[1], framework='numpy') == values
else:
    assert os.waitpid(child, 0)[1] == 0
    assert ckptfmt.open(sys.argv[1], mode='r').latest().metadata == values
""",
        tmp_path,
    )


def test_a_broken_torch_stands_in_nobodys_way(place: Path, tmp_path: Path) -> None:
    """``framework="numpy"`` and looking at a generation never import it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('poisoned')\n")
    run(
        """
import sys
sys.path.insert(0, sys.argv[2])
import ckptfmt
url = sys.argv[1]
with ckptfmt.open(url, mode="r") as repository:
    generation = repository.latest()
    assert generation["model.a"].shape == (3, 4) and generation["model.a"].dtype == "float32"
    assert generation["arrays.x"][2:4].tolist() == [2, 3]
    assert generation["model.a"].read(framework="numpy").sum() == 66.0
    assert repository.runs()[0].latest.step == 3 and generation.verify().ok
assert ckptfmt.load(url, framework="numpy")["model"]["a"].sum() == 66.0
assert ckptfmt.load(url, subtree="arrays")["x"].tolist() == [0, 1, 2, 3, 4]
try:
    ckptfmt.load(url)
except ImportError as error:
    assert "poisoned" in str(error)
else:
    raise AssertionError
""",
        place,
        tmp_path,
    )


def test_numpy_states_load_without_importing_torch(tmp_path: Path) -> None:
    ckptfmt.save({"x": np.arange(3), "blob": bytes(3000)}, tmp_path)
    run(
        """
import sys, ckptfmt
state = ckptfmt.load(sys.argv[1])
generation = ckptfmt.open(sys.argv[1], mode="r").latest()
assert generation["x"][1:].tolist() == [1, 2] and generation["blob"].read().nbytes == 3000
live = {"x": state["x"] * 0, "blob": b""}
ckptfmt.restore(live, sys.argv[1])
assert live["x"].tolist() == [0, 1, 2] and live["blob"] == bytes(3000)
assert "torch" not in sys.modules
""",
        tmp_path,
    )


# -- a generation as a mapping --------------------------------------------------------------------------------
def test_a_generation_is_a_mapping_of_stored_tensors(place: Path, generation: ckptfmt.Generation) -> None:
    names = ["model.a", "model.b.c", "arrays.x", "arrays.y", "list.0", "list.1.t", "pair.0", "own.seed", "blob"]
    assert isinstance(generation, Mapping)
    assert list(generation) == names
    assert len(generation) == len(names)
    assert "model.a" in generation
    assert "model" not in generation
    assert {name: (t.dtype, t.shape) for name, t in generation.items()}["model.b.c"] == ("bfloat16", (2,))
    with pytest.raises(KeyError, match="no tensor 'model'"):
        generation["model"]
    assert generation.get("model") is None
    assert (generation.run, generation.step, generation.world_size, generation.tags) == ("default", 3, 1, ("t",))
    assert generation.parent_key is None
    assert generation.nbytes == sum(tensor.nbytes for tensor in generation.values())
    assert generation.metadata == {"who": "me", "n": (1, 2)}
    assert generation.url.endswith(generation.key)
    assert repr(generation) == f"<Generation #1 of run 'default', step 3, 9 tensors, {generation.nbytes} bytes>"
    with ckptfmt.open(place, mode="r") as repository:
        again = repository.generation(1)
    assert again == generation
    assert len({again, generation}) == 1


def test_a_stored_tensor_behaves_like_an_array(generation: ckptfmt.Generation) -> None:
    stored = generation["model.a"]
    assert repr(stored) == "<StoredTensor 'model.a' float32 [3, 4]>"
    assert (stored.name, stored.shape, stored.dtype) == ("model.a", (3, 4), "float32")
    assert (stored.nbytes, len(stored)) == (48, 3)
    array = np.asarray(stored)
    assert type(array) is np.ndarray
    assert np.array_equal(array, np.arange(12.0).reshape(3, 4))
    assert np.asarray(stored, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="always a copy"):
        np.array(stored, copy=False)
    assert [row.tolist() for row in stored] == array.tolist()
    assert torch.equal(stored.read(verify=False), torch.arange(12.0).view(3, 4))
    assert type(generation["arrays.x"].read()) is np.ndarray
    assert generation["arrays.x"].read(framework="torch").tolist() == [0, 1, 2, 3, 4]


def test_bad_indices_are_refused(generation: ckptfmt.Generation) -> None:
    stored = generation["model.a"]
    for index, why in [
        (3, "out of range"),
        (-4, "out of range"),
        ((0, 0, 0), "2 dimensions, the index has 3"),
        (slice(None, None, 2), "step 1"),
        (slice(None, None, -1), "step 1"),
        (True, "no index"),
        (None, "no index"),
        ([0, 1], "no index"),
        (1.0, "no index"),
        ((..., ...), "no index"),
    ]:
        with pytest.raises(IndexError, match=why):
            stored[index]


def test_a_tensor_without_dimensions_has_no_items(tmp_path: Path) -> None:
    stored = ckptfmt.save({"s": torch.tensor(5.0)}, tmp_path)["s"]
    assert stored[()] == stored[...] == 5.0
    with pytest.raises(TypeError, match="no length"):
        len(stored)
    with pytest.raises(TypeError, match="cannot be iterated"):
        list(stored)
    with pytest.raises(IndexError):
        stored[0]


SHAPES = [(), (1,), (7,), (0,), (3, 0, 2), (5, 4), (2, 3, 4), (4, 1, 3, 2), (3 << 20,), (3, 1 << 20), (1 << 20, 3)]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> tuple[ckptfmt.Generation, dict[str, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(0)
    arrays = {str(shape): rng.integers(0, 1 << 30, shape, np.int32) for shape in SHAPES}
    return ckptfmt.save(arrays, tmp_path_factory.mktemp("shapes")), arrays


def unit_steps(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(unit_steps, index))
    return slice(index.start, index.stop) if isinstance(index, slice) else index


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_slices_are_those_of_numpy(
    shapes: tuple[ckptfmt.Generation, dict[str, np.ndarray[Any, Any]]], data: st.DataObject
) -> None:
    generation, arrays = shapes
    name = data.draw(st.sampled_from(sorted(arrays)))
    array = arrays[name]
    index = data.draw(npst.basic_indices(array.shape, allow_newaxis=False).map(unit_steps))
    found, expected = generation[name][index], array[index]
    assert np.array_equal(found, expected)
    assert np.shape(found) == np.shape(expected)
    assert found.dtype == expected.dtype


# -- random states ----------------------------------------------------------------------------------------------
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.binary(min_size=1025, max_size=1100)
    | npst.arrays(
        npst.boolean_dtypes()
        | npst.integer_dtypes()
        | npst.unsigned_integer_dtypes()
        | npst.floating_dtypes(sizes=(16, 32, 64))
        | npst.complex_number_dtypes(sizes=(64, 128)),
        npst.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=4),
    )
)
KEYS = st.text(max_size=6) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2))
STATES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def checkpointer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ckptfmt.Checkpointer]:
    catalog = f"sqlite:///{tmp_path_factory.mktemp('catalog')}/catalog.sqlite"
    with (
        ckptfmt.open("memory://content-random-states", catalog=catalog) as repository,
        repository.checkpointer() as made,
    ):
        yield made


def native(value: Any) -> Any:
    """Arrays in native byte order, as a load gives them."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="))).reshape(value.shape)
    if isinstance(value, dict):
        return {key: native(item) for key, item in value.items()}
    return type(value)(map(native, value)) if isinstance(value, list | tuple) else value


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(state=STATES)
def test_random_states_come_back_equal(checkpointer: ckptfmt.Checkpointer, state: Any) -> None:
    pending = checkpointer.save({"state": state}, step=0)
    assert pending is not None
    generation = pending.result()
    assert exact(generation.load()["state"]) == exact(native(state))
    assert exact(generation.load(subtree="state")) == exact(native(state))
    live: dict[str, Any] = {}
    generation.restore(live)
    assert exact(live["state"]) == exact(native(state))
