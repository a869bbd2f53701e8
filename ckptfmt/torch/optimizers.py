"""``torch.optim.Optimizer`` as a live object: its state is keyed by parameter name, never by position alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from ckptfmt.errors import Mismatch
from ckptfmt.ports.arrays import Expansion
from ckptfmt.torch.distributed import is_distributed
from ckptfmt.torch.exact import put_back_exactly
from ckptfmt.torch.laid_out import laid_out
from ckptfmt.torch.ownership import ownership_of
from ckptfmt.torch.parameters import GroupNames, ParameterNames, place_name

_STATE, _GROUPS, _UNASSIGNED = "state", "param_groups", "unassigned_state"


def expand_optimizer(path: str, optimizer: Optimizer, names: ParameterNames) -> Expansion:
    """Expand an optimizer into ``{"state": {name: ...}, "param_groups": [{..., "params": [name, ...]}]}``.

    State that belongs to no parameter stands under ``unassigned_state``. An optimizer whose
    ``state_dict()`` has another form is saved as it is (kind ``stateful``).
    Raises ``Mismatch`` if two parameters would have one name.
    """
    kind = type(optimizer)
    type_name = f"{kind.__module__}.{kind.__qualname__}"
    packed = optimizer.state_dict()
    if not _is_usual(optimizer, packed):
        return Expansion(
            "stateful", type_name, packed, live=False, apply=optimizer.load_state_dict, owned=ownership_of(optimizer)
        )
    groups = GroupNames(optimizer, names)
    _refuse_clashes(path, optimizer, groups)
    name_of = dict(_indexed(optimizer, groups.primary))
    state: dict[str, Any] = {name_of[key]: value for key, value in packed[_STATE].items() if key in name_of}
    unassigned = {key: value for key, value in packed[_STATE].items() if key not in name_of}
    expanded = {
        **packed,
        _STATE: state,
        _GROUPS: [{**group, "params": list(row)} for group, row in zip(packed[_GROUPS], groups.primary, strict=True)],
    }
    if unassigned:
        expanded[_UNASSIGNED] = unassigned
    return Expansion(
        kind="optimizer",
        type_name=type_name,
        state=expanded,
        live=False,
        apply=partial(_apply, path, optimizer, groups),
        notes={"by": groups.by},
        check=partial(_check, path, optimizer, groups),
        rename=_renamed,
        owned=ownership_of(optimizer),
        make=partial(_made, path, optimizer, groups),
    )


def _made(path: str, optimizer: Optimizer, groups: GroupNames, outline: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """New tensors for the state of parameters that are spread over ranks."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(map(is_distributed, parameters)):
        return {}
    saved = outline()
    try:
        matched = _match(path, optimizer, groups, saved)
    except Mismatch:
        return {}  # told by ``_check``
    names = [name for row in matched for name in row]
    return laid_out(saved[_STATE], dict(zip(names, parameters, strict=True)), optimizer.state)


def _renamed(saved: Any, change: Callable[[str], str]) -> Any:
    """The saved state with other names for its parameters; places (``~0.1``) are no names."""
    if not isinstance(saved, Mapping) or not {_STATE, _GROUPS} <= saved.keys():
        return saved  # not an optimizer's state: ``_match`` says so

    def new(name: str) -> str:
        return name if name.startswith("~") else change(name)

    groups = [{**group, "params": [new(name) for name in group["params"]]} for group in saved[_GROUPS]]
    return {**saved, _STATE: {new(name): value for name, value in saved[_STATE].items()}, _GROUPS: groups}


def _is_usual(optimizer: Optimizer, packed: Any) -> bool:
    return (
        isinstance(packed, dict)
        and isinstance(packed.get(_STATE), dict)
        and isinstance(packed.get(_GROUPS), list)
        and len(packed[_GROUPS]) == len(optimizer.param_groups)
        and _UNASSIGNED not in packed
        and all(
            isinstance(group, dict) and len(group.get("params", ())) == len(live["params"])
            for group, live in zip(packed[_GROUPS], optimizer.param_groups, strict=True)
        )
    )


def _refuse_clashes(path: str, optimizer: Optimizer, groups: GroupNames) -> None:
    seen: dict[str, tuple[torch.Tensor, str]] = {}
    problems: list[str] = []
    for number, (group, row) in enumerate(zip(optimizer.param_groups, groups.primary, strict=True)):
        for index, (parameter, name) in enumerate(zip(group["params"], row, strict=True)):
            place = f"param_groups[{number}][{index}]"
            first = seen.setdefault(name, (parameter, place))
            if first[0] is not parameter:
                problems.append(f"{name}: {first[1]} and {place} are different parameters")
    if problems:
        raise Mismatch(
            f"{path or 'the optimizer'}: two parameters have one name; rename one of each pair", tuple(problems)
        )


