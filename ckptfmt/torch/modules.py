"""``nn.Module`` as a live object of the saved state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckptfmt.errors import Mismatch, UnsupportedValue
from ckptfmt.ports.arrays import Expansion
from ckptfmt.torch.names import Canonical, join, unwrap

_EXTRA: Final = "_extra_state"


def expand_module(path: str, module: nn.Module) -> Expansion:
    """Expand a module into its ``state_dict()`` with canonical names, ``_metadata`` kept.

    The expansion is live if every tensor is memory of the module's own parameters and buffers.
    Raises ``UnsupportedValue`` for parameters without a shape, ``Mismatch`` for names that clash.
    """
    inner, outer = unwrap(module)
    _refuse_lazy(path, inner)
    raw_state = inner.state_dict()
    canonical = Canonical(inner)
    raw_by_name = canonical.map(raw_state, path)
    state: OrderedDict[str, Any] = OrderedDict((name, raw_state[raw]) for name, raw in raw_by_name.items())
    metadata = getattr(raw_state, "_metadata", None)
    if metadata is not None:
        # A wrapper and what it wraps become one name; the inner one comes later and stays.
        state._metadata = {canonical(raw): value for raw, value in metadata.items()}  # type: ignore[attr-defined]
    live = _shares_memory(inner, state)
    apply: Callable[[Any], None] | None
    check: Callable[[Any], None] | None = None
    if live:
        extra = {name: raw for name, raw in raw_by_name.items() if _is_extra(name)}
        apply = _extra_setter(path, inner, extra) if extra else None
    else:
        check = partial(_check_names, path, raw_by_name)
        apply = partial(_load, path, inner, raw_by_name, canonical)
    stripped = list(dict.fromkeys([*outer, *canonical.stripped]))
    kind = type(inner)
    return Expansion(
        kind="module",
        type_name=f"{kind.__module__}.{kind.__qualname__}",
        state=state,
        live=live,
        apply=apply,
        notes={"stripped": stripped} if stripped else None,
        check=check,
    )


def _refuse_lazy(path: str, module: nn.Module) -> None:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    lazy = [join(path, name) for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise UnsupportedValue(
            f"{lazy[0]}: a lazy parameter or buffer has no shape yet; run the module's first forward pass before "
            f"saving or restoring ({len(lazy)} in all: {', '.join(lazy[:10])}{', ...' if len(lazy) > 10 else ''})"
        )


def _is_extra(name: str) -> bool:
    return name == _EXTRA or name.endswith(f".{_EXTRA}")


def _shares_memory(module: nn.Module, state: Mapping[str, Any]) -> bool:
    own = {_storage(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return all(not tensor.numel() or _storage(tensor) in own for value in state.values() for tensor in _tensors(value))


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int] | int:
    try:
        return tensor.device, tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors and some wrappers have no storage to compare
        return id(tensor)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _extra_setter(path: str, module: nn.Module, raw_by_name: Mapping[str, str]) -> Callable[[Any], None]:
    """Extra state is all that is left to set when the tensors were filled in place."""

    def apply(saved: Mapping[str, Any]) -> None:
        for name, raw in raw_by_name.items():
            if name in saved:
                module.get_submodule(raw.removesuffix(_EXTRA).rstrip(".")).set_extra_state(saved[name])

    return apply


def _check_names(path: str, raw_by_name: Mapping[str, str], saved: Mapping[str, Any]) -> None:
    problems = [f"{join(path, name)}: missing in the saved state" for name in raw_by_name if name not in saved]
    problems += [f"{join(path, name)}: saved, but not in this module" for name in saved if name not in raw_by_name]
    if problems:
        raise Mismatch(f"{path or 'the module'}: the saved names differ from this module's", tuple(problems))


def _load(
    path: str, module: nn.Module, raw_by_name: Mapping[str, str], canonical: Canonical, saved: Mapping[str, Any]
) -> None:
    """A module whose ``state_dict`` makes new tensors (hooks, packed weights) takes them by ``load_state_dict``."""
    _check_names(path, raw_by_name, saved)
    state: OrderedDict[str, Any] = OrderedDict((raw, saved[name]) for name, raw in raw_by_name.items())
    metadata = getattr(module.state_dict(), "_metadata", None)
    if metadata is not None:
        kept = getattr(saved, "_metadata", {})
        state._metadata = {  # type: ignore[attr-defined]
            raw: kept.get(canonical(raw), value) for raw, value in metadata.items()
        }
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise Mismatch(f"{path or 'the module'}: load_state_dict refused the saved state: {error}") from error
