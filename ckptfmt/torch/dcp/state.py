"""From a save plan of DCP to a state that a checkpointer saves: what this rank is to write, nested as it was.

DCP flattens a state: ``{"model": {"w": ...}}`` becomes ``model.w``, with the path ("model", "w") beside it. The
generation holds the nested state again, so that ``ckptfmt.load`` and ``restore`` see what the user had.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckptfmt.errors import InvalidInput, UnsupportedValue
from ckptfmt.leaves import Boxes, Sharded

Path = tuple[str | int, ...]


class Whole:
    """A value that DCP knows by one name though it could be flattened. Stored as an object with this state."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def state_dict(self) -> Any:
        return self._value

    def load_state_dict(self, state: Any) -> None:
        self._value = state


class MemoryFile(Whole):
    """An ``io.BytesIO``, which states of DCP like to hold: its bytes."""


class PlannerBytes(Whole):
    """What a planner of one's own made of a value: only its counterpart knows what the bytes mean."""


def type_name(kind: type[Whole]) -> str:
    """By which the reader knows it again."""
    return f"{kind.__module__}.{kind.__qualname__}"


WHOLE: Final = {type_name(kind): kind for kind in (Whole, MemoryFile, PlannerBytes)}


def is_one_value(value: Any) -> bool:
    """Whether DCP's planners keep ``value`` under one name: no mapping, no list that holds one, or a tensor."""
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return True
    return not any(isinstance(item, torch.Tensor) or not is_one_value(item) for item in value)


def planned_state(plan: SavePlan, planner: SavePlanner, *, alone: bool) -> dict[str, Any]:
    """Return what ``plan`` has this rank write.

    Raises ``UnsupportedValue`` for live objects among the values, ``InvalidInput`` if the planner gives a tensor of
    another shape than it planned. With several ranks tensors stand in marks (``Sharded``, ``Boxes``), and what lies in
    a list has something in all of its places.
    """
    boxes: dict[str, list[Sharded]] = {}
    found: dict[str, Any] = {}
    for item in plan.items:
        name = item.index.fqn
        if item.type is WriteItemType.BYTE_IO:
            found[name] = _value(item, planner)
        else:
            parts = boxes.setdefault(name, [])
            parts.append(_box(item, planner))
            found[name] = _tensor(parts, alone=alone)
    mappings: Mapping[str, Path] = getattr(planner, "mappings", None) or {}
    if not alone:
        for name, value in _others_in_lists(mappings, planner, found):
            found[name] = value
    root: dict[str, Any] = {}
    for name, value in found.items():
        _put(root, path_of(name, mappings), value)
    return root


def path_of(name: str, mappings: Mapping[str, Path]) -> Path:
    """Where a value stands in the nested state: as the planner says, if the reader can tell the name from it."""
    path = mappings.get(name)
    return path if path and dotted(path) == name else (name,)


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _box(item: WriteItem, planner: SavePlanner) -> Sharded:
    data = planner.resolve_data(item)
    about = item.tensor_data
    if not isinstance(data, torch.Tensor) or about is None:
        raise InvalidInput(
            f"{item.index.fqn}: the planner {type(planner).__name__} planned a tensor and gave {type(data).__name__}"
        )
    if data.shape != about.chunk.sizes:
        raise InvalidInput(
            f"{item.index.fqn}: the planner {type(planner).__name__} planned a box of {list(about.chunk.sizes)} at "
            f"{list(about.chunk.offsets)} and gave a tensor of {list(data.shape)}"
        )
    return Sharded(data.detach(), tuple(about.size), tuple(about.chunk.offsets))


def _tensor(parts: list[Sharded], *, alone: bool) -> Any:
    if len(parts) > 1:
        return Boxes(tuple(parts))
    (part,) = parts
    return part.local if alone and part.local.shape == part.global_shape else part


def _value(item: WriteItem, planner: SavePlanner) -> Any:
    name = item.index.fqn
    if not isinstance(planner, DefaultSavePlanner) or type(planner).resolve_data is not DefaultSavePlanner.resolve_data:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            raise InvalidInput(f"{name}: the planner {type(planner).__name__} planned bytes and gave a tensor")
        return PlannerBytes(data.getvalue())
    return _as_kept(name, planner.lookup_object(item.index))


def _as_kept(name: str, value: Any) -> Any:
    if type(value) is io.BytesIO:
        return MemoryFile(value.getvalue())
    live = next(_live_objects(value), None)
    if live is not None:
        raise UnsupportedValue(
            f"{name}: {type(live).__module__}.{type(live).__qualname__} is a live object, which DCP would pickle; put "
            "its state_dict() there, or the object at the top of the state, where DCP calls it"
        )
    return value if is_one_value(value) else Whole(value)


def _live_objects(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _live_objects(item)
    elif not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        yield value


def _others_in_lists(
    mappings: Mapping[str, Path], planner: SavePlanner, found: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Lists have one length on all ranks: what others write of them is there, tensors without a box."""
    state: Mapping[str, Any] = getattr(planner, "state_dict", {})
    for name, path in mappings.items():
        if name in found or name not in state or not any(type(key) is int for key in path):
            continue
        value = state[name]
        yield name, _without_box(value) if isinstance(value, torch.Tensor) else _as_kept(name, value)


def _without_box(value: torch.Tensor) -> Sharded:
    shape = tuple(value.size())
    if not shape:  # a box of no dimensions has an element, which all ranks have
        local = value.to_local() if hasattr(value, "to_local") else value
        return Sharded(local.detach(), (), ())
    size = shape if 0 in shape else (0,) * len(shape)
    return Sharded(torch.empty(size, dtype=value.dtype), shape, (0,) * len(shape))


def _put(root: dict[str, Any], path: Path, value: Any) -> None:
    here: Any = root
    for key, below in pairwise(path):
        found = _at(here, key)
        if found is None:
            found = here[key] = [] if type(below) is int else {}
        here = found
    _at(here, path[-1])
    here[path[-1]] = value


def _at(here: Any, key: Any) -> Any:
    """What stands there, or None; a list is made long enough."""
    if isinstance(here, dict):
        return here.get(key)
    here.extend([None] * (key + 1 - len(here)))
    return here[key]
