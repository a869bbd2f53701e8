"""Which names a parameter has in the saved state."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from ckptfmt.torch.names import ModuleNames, join


class ParameterNames:
    """Names of the parameters that stand in one state mapping; a tied parameter has several."""

    def __init__(self) -> None:
        self._names: dict[int, list[str]] = {}
        self._kept: list[torch.Tensor] = []  # so that no id is used again

    def add_module(self, path: str, module: ModuleNames) -> None:
        """Add every parameter of ``module``, under its canonical names below ``path``."""
        for raw, parameter in module.parameters:
            self.add(join(path, module(raw)), parameter)

    def add(self, name: str, parameter: torch.Tensor) -> None:
        """Add one name of one tensor."""
        names = self._names.setdefault(id(parameter), [])
        if name not in names:
            names.append(name)
            self._kept.append(parameter)

    def of(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """All names of ``parameter``, in the order they were added."""
        return tuple(self._names.get(id(parameter), ()))


def place_name(group: int, index: int) -> str:
    """The name of a parameter that has none."""
    return f"~{group}.{index}"


class GroupNames:
    """The names under which an optimizer's parameters are saved, group by group.

    A parameter of the state mapping goes by its name there; else by the name that the optimizer was
    given (``param_groups[...]["param_names"]``, torch 2.6); else by its place, ``~<group>.<index>``.
    ``by`` says which: ``name``, ``position`` or ``mixed``.
    """

    def __init__(self, optimizer: Optimizer, names: ParameterNames) -> None:
        self.primary: list[list[str]] = []
        self.known: list[list[tuple[str, ...]]] = []
        """For each parameter all its names, without the place; empty for one that has none."""
        placed = named = 0
        for number, group in enumerate(optimizer.param_groups):
            given = group.get("param_names")
            primary: list[str] = []
            row: list[tuple[str, ...]] = []
            for index, parameter in enumerate(group["params"]):
                known = names.of(parameter)
                if not known and given is not None:
                    known = (str(given[index]),)
                placed, named = placed + (not known), named + bool(known)
                primary.append(known[0] if known else place_name(number, index))
                row.append(known)
            self.primary.append(primary)
            self.known.append(row)
        self.by = "mixed" if placed and named else "position" if placed else "name"
