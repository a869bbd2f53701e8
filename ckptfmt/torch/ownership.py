"""What an optimizer alone changes, and how it announces a change: by a hook before each of its steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ckptfmt.ports.arrays import Ownership
from ckptfmt.torch.distributed import is_distributed
from ckptfmt.torch.elements import EXACT_TYPES


def ownership_of(optimizer: Optimizer) -> Ownership:
    """The parameters in the groups of ``optimizer`` and the tensors of its state."""
    return Ownership(
        values=lambda host_bytes_min: [
            value for value in _values(optimizer) if not value.is_cpu or value.nbytes >= host_bytes_min
        ],
        announce=partial(_announce, optimizer),
        changes=lambda value: int(value._version),
    )


def _values(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from _tensors(group["params"])
    for state in optimizer.state.values():
        yield from _tensors(state)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors whose changes torch counts; inference tensors are none, and what is wrapped is left to its library. It is
    the DTensor that counts the changes of its local tensor, whose own count stands still."""
    if type(value) in EXACT_TYPES or is_distributed(value):
        if not value.is_inference() and value.layout is torch.strided:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _announce(optimizer: Optimizer, before: Callable[[], None]) -> Callable[[], None]:
    def hook(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        before()

    # torch walks over its hooks while it calls them: they must neither come nor go meanwhile.
    handle = optimizer.register_step_pre_hook(hook)
    hooks = handle.hooks_dict_ref()
    if isinstance(hooks, OrderedDict):
        hooks.move_to_end(handle.id, last=False)  # another hook may change parameters
    return handle.remove
