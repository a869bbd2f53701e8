"""Exports open in safetensors, hold exactly the chosen tensors, and are there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_fixtures import assert_same, many_tensors, opened_at, random_bits, read_safetensors, same
from reshard_rig import save as save_as_ranks
from safetensors.torch import load_file, load_model

import ckptfmt
from ckptfmt import PerRank
from ckptfmt.errors import Conflict, Corrupt, InvalidInput, Mismatch, NotFound
from ckptfmt.exchange import new_files
from ckptfmt.exchange.foreign import open_foreign
from ckptfmt.exchange.safetensors_export import Chosen, export_safetensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export") / "r"
    tensors = many_tensors()
    state = {"model": tensors | {"tied": tensors["large"]}, "optimizer": {"m": torch.zeros(9)}, "step": 3}
    ckptfmt.save(state, root, run="run")
    return root


def test_all_tensors_in_one_file(saved: Path, tmp_path: Path) -> None:
    report = export_safetensors(opened_at(saved, "run"), tmp_path / "out", Chosen(subtree="model"))
    assert report.files == ("model.safetensors",)
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    expected = many_tensors()
    loaded = read_safetensors(tmp_path / "out")
    assert loaded["of.float8_e8m0fnu"].dtype is torch.uint8  # safetensors' torch reader knows no such word
    assert report.as_bytes == ("of.float8_e8m0fnu",)
    expected["of.float8_e8m0fnu"] = expected["of.float8_e8m0fnu"].view(torch.uint8)
    assert_same(loaded, expected)
    assert report.tied == {"tied": "large"}
    assert report.tensors == len(expected)


def test_several_files_and_their_index(saved: Path, tmp_path: Path) -> None:
    report = export_safetensors(
        opened_at(saved, "run"), tmp_path / "out", Chosen(keys="model.*", exclude=["*e8m0*"]), file_bytes_max=1000
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert report.files[-1] == "model.safetensors.index.json"
    count = len(report.files) - 1
    assert count > 1
    assert report.files[:-1] == tuple(f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1))
    loaded: dict[str, torch.Tensor] = {}
    for name, file in index["weight_map"].items():
        loaded[name] = load_file(tmp_path / "out" / file)[name]
    assert_same(loaded, {f"model.{name}": t for name, t in many_tensors().items() if "e8m0" not in name})
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in loaded.values()) == report.nbytes
    with open_foreign(tmp_path / "out") as foreign:
        assert foreign.tensors.keys() == loaded.keys()


def test_a_model_with_ties_is_loaded_again(tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        net = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 4), "head": torch.nn.Linear(4, 5, bias=False)})
        net["head"].weight = net["embed"].weight
        return net

    net = model()
    ckptfmt.save({"model": net}, tmp_path / "r")
    export_safetensors(opened_at(tmp_path / "r", "default"), tmp_path / "out", Chosen(subtree="model"))
    other = model()
    load_model(other, tmp_path / "out" / "model.safetensors")
    assert same(other["head"].weight.detach(), net["embed"].weight.detach())


def test_a_tied_name_that_is_chosen_alone_is_written(saved: Path, tmp_path: Path) -> None:
    report = export_safetensors(opened_at(saved, "run"), tmp_path / "out", Chosen(keys="model.tied"))
    assert report.tied == {}
    assert_same(read_safetensors(tmp_path / "out"), {"model.tied": many_tensors()["large"]})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_floating_point_is_converted_as_torch_does(dtype: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    state = {
        "w": torch.randn(3000, 900, generator=generator),
        "h": torch.randn(40, generator=generator).to(torch.bfloat16),
        "special": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45]),
        "ids": torch.arange(5),
    }
    ckptfmt.save(state, tmp_path / "r")
    report = export_safetensors(opened_at(tmp_path / "r", "default"), tmp_path / "out", Chosen(dtype=dtype))
    wanted = getattr(torch, dtype)
    loaded = read_safetensors(tmp_path / "out")
    for name in ("w", "h"):
        assert same(loaded[name], state[name].to(wanted))
    assert torch.equal(torch.isnan(loaded["special"]), torch.isnan(state["special"]))
    assert torch.equal(loaded["special"][1:], state["special"][1:].to(wanted))
    assert same(loaded["ids"], state["ids"])
    changed = {name for name in ("w", "h", "special") if state[name].dtype is not wanted}
    assert set(report.cast) == changed


def test_a_number_that_would_become_infinity_is_refused_by_name(tmp_path: Path) -> None:
    ckptfmt.save({"w": torch.tensor([1.0, 1e6])}, tmp_path / "r")
    with pytest.raises(InvalidInput, match=r"'w' holds 1e\+06, which float16 cannot hold"):
        export_safetensors(opened_at(tmp_path / "r", "default"), tmp_path / "out", Chosen(dtype="float16"))
    assert os.listdir(tmp_path / "out") == []


def test_what_many_ranks_saved_is_put_together(tmp_path: Path) -> None:
    whole = random_bits((700, 61), torch.float32)

    def part(rank: int) -> dict[str, Any]:
        rows = slice(rank * 175, (rank + 1) * 175)
        columns = slice(rank * 16, min(61, (rank + 1) * 16))
        return {
            "rows": ckptfmt.Sharded(whole[rows], whole.shape, (rank * 175, 0)),
            "columns": ckptfmt.Sharded(whole[:, columns], whole.shape, (0, rank * 16)),
            "own": PerRank(torch.tensor([rank])),
        }

    opened = save_as_ranks([part(rank) for rank in range(4)])
    with pytest.raises(Mismatch, match=r"'own' .* was kept by ranks 0, 1, 2, 3"):
        export_safetensors(opened, tmp_path / "out")
    export_safetensors(opened, tmp_path / "out", Chosen(rank=2))
    assert_same(read_safetensors(tmp_path / "out"), {"rows": whole, "columns": whole, "own": torch.tensor([2])})


def test_damage_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    generation = ckptfmt.save({"w": random_bits((3000, 900), torch.float32)}, tmp_path / "r")
    (pack,) = Path(generation.url.removeprefix("file://")).glob("*.safetensors")
    data = bytearray(pack.read_bytes())
    data[-5] ^= 1
    pack.write_bytes(data)
    with pytest.raises(Corrupt, match="'w'"):
        export_safetensors(opened_at(tmp_path / "r", "default"), tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_file_that_is_there_is_never_touched(saved: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(Conflict, match=f"{name} is there already"):
        export_safetensors(opened_at(saved, "run"), tmp_path / "out")
    assert [(path.name, path.read_text()) for path in (tmp_path / "out").iterdir()] == [(name, "mine")]


def test_who_comes_second_leaves_no_half_of_a_set(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's file appears under the second name while ours are written."""
    link = os.link
    linked: list[str] = []

    def then_another_came(source: Any, target: Any) -> None:
        if len(linked) == 1:
            Path(target).write_text("theirs")
        linked.append(Path(target).name)
        link(source, target)

    monkeypatch.setattr(os, "link", then_another_came)
    with pytest.raises(Conflict, match="is there already"):
        export_safetensors(opened_at(saved, "run"), tmp_path / "out", file_bytes_max=1000)
    assert os.listdir(tmp_path / "out") == [linked[1]]
    assert (tmp_path / "out" / linked[1]).read_text() == "theirs"


