"""What other tools wrote becomes a committed generation, bit for bit."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor
import zarr
from exchange_fixtures import as_ranks, assert_same, many_tensors, random_bits, same, save_dcp
from forked import in_child
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file

import ckptfmt
from ckptfmt.errors import Conflict, FormatError, InvalidInput, NotFound, UnsupportedValue
from ckptfmt.exchange import foreign_zarr
from ckptfmt.exchange.foreign import Foreign, open_foreign
from ckptfmt.exchange.importing import import_checkpoint


def imported(source: Path, root: Path, **options: Any) -> Any:
    report = import_checkpoint(source, str(root), **options)
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    assert report.source_nbytes == sum(path.stat().st_size for path in files)
    return ckptfmt.load(root, run=report.run)


def metadata_of(root: Path) -> dict[str, Any]:
    with ckptfmt.open(root, mode="r") as repository:
        found: dict[str, Any] = repository.latest().metadata["imported_from"]
        return found


def test_a_safetensors_file_with_every_element_type(tmp_path: Path) -> None:
    tensors = many_tensors()
    save_file(tensors, tmp_path / "weights.safetensors", metadata={"format": "pt", "author": "somebody"})
    assert_same(imported(tmp_path / "weights.safetensors", tmp_path / "r", step=7, tags=["base"]), tensors)
    with ckptfmt.open(tmp_path / "r", mode="r") as repository:
        generation = repository.latest()
        assert (generation.step, generation.tags) == (7, ("base",))
        assert generation.verify().ok
    told = metadata_of(tmp_path / "r")
    assert told["kind"] == "safetensors"
    assert told["metadata"] == {"format": "pt", "author": "somebody"}
    (file,) = told["files"]
    assert file["name"] == told["name"] == "weights.safetensors"
    assert file["nbytes"] == (tmp_path / "weights.safetensors").stat().st_size
    assert len(file["xxh3_128"]) == 32
    assert str(tmp_path) not in json.dumps(told)


def test_what_numpy_saved_comes_back_as_numpy(tmp_path: Path) -> None:
    save_numpy({"w": np.arange(6.0).reshape(2, 3)}, tmp_path / "w.safetensors", metadata={"format": "np"})
    loaded = imported(tmp_path / "w.safetensors", tmp_path / "r")
    assert isinstance(loaded["w"], np.ndarray)
    assert np.array_equal(loaded["w"], np.arange(6.0).reshape(2, 3))


def sharded(folder: Path, tensors: dict[str, torch.Tensor], files: int) -> dict[str, str]:
    """As Hugging Face's save_pretrained lays them out; returns the weight map."""
    folder.mkdir()
    names = sorted(tensors)
    placed = {name: f"model-{at % files + 1:05}-of-{files:05}.safetensors" for at, name in enumerate(names)}
    for file in set(placed.values()):
        save_file({n: tensors[n] for n in names if placed[n] == file}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return placed


def test_a_folder_with_an_index(tmp_path: Path) -> None:
    tensors = many_tensors()
    sharded(tmp_path / "hf", tensors, 3)
    (tmp_path / "hf" / "unrelated.safetensors").write_bytes(b"not listed, so not looked at")
    report = import_checkpoint(tmp_path / "hf", str(tmp_path / "r"))
    assert (report.kind, report.files, report.tensors) == ("safetensors_folder", 4, len(tensors))
    assert_same(ckptfmt.load(tmp_path / "r"), tensors)


def test_a_folder_in_a_cache_whose_files_are_links(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(6)}
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file(tensors, tmp_path / "blobs" / "0123abcd")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123abcd")
    import_checkpoint(tmp_path / "snapshot", str(tmp_path / "r"))
    assert_same(ckptfmt.load(tmp_path / "r"), tensors)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])
def test_a_file_of_torch_save_keeps_structure_ties_and_views(tmp_path: Path, zipped: bool) -> None:
    weight = random_bits((40, 30), torch.bfloat16)
    state = {
        "model": {"embed": weight, "head": weight, "rows": weight.t()[3:7], "none": None},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "step": 12,
        "betas": (0.9, 0.999),
    }
    torch.save(state, tmp_path / "c.pt", _use_new_zipfile_serialization=zipped)
    loaded = imported(tmp_path / "c.pt", tmp_path / "r")
    assert loaded["model"]["embed"] is loaded["model"]["head"]
    assert same(loaded["model"]["embed"], weight)
    assert same(loaded["model"]["rows"], weight.t()[3:7])
    assert loaded["optimizer"]["state"][0]["step"] == 3.0
    assert loaded["optimizer"]["param_groups"] == [{"lr": 1e-3, "params": [0]}]
    assert (loaded["step"], loaded["betas"], loaded["model"]["none"]) == (12, (0.9, 0.999), None)


