"""New tensors for the state of an optimizer whose parameters are spread over ranks.

Such state is a DTensor as its parameter is, of which each rank has its share; nothing in what was saved tells how it is
to lie now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptfmt.ports.arrays import Outline
from ckptfmt.torch.distributed import is_distributed, local_tensor
from ckptfmt.torch.elements import torch_dtype


def laid_out(
    saved: Mapping[str, Any], parameter_of: Mapping[str, torch.Tensor], live: Mapping[torch.Tensor, Any]
) -> dict[str, torch.Tensor]:
    """Return uninitialised DTensors by the name of the ``Outline`` that each is for.

    ``saved`` is what was saved for each parameter, by name, and ``live`` what the optimizer has for it now. What is no
    DTensor there is left out.
    """
    made: dict[str, torch.Tensor] = {}
    for name, state in saved.items():
        parameter = parameter_of.get(name)
        if parameter is not None and is_distributed(parameter):
            _make(state, live.get(parameter), parameter, "", made)
    return made


def _make(saved: Any, live: Any, parameter: torch.Tensor, key: str, made: dict[str, torch.Tensor]) -> None:
    if isinstance(saved, Outline):
        tensor = _tensor(saved, live, parameter, key)
        if tensor is not None:
            made[saved.name] = tensor
    elif isinstance(saved, Mapping):
        for inner, value in saved.items():
            _make(value, live.get(inner) if isinstance(live, Mapping) else None, parameter, str(inner), made)
    elif isinstance(saved, list):
        same = isinstance(live, list | tuple) and len(live) == len(saved)
        for number, value in enumerate(saved):
            _make(value, live[number] if same else None, parameter, key, made)


def _tensor(saved: Outline, live: Any, parameter: torch.Tensor, key: str) -> torch.Tensor | None:
    """A tensor laid out as the live one, which says best; else as torch's optimizers begin: like the parameter if it
    has that shape, whole on each rank if not (Adafactor's rows and columns), and no DTensor if it is a counter."""
    dtype = torch_dtype(saved.dtype)
    if isinstance(live, torch.Tensor) and (tuple(live.shape) == saved.shape or not is_distributed(live)):
        return _like(live, dtype) if is_distributed(live) else None
    if key == "step":
        return None
    if tuple(parameter.shape) == saved.shape:
        return _like(parameter, dtype)
    return _on_each_rank(parameter, saved.shape, dtype) if saved.shape else None


def _like(value: Any, dtype: torch.dtype) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor.from_local(
            torch.empty_like(local_tensor(value), dtype=dtype),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )


def _on_each_rank(parameter: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    local = torch.empty(shape, dtype=dtype, device=local_tensor(parameter).device)
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
