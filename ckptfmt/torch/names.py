"""Parameter names without the traces of wrappers.

A module that is compiled, checkpointed or wrapped for data parallelism must give the same names as
the bare one, or a resume fails, or worse, matches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckptfmt.errors import Mismatch

_WRAPPER_SEGMENTS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARALLEL: Final = (DataParallel, DistributedDataParallel)


def join(path: str, name: str) -> str:
    """Return ``path.name``, or the one of the two that is not empty."""
    return f"{path}.{name}" if path and name else path or name


def unwrap(module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the innermost module under outer wrappers, and the wrappers' segments, outermost first."""
    stripped: list[str] = []
    while True:
        if isinstance(module, _PARALLEL):
            inner, segment = module.module, "module"
        elif type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:
            # By name: torch._dynamo takes a second to import, and whoever compiled has imported it.
            inner, segment = module._modules["_orig_mod"], "_orig_mod"
        else:
            return module, tuple(stripped)
        if not isinstance(inner, nn.Module):
            return module, tuple(stripped)
        module = inner
        stripped.append(segment)


class ModuleNames:
    """One module below its outer wrappers, walked once: its parameters and buffers by raw name.

    Calling it turns a raw name (as in ``state_dict()``) into the canonical one; ``stripped``
    collects the wrapper segments removed so far, outermost first.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, outer = unwrap(module)
        self.stripped = list(dict.fromkeys(outer))
        self.parameters: list[tuple[str, torch.Tensor]] = []
        self.buffers: list[tuple[str, torch.Tensor]] = []
        self._parallel: set[str] = set()
        self._walk(self.module, "")

    def _walk(self, module: nn.Module, prefix: str) -> None:
        # Not named_parameters() and named_buffers(): each walks all modules, and this runs in the stall.
        self.parameters += [(prefix + name, p) for name, p in module._parameters.items() if p is not None]
        self.buffers += [(prefix + name, b) for name, b in module._buffers.items() if b is not None]
        if isinstance(module, _PARALLEL):
            self._parallel.add(prefix + "module")
        for name, child in module._modules.items():
            if child is not None:
                self._walk(child, f"{prefix}{name}.")

    def __call__(self, raw: str) -> str:
        if not self._parallel and "_orig_mod" not in raw and "_wrapped_module" not in raw:
            return raw
        kept: list[str] = []
        prefix = ""
        for segment in raw.split("."):
            prefix = join(prefix, segment)
            if segment in _WRAPPER_SEGMENTS or prefix in self._parallel:
                if segment not in self.stripped:
                    self.stripped.append(segment)
            else:
                kept.append(segment)
        return ".".join(kept)

    def by_canonical(self, raw_names: Iterable[str], path: str) -> dict[str, str]:
        """Return canonical name -> raw name. ``Mismatch`` naming both if two become one."""
        found: dict[str, str] = {}
        problems: list[str] = []
        for raw in raw_names:
            canonical = self(raw)
            first = found.setdefault(canonical, raw)
            if first != raw:
                problems.append(f"{join(path, first)} and {join(path, raw)} both become {join(path, canonical)}")
        if problems:
            raise Mismatch(
                f"{path or 'the module'}: names clash once wrapper prefixes are removed; rename one of each pair",
                tuple(problems),
            )
        return found