class Custom:
    ran = False

    def __init__(self) -> None:
        Custom.ran = True

    def __reduce__(self) -> Any:
        return Custom, ()


def test_what_weights_only_refuses_is_told_by_name_and_not_run(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "c": Custom()}, tmp_path / "c.pt")
    Custom.ran = False
    with pytest.raises(InvalidInput, match=r"test_exchange_import\.Custom.*weights_only.*safe_globals") as caught:
        import_checkpoint(tmp_path / "c.pt", str(tmp_path / "r"))
    assert caught.value.kind == "weights_only"
    assert not Custom.ran
    assert not (tmp_path / "r").exists()


def test_what_the_format_has_no_place_for_is_told_by_path(tmp_path: Path) -> None:
    torch.save({"a": {"sparse": torch.eye(3).to_sparse()}}, tmp_path / "c.pt")
    with pytest.raises(UnsupportedValue, match=r"c\.pt: a\.sparse"):
        import_checkpoint(tmp_path / "c.pt", str(tmp_path / "r"))


def test_a_dcp_directory_of_one_process(tmp_path: Path) -> None:
    state = {
        "model": {name: tensor for name, tensor in many_tensors().items() if name != "with/slash and ünïcode"},
        "nested": [torch.arange(4), {"deep": torch.tensor(1), "text": "hello"}],
        "step": 5,
        "lrs": [0.1, 0.2],
    }
    loaded = imported(save_dcp(state, tmp_path / "dcp"), tmp_path / "r")
    assert_same(loaded["model"], state["model"])
    assert torch.equal(loaded["nested"][0], torch.arange(4))
    assert loaded["nested"][1]["text"] == "hello"
    assert (loaded["step"], loaded["lrs"]) == (5, [0.1, 0.2])


def _save_spread(folder: Path, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = random_bits((13, 9), torch.float32)
    state = {
        "rows": distribute_tensor(whole, mesh["dp"], [Shard(0)]),
        "blocks": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
        "columns": distribute_tensor(whole.to(torch.bfloat16), mesh, [Replicate(), Shard(1)]),
        "plain": torch.arange(3),
    }
    dcp.save(state, checkpoint_id=folder)


def test_a_dcp_directory_of_four_ranks_keeps_its_boxes(tmp_path: Path) -> None:
    as_ranks(4, tmp_path / "store", lambda rank: _save_spread(tmp_path / "dcp", rank))
    with open_foreign(tmp_path / "dcp") as foreign:
        assert len(foreign.tensors["blocks"].boxes) == 4
        whole = random_bits((13, 9), torch.float32)
        read = b"".join(bytes(piece) for piece in foreign.tensors["blocks"].pieces(100))
        assert read == whole.numpy().tobytes()
    loaded = imported(tmp_path / "dcp", tmp_path / "r")
    assert same(loaded["rows"], whole)
    assert same(loaded["blocks"], whole)
    assert same(loaded["columns"], whole.to(torch.bfloat16))
    assert same(loaded["plain"], torch.arange(3))
    with ckptfmt.open(tmp_path / "r", mode="r") as repository:
        assert same(repository.latest()["blocks"][5:9], whole[5:9])


def test_a_zarr_group(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "z", mode="w", attributes={"made_by": "test"})
    values = np.random.default_rng(0).random((50, 31))
    group.create_array("deep/inside", data=values, chunks=(7, 10), shards=(14, 20))
    group.create_array("big_endian", data=np.arange(5, dtype=">i4"))
    group.create_array("scalar", data=np.array(3.5, np.float32))
    group.create_array("partly", shape=(6,), chunks=(2,), dtype="i8", fill_value=7)[2:4] = 1
    loaded = imported(tmp_path / "z", tmp_path / "r")
    assert np.array_equal(loaded["deep.inside"], values)
    assert np.array_equal(loaded["big_endian"], np.arange(5))
    assert loaded["scalar"].shape == ()
    assert loaded["scalar"] == 3.5
    assert loaded["partly"].tolist() == [7, 7, 1, 1, 7, 7]
    assert metadata_of(tmp_path / "r")["metadata"] == {"made_by": "test"}


def test_a_large_zarr_array_is_read_in_rows_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_zarr, "ROWS_BYTES", 1000)
    values = np.random.default_rng(0).random((50, 31)).astype(np.float32)
    zarr.open_group(tmp_path / "z", mode="w").create_array("w", data=values, chunks=(7, 10))
    assert np.array_equal(imported(tmp_path / "z", tmp_path / "r")["w"], values)


