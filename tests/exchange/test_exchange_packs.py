"""Packs as they lie in a repository, in the tools of others: safetensors, and torch's HuggingFaceStorageReader."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor
from exchange_fixtures import (
    SAFETENSORS_DTYPES,
    as_ranks,
    assert_same,
    many_tensors,
    random_bits,
    read_safetensors,
    same,
)
from reshard_rig import FOLDER, on_disk, write_rank
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException

import ckptfmt
from ckptfmt import PerRank, Sharded
from ckptfmt.errors import FormatError
from ckptfmt.exchange.foreign import open_foreign
from ckptfmt.format.dtypes import DTYPES


def folder_of(generation: ckptfmt.Generation) -> Path:
    return Path(generation.url.removeprefix("file://"))


def packed(tmp_path: Path, states: list[Any]) -> Path:
    """The packs of several ranks, in one folder."""
    backend = on_disk(tmp_path / "ranks")
    for rank, state in enumerate(states):
        write_rank(backend, state, rank, len(states))
    return tmp_path / "ranks" / FOLDER


def read_by_torch(folder: Path, into: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(into, storage_reader=HuggingFaceStorageReader(str(folder)))


def test_packs_open_in_safetensors(tmp_path: Path) -> None:
    tensors = many_tensors()
    generation = ckptfmt.save(tensors, tmp_path / "r")
    expected = tensors | {"of.float8_e8m0fnu": tensors["of.float8_e8m0fnu"].view(torch.uint8)}
    assert_same(read_safetensors(folder_of(generation)), expected)


KNOWN = [str(dtype).removeprefix("torch.") for dtype in SAFETENSORS_DTYPES if dtype is not torch.float8_e8m0fnu]
REFUSED = sorted({name for name in DTYPES if hasattr(torch, name)} - {*KNOWN, "float8_e8m0fnu"})


def test_packs_of_one_rank_in_torchs_reader(tmp_path: Path) -> None:
    tensors = {name: random_bits((6, 5), getattr(torch, name)) for name in KNOWN}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    folder = folder_of(ckptfmt.save({"model": tensors}, tmp_path / "r"))
    into = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_by_torch(folder, into)
    assert_same(into, {f"model.{name}": tensor for name, tensor in tensors.items()})


# What torch 2.13's reader gets wrong, as README.md lists it. If one of these fails, torch has learnt it.
def zeros(name: str) -> torch.Tensor:
    dtype = getattr(torch, name)
    return torch.zeros(8 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(4, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_safetensors_has_no_word_for_is_refused_by_torchs_reader(tmp_path: Path, name: str) -> None:
    data = torch.arange(8 * getattr(torch, name).itemsize, dtype=torch.uint8)
    folder = folder_of(ckptfmt.save({"w": data.view(getattr(torch, name)).reshape(4, 2)}, tmp_path / "r"))
    with pytest.raises(CheckpointException, match=r"Size mismatch|not implemented for"):
        read_by_torch(folder, {"w": zeros(name)})


def test_torchs_reader_takes_the_bytes_of_float8_e8m0fnu_for_numbers(tmp_path: Path) -> None:
    saved = torch.tensor([1.0, 2.0, 4.0, 8.0]).to(torch.float8_e8m0fnu)
    folder = folder_of(ckptfmt.save({"w": saved}, tmp_path / "r"))
    into = {"w": torch.zeros_like(saved)}
    read_by_torch(folder, into)
    assert not same(into["w"], saved)
    assert same(into["w"], saved.view(torch.uint8).to(torch.float8_e8m0fnu))
    into = {"w": torch.zeros(4, dtype=torch.uint8)}  # what can be done about it
    read_by_torch(folder, into)
    assert same(into["w"].view(torch.float8_e8m0fnu), saved)


def test_torchs_reader_has_one_tensor_where_each_rank_kept_its_own(tmp_path: Path) -> None:
    folder = packed(tmp_path, [{"own": PerRank(torch.full((2,), rank))} for rank in range(3)])
    into = {"own": torch.zeros(2, dtype=torch.int64)}
    read_by_torch(folder, into)
    assert into["own"].tolist() in ([0, 0], [1, 1], [2, 2])


def spread(world_size: int) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Whole tensors, and what each rank holds of them: rows, columns, and one that all have."""
    whole = {
        "rows": random_bits((13, 6), torch.float32, 1),
        "columns": random_bits((5, 11), torch.bfloat16, 2),
        "all": torch.arange(7),
    }
    states = []
    for rank in range(world_size):
        rows = range(13 * rank // world_size, 13 * (rank + 1) // world_size)
        columns = range(11 * rank // world_size, 11 * (rank + 1) // world_size)
        states.append(
            {
                "rows": Sharded(whole["rows"][rows.start : rows.stop], (13, 6), (rows.start, 0)),
                "columns": Sharded(whole["columns"][:, columns.start : columns.stop], (5, 11), (0, columns.start)),
                "all": whole["all"].clone(),
            }
        )
    return whole, states


def test_packs_of_many_ranks_are_put_together_by_torch(tmp_path: Path) -> None:
    whole, states = spread(4)
    folder = packed(tmp_path, states)
    into = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    read_by_torch(folder, into)
    assert_same(into, whole)


def _resharded(folder: Path, world_size: int, rank: int) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    whole, _ = spread(4)
    into = {
        "rows": distribute_tensor(torch.zeros_like(whole["rows"]), mesh, [Shard(1)]),
        "columns": distribute_tensor(torch.zeros_like(whole["columns"]), mesh, [Shard(0)]),
        "all": torch.zeros_like(whole["all"]),
    }
    read_by_torch(folder, into)
    full = {name: value.full_tensor() if name != "all" else value for name, value in into.items()}
    dist.barrier()
    return all(same(full[name], whole[name]) for name in whole)


def test_packs_of_four_ranks_are_loaded_by_three_with_other_placements(tmp_path: Path) -> None:
    folder = packed(tmp_path, spread(4)[1])
    assert as_ranks(3, tmp_path / "store", lambda rank: _resharded(folder, 3, rank)) == [True] * 3


def test_packs_of_many_ranks_without_their_manifest_are_whole_tensors_here(tmp_path: Path) -> None:
    whole, states = spread(3)
    folder = packed(tmp_path, states)
    with open_foreign(folder) as foreign:
        assert {name: len(tensor.boxes) for name, tensor in foreign.tensors.items()} == {
            "rows": 3,
            "columns": 3,
            "all": 1,
        }
        for name, tensor in foreign.tensors.items():
            found = b"".join(bytes(piece) for piece in tensor.pieces(50))
            assert found == whole[name].view(torch.uint8).numpy().tobytes()
    one = sorted(folder.glob("*.safetensors"))[0]
    with pytest.raises(FormatError, match="one pack of a generation that several ranks saved"):
        open_foreign(one)


def test_what_torchs_writer_wrote_is_read(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    state = {"w": random_bits((6, 5), torch.float32), "b": torch.arange(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(path=str(tmp_path / "hf"), fqn_to_index_mapping={"w": 1, "b": 2})
        dcp.save(state, storage_writer=writer)
    with open_foreign(tmp_path / "hf") as foreign:
        assert foreign.kind == "safetensors_folder"
        found = {name: b"".join(bytes(piece) for piece in one.pieces()) for name, one in foreign.tensors.items()}
    assert found == {name: tensor.numpy().tobytes() for name, tensor in state.items()}
