"""The README's table of element types, cell by cell, by reading tensors of all types with the tools that it names."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from readme_places import before, table

import ckptfmt
from ckptfmt.format.dtypes import DTYPES

COLUMNS = ["zarr", "references", "tensorstore", "safetensors", "safetensors_numpy", "torchs_reader"]


def all_types() -> dict[str, torch.Tensor]:
    found = {}
    for name in DTYPES:
        kind = getattr(torch, name)
        data = torch.arange(8 * kind.itemsize, dtype=torch.uint8)
        found[name] = (data % 2 if name == "bool" else data).view(kind).reshape(4, 2)
    return found


def promised() -> dict[str, list[str]]:
    """Element type -> the words of its row."""
    found: dict[str, list[str]] = {}
    rest = set(DTYPES)
    for types, *cells in table("element types"):
        patterns = re.findall(r"`([^`]+)`", types) if types != "all others" else ["*"]
        for pattern in patterns:
            matching = {name for name in rest if fnmatchcase(name, pattern)}
            assert matching, f"{pattern} is no element type, or stands twice"
            found |= {name: [cell.partition(",")[0].strip("*`") for cell in cells] for name in matching}
            rest -= matching
    assert rest == set()
    return found


class Readers:
    """What the columns read, one tensor at a time."""

    def __init__(self, generation: ckptfmt.Generation, exports: Path) -> None:
        import zarr

        self.generation = generation
        self.folder = generation.url.removeprefix("file://")
        (self.pack,) = Path(self.folder).glob("*.safetensors")
        self.exported = exports / "llama/model.safetensors"
        self.group = generation.zarr_group()
        self.refs = zarr.open_group("reference://", mode="r", storage_options={"fo": str(exports / "refs.json")})

    def zarr(self, name: str) -> list[Any]:
        import dask.array
        import xarray

        data = xarray.open_zarr(self.generation.zarr(), consolidated=False, chunks=None)
        array = self.group[f"model.{name}"]
        return [array[...], dask.array.from_zarr(array).compute(), data[f"model.{name}"].values]

    def references(self, name: str) -> list[Any]:
        return [self.refs[f"model.{name}"][...]]

    def tensorstore(self, name: str) -> list[Any]:
        import tensorstore

        kvstore = {"driver": "ocdbt", "base": f"{self.generation.url}/", "path": f"model.{name}/"}
        alone = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()
        return [one.read().result() for one in (self.generation.tensorstore(f"model.{name}"), alone)]

    def safetensors(self, name: str, framework: str = "pt") -> list[Any]:
        from safetensors import safe_open

        found = []
        for file, prefix in ((self.pack, "model."), (self.exported, "")):
            with safe_open(file, framework) as tensors:
                found.append(tensors.get_tensor(prefix + name))
        return found

    def safetensors_numpy(self, name: str) -> list[Any]:
        import ml_dtypes  # noqa: F401

        return self.safetensors(name, "numpy")

    def torchs_reader(self, name: str) -> list[Any]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        kind = getattr(torch, name)
        into = {f"model.{name}": torch.zeros(8 * kind.itemsize, dtype=torch.uint8).view(kind).reshape(4, 2)}
        dcp.load(into, storage_reader=HuggingFaceStorageReader(self.folder))
        return [*into.values()]


def raw(value: Any) -> bytes:
    return bytes(value.view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor) else value.tobytes())


def outcome(name: str, saved: torch.Tensor, read: Callable[[str], list[Any]]) -> str:
    """In the table's words."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        values = read(name)
    except (CheckpointException, TypeError, AttributeError):  # numpy has no such type
        return "refused"
    if any(raw(value) != raw(saved) for value in values):
        return "wrong"
    (kind,) = {str(value.dtype).removeprefix("torch.") for value in values}
    return "yes" if kind == name else kind


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_element_type_comes_out_as_the_table_says(tmp_path: Path) -> None:
    state = all_types()
    generation = ckptfmt.save({"model": state}, tmp_path / "ckpts", run="llama")
    for place in ("references", "ocdbt", "files"):
        before(place, tmp_path / "ckpts")
    readers = Readers(generation, tmp_path)
    columns = [getattr(readers, name) for name in COLUMNS]
    found = {name: [outcome(name, saved, read) for read in columns] for name, saved in state.items()}
    assert found == promised()
