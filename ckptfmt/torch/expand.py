"""Live torch objects of one state, expanded together so that optimizers can name their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ckptfmt.ports.arrays import Expansion
from ckptfmt.torch.modules import expand_module
from ckptfmt.torch.names import ModuleNames
from ckptfmt.torch.optimizers import expand_optimizer
from ckptfmt.torch.parameters import ParameterNames


def is_object(value: Any) -> bool:
    """Whether ``value`` is expanded here: a module or an optimizer."""
    return isinstance(value, (nn.Module, Optimizer))


def expand_objects(objects: Sequence[tuple[str, Any]], leaves: Sequence[tuple[str, Any]]) -> list[Expansion]:
    """See ``ArrayFamily.expand``."""
    modules = {id(value): ModuleNames(value) for _, value in objects if isinstance(value, nn.Module)}
    names = ParameterNames()
    if len(modules) < len(objects):
        for path, value in objects:
            if id(value) in modules:
                names.add_module(path, modules[id(value)])
        for path, value in leaves:
            names.add(path, value)
    return [
        expand_module(path, modules[id(value)]) if id(value) in modules else expand_optimizer(path, value, names)
        for path, value in objects
    ]
