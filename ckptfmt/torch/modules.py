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
from ckptfmt.torch.distributed import is_distributed, local_tensor
from ckptfmt.torch.elements import EXACT_TYPES
from ckptfmt.torch.names import ModuleNames, join

_EXTRA: Final = "_extra_state"


def expand_module(path: str, names: ModuleNames) -> Expansion:
    """Expand a module into its ``state_dict()`` with canonical names, ``_metadata`` kept.

    The expansion is live if every tensor is memory of the module's own parameters and buffers.
    Raises ``UnsupportedValue`` for parameters without a shape, ``Mismatch`` for names that clash.
    """
    _refuse_lazy(path, names)
    raw_state = names.module.state_dict()
    raw_by_name = names.by_canonical(raw_state, path)
    state: OrderedDict[str, Any] = OrderedDict((name, raw_state[raw]) for name, raw in raw_by_name.items())
    metadata = getattr(raw_state, "_metadata", None)
    if metadata is not None:
        # A wrapper and what it wraps become one name; the inner one comes later and stays.
        state._metadata = OrderedDict((names(raw), value) for raw, value in metadata.items())  # type: ignore[attr-defined]
    live = _shares_memory(names, state)
    apply: Callable[[Any], None] | None = None
    check: Callable[[Any], None] | None = None
    if not live:
        check = partial(_check_names, path, raw_by_name)
        apply = partial(_load, path, names, raw_by_name)
    elif extra := {name: raw for name, raw in raw_by_name.items() if _is_extra(name)}:
        apply = partial(_set_extra, names.module, extra)
    kind = type(names.module)
    return Expansion(
        kind="module",
        type_name=f"{kind.__module__}.{kind.__qualname__}",
        state=state,
        live=live,
        apply=apply,
        notes={"stripped": list(names.stripped)} if names.stripped else None,
        check=check,
    )


def _refuse_lazy(path: str, names: ModuleNames) -> None:
    lazy = [join(path, name) for name, tensor in (*names.parameters, *names.buffers) if is_lazy(tensor)]
    if lazy:
        raise UnsupportedValue(
            f"{lazy[0]}: a lazy parameter or buffer has no shape yet; run the module's first forward pass before "
            f"saving or restoring ({len(lazy)} in all: {', '.join(lazy[:10])}{', ...' if len(lazy) > 10 else ''})"
        )


def _is_extra(name: str) -> bool:
    return name == _EXTRA or name.endswith(f".{_EXTRA}")


def _shares_memory(names: ModuleNames, state: Mapping[str, Any]) -> bool:
    own = [tensor for _, tensor in (*names.parameters, *names.buffers)]
    addresses = {_address(tensor) for tensor in own}
    others = [
        tensor
        for value in state.values()
        for tensor in _tensors(value)
        if tensor.numel() and _address(tensor) not in addresses
    ]
    if not others:
        return True
    storages = {_storage(tensor) for tensor in own}  # a slice of a parameter is its memory, too
    return all(_storage(tensor) in storages for tensor in others)


def _address(tensor: torch.Tensor) -> tuple[torch.device, int] | int:
    plain = _plain(tensor)
    if plain is None:
        return id(tensor)
    try:
        return plain.device, plain.data_ptr()
    except RuntimeError:  # sparse tensors have no address
        return id(tensor)


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int] | int:
    plain = _plain(tensor)
    if plain is None:
        return id(tensor)
    try:
        return plain.device, plain.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory that a parameter or buffer has on this rank; None for what wraps it in a way unknown here."""
    if type(tensor) in EXACT_TYPES:  # nearly all are, and a module has thousands
        return tensor
    local = local_tensor(tensor) if is_distributed(tensor) else tensor
    return local if type(local) in EXACT_TYPES else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _set_extra(module: nn.Module, raw_by_name: Mapping[str, str], saved: Mapping[str, Any]) -> None:
    """Extra state is all that is left to set when the tensors were filled in place."""
    for name, raw in raw_by_name.items():
        if name in saved:
            module.get_submodule(raw.removesuffix(_EXTRA).rstrip(".")).set_extra_state(saved[name])


def _check_names(path: str, raw_by_name: Mapping[str, str], saved: Mapping[str, Any]) -> None:
    problems = [f"{join(path, name)}: missing in the saved state" for name in raw_by_name if name not in saved]
    problems += [f"{join(path, name)}: saved, but not in this module" for name in saved if name not in raw_by_name]
    if problems:
        raise Mismatch(f"{path or 'the module'}: the saved names differ from this module's", tuple(problems))


def _load(path: str, names: ModuleNames, raw_by_name: Mapping[str, str], saved: Mapping[str, Any]) -> None:
    """A module whose ``state_dict`` makes new tensors (hooks, packed weights) takes them by ``load_state_dict``."""
    _check_names(path, raw_by_name, saved)
    state: OrderedDict[str, Any] = OrderedDict((raw, saved[name]) for name, raw in raw_by_name.items())
    metadata = getattr(names.module.state_dict(), "_metadata", None)
    if metadata is not None:
        kept = getattr(saved, "_metadata", {})
        state._metadata = {raw: kept.get(names(raw), value) for raw, value in metadata.items()}  # type: ignore[attr-defined]
    try:
        names.module.load_state_dict(state)
    except RuntimeError as error:
        raise Mismatch(f"{path or 'the module'}: load_state_dict refused the saved state: {error}") from error