def _indexed(optimizer: Optimizer, rows: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
    """Yield the index by which ``state_dict()`` knows each parameter, with its entry in ``rows``.

    torch counts parameters over all groups; one that occurs twice has the index of its first place.
    """
    seen: set[int] = set()
    index = 0
    for group, row in zip(optimizer.param_groups, rows, strict=True):
        for parameter, entry in zip(group["params"], row, strict=True):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield index, entry
            index += 1


def _check(path: str, optimizer: Optimizer, groups: GroupNames, saved: Mapping[str, Any]) -> None:
    _refuse_unknown_state(path, saved, _index_of(_match(path, optimizer, groups, saved)))


def _apply(path: str, optimizer: Optimizer, groups: GroupNames, saved: Mapping[str, Any]) -> None:
    matched = _match(path, optimizer, groups, saved)
    index_of = _index_of(matched)
    _refuse_unknown_state(path, saved, index_of)
    state: dict[Any, Any] = {index_of[name]: value for name, value in saved[_STATE].items()}
    state.update(saved.get(_UNASSIGNED, {}))
    translated = {
        **{key: value for key, value in saved.items() if key != _UNASSIGNED},
        _STATE: state,
        _GROUPS: [_translated_group(group, row, index_of) for group, row in zip(saved[_GROUPS], matched, strict=True)],
    }
    devices = [_tensor_devices(group) for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(translated)
    except (ValueError, KeyError, TypeError) as error:
        raise Mismatch(f"{path or 'the optimizer'}: load_state_dict refused the saved state: {error}") from error
    put_back_exactly(optimizer, [name for row in matched for name in row], saved[_STATE], devices)


def _index_of(matched: Sequence[Sequence[str]]) -> dict[str, int]:
    """The index by which torch knows each saved name; a parameter that occurs twice has its first."""
    found: dict[str, int] = {}
    for index, name in enumerate(name for row in matched for name in row):
        found.setdefault(name, index)
    return found


def _match(path: str, optimizer: Optimizer, groups: GroupNames, saved: Mapping[str, Any]) -> list[list[str]]:
    """Return, for each live parameter, the saved name that is its own. ``Mismatch`` lists every difference."""
    if not isinstance(saved, Mapping) or not {_STATE, _GROUPS} <= saved.keys():
        raise Mismatch(
            f"{path or 'the optimizer'}: what was saved is not the state of an optimizer; restore it into an object "
            "of the saved kind"
        )
    saved_groups: Sequence[Mapping[str, Any]] = saved[_GROUPS]
    problems: list[str] = []
    if len(saved_groups) != len(groups.known):
        problems.append(f"saved with {len(saved_groups)} parameter groups, this optimizer has {len(groups.known)}")
    group_of = {name: number for number, group in enumerate(saved_groups) for name in group["params"]}
    # State that was saved without any name can only be matched by place, as torch does.
    nameless = all(name.startswith("~") for name in group_of)
    matched: list[list[str]] = []
    taken: set[str] = set()
    for number, row in enumerate(groups.known):
        found_row: list[str] = []
        for index, known in enumerate(row):
            names = known if known and not nameless else (*known, place_name(number, index))
            found = [name for name in names if name in group_of]
            if not found:
                problems.append(f"{names[0]}: missing in the saved state (group {number})")
                continue
            name = found[0]
            found_row.append(name)
            taken.update(found)
            if group_of[name] != number:
                problems.append(f"{name}: saved in group {group_of[name]}, here in group {number}")
            if len(found) > 1:
                problems.append(f"{names[0]}: saved as several parameters: {', '.join(found)}")
        matched.append(found_row)
    problems += [f"{name}: saved, but not in this optimizer" for name in group_of if name not in taken]
    if not problems and isinstance(optimizer, LBFGS) and matched != [list(g["params"]) for g in saved_groups]:
        problems.append("LBFGS keeps one flat vector over all parameters: they must come in the saved order")
    if problems:
        raise Mismatch(
            f"{path or 'the optimizer'}: the saved parameters differ from this optimizer's{_advice(groups)}",
            tuple(problems),
        )
    return matched


def _advice(groups: GroupNames) -> str:
    if groups.by == "name":
        return "; make it over the same parameters in the same groups"
    return (
        "; parameters called ~<group>.<index> are known by position only: put the model into the same mapping as its "
        "optimizer, or make the optimizer from model.named_parameters()"
    )


def _refuse_unknown_state(path: str, saved: Mapping[str, Any], index_of: Mapping[str, int]) -> None:
    unknown = [f"{name}: has state, but is in no saved group" for name in saved[_STATE] if name not in index_of]
    if unknown:
        raise Mismatch(
            f"{path or 'the optimizer'}: the saved optimizer state contradicts itself; restore another generation",
            tuple(unknown),
        )


def _translated_group(group: Mapping[str, Any], row: Sequence[str], index_of: Mapping[str, int]) -> dict[str, Any]:
    """The saved group with its parameters, and torch's own names for them, in the order of the live group."""
    translated = {**group, "params": [index_of[name] for name in row]}
    given = group.get("param_names")
    if given is not None:
        by_name = dict(zip(group["params"], given, strict=True))
        translated["param_names"] = [by_name[name] for name in row]
    return translated


def _tensor_devices(group: Mapping[str, Any]) -> dict[str, torch.device]:
    return {key: value.device for key, value in group.items() if isinstance(value, torch.Tensor)}
