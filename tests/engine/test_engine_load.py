"""How stored tensors are found, and matched with live ones: what is settled at a glance, and what is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt import PerRank, connect
from ckptfmt.engine import stored
from ckptfmt.engine.load.load import load_state
from ckptfmt.engine.numpy_family import BlobFamily, NumpyFamily
from ckptfmt.engine.stored import StoredTensors
from ckptfmt.errors import Mismatch, NotFound
from ckptfmt.format.boxes import whole
from ckptfmt.ports.arrays import ArrayFamily
from ckptfmt.torch.family import TorchFamily

GOLDEN = Path(__file__).parent.parent / "golden"


# -- rows -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["v1-one-rank", "v1-two-ranks"])
def test_rows_made_at_once_are_those_made_one_by_one(name: str) -> None:
    """The two repositories hold tensors in several boxes and chunks, empty ones, tied ones and those of one rank."""
    with ckptfmt.open(GOLDEN / name, mode="r", catalog="none") as repo:
        opened = repo.latest()._opened
    keys = [opened.pack_key(pack.name, pack.generation) for pack in opened.manifest.packs]
    tensors = opened.manifest.tensors
    every = StoredTensors(opened.index, keys).all
    single = StoredTensors(opened.index, keys)
    assert [row.name for row in every] == tensors.name
    assert [single.find(row.name, row.rank) for row in every] == list(every)
    assert [list(row.boxes) for row in every] == [list(row.meeting(whole(row.shape))) for row in every]
    assert max(len(row.boxes) for row in every) > 1 or name == "v1-one-rank"
    assert [row.nbytes for row in every] == [opened.index.entry(number).nbytes for number in range(len(every))]
    with pytest.raises(NotFound):
        single.find("nobody", 0)


def test_who_asks_for_many_tensors_has_all_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_FEW", 3)
    tied = np.arange(3)
    state = {f"t{i}": np.arange(i) for i in range(8)} | {"tied": tied, "tied too": tied}
    found = ckptfmt.save(state, tmp_path)._opened.stored
    made = {name: found.find(name, 0) for name in state}
    assert "all" in vars(found)
    assert made["tied too"].name == "tied"
    assert all(found.find(name, 0) == row for name, row in made.items())
    assert [row.shape for row in found.all] == [*((i,) for i in range(8)), (3,)]


def test_a_rank_s_own_torch_tensor_asks_for_torch(tmp_path: Path) -> None:
    saved = ckptfmt.save({"own": PerRank({"t": torch.arange(3)}), "a": np.arange(3)}, tmp_path)
    asked: list[bool] = []

    def families_for(framework: Any, *, saved_torch: bool) -> Any:
        asked.append(saved_torch)
        return connect.families_for(framework, saved_torch=saved_torch)

    for subtree in (None, "own", "a"):
        load_state(saved._opened, families_for, subtree=subtree)
    assert asked == [True, True, False]


# -- ties -------------------------------------------------------------------------------------------------
Array = Callable[[np.ndarray[Any, Any]], Any]
LIBRARIES = pytest.mark.parametrize("of", [np.copy, lambda x: torch.from_numpy(x.copy())], ids=["numpy", "torch"])


@LIBRARIES
def test_values_that_begin_at_one_address_are_told_apart(tmp_path: Path, of: Array) -> None:
    numbers = np.arange(1, 7, dtype=np.float32)
    ckptfmt.save(
        {"whole": of(numbers), "head": of(numbers[:2]), "table": of(numbers.reshape(2, 3)), "same": of(numbers)},
        tmp_path,
    )
    base = of(np.zeros(6, np.float32))
    live = {"whole": base, "head": base[:2], "table": base.reshape(2, 3), "same": base}
    report = ckptfmt.restore(live, tmp_path)
    assert report.loaded == ("whole", "head", "table", "same")
    assert report.nbytes == 4 * (6 + 2 + 6)  # the tied one once
    np.testing.assert_array_equal(np.asarray(base), numbers)


@LIBRARIES
def test_one_live_tensor_cannot_be_two_saved_ones(tmp_path: Path, of: Array) -> None:
    ckptfmt.save({"a": of(np.arange(6.0)), "b": of(np.arange(6.0)[:3]), "c": of(np.arange(6.0) + 1)}, tmp_path)
    base = of(np.zeros(6))
    with pytest.raises(Mismatch, match="a and c: one tensor here, but saved were two that differ"):
        ckptfmt.restore({"a": base, "b": base[:3], "c": base}, tmp_path)
    assert not np.asarray(base).any()


@LIBRARIES
@pytest.mark.parametrize("names", ["ab", "ba"])
def test_a_tie_is_seen_where_one_of_the_two_would_be_cast(tmp_path: Path, of: Array, names: str) -> None:
    """One is settled at a glance, the other is not, in either order."""
    ckptfmt.save({"a": of(np.ones(4, np.float32)), "b": of(np.ones(4, np.float64))}, tmp_path)
    one = of(np.zeros(4, np.float32))
    with pytest.raises(Mismatch, match="one tensor here, but saved were two that differ"):
        ckptfmt.restore(dict.fromkeys(names, one), tmp_path, cast=True)


@LIBRARIES
def test_strided_values_are_tied_as_dense_ones_are(tmp_path: Path, of: Array) -> None:
    matrix = np.arange(12, dtype=np.int32).reshape(4, 3)
    ckptfmt.save({"a": of(matrix), "b": of(matrix), "dense": of(matrix.T)}, tmp_path)
    base = of(np.zeros((3, 4), np.int32))
    report = ckptfmt.restore({"a": base.T, "b": base.T, "dense": base}, tmp_path)
    assert report.nbytes == 2 * matrix.nbytes
    np.testing.assert_array_equal(np.asarray(base), matrix.T)


def test_a_report_has_the_order_of_the_live_state(tmp_path: Path) -> None:
    state = {"z": np.ones(2), "n": 1, "list": [torch.ones(2), "word", np.ones(1)], "a": np.ones(3).T, "e": np.ones(0)}
    ckptfmt.save(state, tmp_path)
    live = {"z": np.zeros(2), "n": 0, "list": [torch.zeros(2), "", np.zeros(1)], "a": np.zeros(3), "e": np.ones(0)}
    assert ckptfmt.restore(live, tmp_path).loaded == ("z", "n", "list.0", "list.1", "list.2", "a", "e")


# -- at a glance ------------------------------------------------------------------------------------------
def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def nested() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # a prototype, says torch
        return torch.nested.nested_tensor([torch.zeros(3)] * 2)


class Subclass(np.ndarray[Any, Any]):
    pass


NOT_AT_A_GLANCE: dict[str, tuple[ArrayFamily, Any, str, tuple[int, ...]]] = {
    "another dtype": (NumpyFamily(), np.zeros(3), "float32", (3,)),
    "another shape": (NumpyFamily(), np.zeros(3), "float64", (3, 1)),
    "read-only": (NumpyFamily(), read_only(np.zeros(3)), "float64", (3,)),
    "broadcast": (NumpyFamily(), np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,)), "float64", (3,)),
    "big-endian": (NumpyFamily(), np.zeros(3, ">f8"), "float64", (3,)),
    "transposed": (NumpyFamily(), np.zeros((3, 2)).T, "float64", (2, 3)),
    "empty": (NumpyFamily(), np.zeros(0), "float64", (0,)),
    "subclass": (NumpyFamily(), np.zeros(3).view(Subclass), "float64", (3,)),
    "bytes": (BlobFamily(), b"abc", "uint8", (3,)),
    "torch, another dtype": (TorchFamily(), torch.zeros(3), "bfloat16", (3,)),
    "torch, another shape": (TorchFamily(), torch.zeros(3), "float32", (1, 3)),
    "torch, transposed": (TorchFamily(), torch.zeros(3, 2).t(), "float32", (2, 3)),
    "torch, expanded": (TorchFamily(), torch.zeros(1).expand(3), "float32", (3,)),
    "torch, empty": (TorchFamily(), torch.zeros(0), "float32", (0,)),
    "torch, meta": (TorchFamily(), torch.zeros(3, device="meta"), "float32", (3,)),
    "torch, conjugate": (TorchFamily(), torch.zeros(3, dtype=torch.complex64).conj(), "complex64", (3,)),
    "torch, negative": (TorchFamily(), torch.zeros(3, dtype=torch.complex64).conj().imag, "float32", (3,)),
    "torch, sparse": (TorchFamily(), torch.eye(3).to_sparse(), "float32", (3, 3)),
    "torch, nested": (TorchFamily(), nested(), "float32", (2, 3)),
    "torch, freed": (TorchFamily(), torch.zeros(3), "float32", (3,)),
    "torch, subclass": (TorchFamily(), torch.zeros(3).as_subclass(type("T", (torch.Tensor,), {})), "float32", (3,)),
}
NOT_AT_A_GLANCE["torch, freed"][1].untyped_storage().resize_(0)


@pytest.mark.parametrize("case", NOT_AT_A_GLANCE)
def test_a_value_with_anything_special_is_looked_at_closely(case: str) -> None:
    family, value, dtype, shape = NOT_AT_A_GLANCE[case]
    assert family.takes(value, dtype, shape) is None


@pytest.mark.parametrize(
    ("family", "value"),
    [
        (NumpyFamily(), np.zeros((2, 3))),
        (NumpyFamily(), np.zeros((4, 3))[1:3]),
        (TorchFamily(), torch.zeros(2, 3, dtype=torch.float64)),
        (TorchFamily(), torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.float64)[1:3])),
    ],
)
def test_a_plain_value_has_its_address_told(family: ArrayFamily, value: Any) -> None:
    assert family.takes(value, "float64", (2, 3)) == family.host_address(value) is not None
