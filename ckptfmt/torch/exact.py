"""Optimizer state exactly as it was saved.

``Optimizer.load_state_dict`` converts floating state to the parameter's dtype (float32 moments of
bfloat16 parameters lose 16 bits, uint8 moments become numbers) and rebuilds any iterable, strings
included, from a generator (``torch/optim/optimizer.py``, ``_cast`` and
``_process_value_according_to_param_policy``). The device it chooses is right; the rest is put back.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


def put_back_exactly(
    optimizer: Optimizer,
    name_at: Sequence[str],
    saved_state: Mapping[str, Any],
    group_devices: Sequence[Mapping[str, torch.device]],
) -> None:
    """Undo what ``load_state_dict`` converted.

    ``name_at`` has the saved name of each parameter, counted over all groups; ``group_devices`` the
    devices of tensors that stood in the groups before (a learning rate on a GPU).
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, name in zip(parameters, name_at, strict=True):
        if name in saved_state and parameter in optimizer.state:
            optimizer.state[parameter] = _exact(saved_state[name], optimizer.state[parameter])
    for group, devices in zip(optimizer.param_groups, group_devices, strict=True):
        for key, device in devices.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key] = group[key].to(device)


def _exact(saved: Any, loaded: Any) -> Any:
    """Return ``saved`` on the devices of ``loaded``; ``loaded`` where the optimizer changed the kind of value
    (as when it upgrades the state of an older version of itself)."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        rebuilt: dict[Any, Any] = {} if type(saved) is dict else copy.copy(saved)
        for key, value in loaded.items():
            rebuilt[key] = _exact(saved[key], value) if key in saved else value
        return rebuilt
    if type(saved) is not type(loaded):
        return loaded
    if isinstance(saved, (list, tuple)) and len(saved) == len(loaded):
        items = [_exact(one, other) for one, other in zip(saved, loaded, strict=True)]
        return items if type(saved) is list else tuple(items) if type(saved) is tuple else loaded
    return saved