def test_everything_is_synced_before_it_has_its_name(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, link = os.fsync, os.link

    def note_fsync(descriptor: int) -> None:
        calls.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.split('.')[1]}")
        fsync(descriptor)

    def note_link(source: Any, target: Any) -> None:
        calls.append(f"link {Path(target).name}")
        link(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "link", note_link)
    (tmp_path / "out.folder").mkdir()
    export_safetensors(opened_at(saved, "run"), tmp_path / "out.folder", file_bytes_max=3_000_000)
    assert calls == [
        "fsync model-00001-of-00002",
        "fsync model-00002-of-00002",
        "fsync model",
        "link model-00001-of-00002.safetensors",
        "link model-00002-of-00002.safetensors",
        "link model.safetensors.index.json",
        "fsync folder",
    ]


def test_a_file_system_without_links(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: Any, target: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    export_safetensors(opened_at(saved, "run"), tmp_path / "out", Chosen(keys="optimizer.*"))
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    assert_same(read_safetensors(tmp_path / "out"), {"optimizer.m": torch.zeros(9)})
    with pytest.raises(Conflict, match="is there already"):
        new_files._link(tmp_path / "out" / "model.safetensors", tmp_path / "out" / "model.safetensors")


def test_an_export_that_is_killed_leaves_nothing_under_a_final_name(saved: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from ckptfmt.cli.main import main\n"
        "os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main(['export', sys.argv[1], '--safetensors', sys.argv[2], '--file-bytes', '1000'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"{saved}#run", tmp_path / "out"], capture_output=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    left = os.listdir(tmp_path / "out")
    assert left
    assert all(name.startswith(".") and name.endswith(".partial") for name in left)
    export_safetensors(opened_at(saved, "run"), tmp_path / "out")


def test_what_cannot_be_chosen(saved: Path, tmp_path: Path) -> None:
    opened = opened_at(saved, "run")
    with pytest.raises(NotFound, match="has no tensor that is selected"):
        export_safetensors(opened, tmp_path / "out", Chosen(keys="nothing.*"))
    with pytest.raises(InvalidInput, match="dtype='int8'"):
        export_safetensors(opened, tmp_path / "out", Chosen(dtype="int8"))
    with pytest.raises(InvalidInput, match="0 bytes"):
        export_safetensors(opened, tmp_path / "out", file_bytes_max=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_export_streams(tmp_path: Path) -> None:
    """600 MB of zeros; the interpreter, numpy and what is kept of chunks come to some 200 MB."""
    import numpy as np

    np.lib.format.open_memmap(tmp_path / "z.npy", mode="w+", dtype=np.float32, shape=(150 << 20,)).flush()
    ckptfmt.save({"w": np.load(tmp_path / "z.npy", mmap_mode="r").view(np.ndarray)}, tmp_path / "r")
    code = (
        "import sys; from pathlib import Path\n"
        "from ckptfmt.cli.main import main\n"
        "try: main(['export', sys.argv[1], '--safetensors', sys.argv[2], '--dtype', 'bfloat16', '--json'])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    arguments = [sys.executable, "-c", code, f"{tmp_path}/r#default", tmp_path / "out"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout.splitlines()[-1]) * 1024 < 350 << 20
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 300_000_000


def test_transformers_opens_an_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=101, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    ckptfmt.save({"model": model}, tmp_path / "r")
    export_safetensors(
        opened_at(tmp_path / "r", "default"), tmp_path / "out", Chosen(subtree="model"), file_bytes_max=20_000
    )
    config.save_pretrained(tmp_path / "out")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert_same(loaded.state_dict(), model.state_dict())
