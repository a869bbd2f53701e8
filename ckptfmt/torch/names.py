"""Parameter names without the traces of wrappers.

A module that is compiled, checkpointed or wrapped for data parallelism must give the same names as
the bare one, or a resume fails, or worse, matches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

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


class Canonical:
    """Turns the raw names of one module into canonical ones. ``stripped`` collects the segments removed."""

    def __init__(self, module: nn.Module) -> None:
        self._parallel = {
            join(name, "module")
            for name, child in module.named_modules(remove_duplicate=False)
            if isinstance(child, _PARALLEL)
        }
        self._marked = bool(self._parallel)
        self.stripped: list[str] = []

    def __call__(self, raw: str) -> str:
        if not self._marked and "_orig_mod" not in raw and "_wrapped_module" not in raw:
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

    def map(self, raw_names: Iterable[str], path: str) -> dict[str, str]:
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