def test_a_source_that_changes_meanwhile_is_quarantined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "w.safetensors"
    save_file({"w": torch.arange(6)}, source)
    digests = Foreign.digests

    def then_somebody_writes(self: Foreign, read: Any = None) -> Any:
        yield from digests(self, read)
        source.write_bytes(source.read_bytes())

    monkeypatch.setattr(Foreign, "digests", then_somebody_writes)
    with pytest.raises(Conflict, match=r"generation 1 .* quarantined: w\.safetensors changed"):
        import_checkpoint(source, str(tmp_path / "r"))
    with ckptfmt.open(tmp_path / "r", mode="r") as repository:
        (info,) = repository.generations()
        assert info.quarantine_reason == "w.safetensors changed while it was imported"
        with pytest.raises(NotFound):
            repository.latest()


def test_our_own_places_are_refused_with_advice(tmp_path: Path) -> None:
    generation = ckptfmt.save({"w": torch.ones(3)}, tmp_path / "r")
    with pytest.raises(InvalidInput, match="is a ckptfmt repository"):
        import_checkpoint(tmp_path / "r", str(tmp_path / "other"))
    folder = Path(generation.url.removeprefix("file://"))
    with pytest.raises(InvalidInput, match=r"folder of a ckptfmt generation: load it with ckptfmt\.load"):
        import_checkpoint(folder, str(tmp_path / "other"))
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors")
    with pytest.raises(InvalidInput, match="a generation's folder"):
        import_checkpoint(tmp_path / "w.safetensors", str(folder))


def test_a_save_that_was_never_completed_is_told(tmp_path: Path) -> None:
    folder = save_dcp({"w": torch.ones(3)}, tmp_path / "dcp")
    (folder / ".metadata").unlink()
    with pytest.raises(InvalidInput, match="never completed"):
        open_foreign(folder)


@pytest.mark.slow
def test_an_import_needs_no_more_memory_than_it_may(tmp_path: Path) -> None:
    """A file of 600 MB that is mostly a hole; numpy, the library and the interpreter come to some 100 MB."""
    nbytes = 600 << 20
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    source = tmp_path / "big.safetensors"
    with open(source, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
    code = (
        "import sys; from pathlib import Path\n"
        "from ckptfmt.exchange.importing import import_checkpoint\n"
        "import_checkpoint(Path(sys.argv[1]), sys.argv[2], host_bytes_max=64 << 20)\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, source, tmp_path / "r"], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) * 1024 < 400 << 20, done.stdout


def test_a_folder_of_more_files_than_may_be_open(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    tensors = {f"w{number:03}": torch.tensor([number]) for number in range(150)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, folder / f"{name}.safetensors")

    def few_descriptors() -> int:
        limit = len(os.listdir("/proc/self/fd")) + 100  # the tests before may hold some open
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        report = import_checkpoint(folder, str(tmp_path / "r"))
        with open_foreign(folder) as foreign:
            assert len(foreign.tensors) == report.tensors == 150
        return report.tensors

    assert in_child(few_descriptors) == 150
    assert_same(ckptfmt.load(tmp_path / "r"), tensors)


def test_a_file_that_ends_early_while_it_is_read(tmp_path: Path) -> None:
    source = tmp_path / "w.safetensors"
    save_file({"w": torch.arange(6000)}, source)
    with open_foreign(source) as foreign:
        with open(source, "r+b") as file:
            file.truncate(source.stat().st_size - 8)
        with pytest.raises(FormatError, match=r"w\.safetensors ends at"):
            list(foreign.tensors["w"].pieces())
