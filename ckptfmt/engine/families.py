"""The array families of this process, and how a live state is told apart into leaves, objects and plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from ckptfmt.engine.numpy_family import BlobFamily, NumpyFamily
from ckptfmt.errors import UnsupportedValue
from ckptfmt.leaves import Boxes, PerRank, Sharded, Sole
from ckptfmt.ports.arrays import ArrayFamily, Expansion
from ckptfmt.rng import Rng

_CONTAINERS = (dict, list, tuple)
_DEPTH_MAX = 256
_Role = Literal["tensor", "object", "container", "per_rank", "sharded", "plain"]


class Families:
    """Finds the family of a tensor leaf and expands live objects. Types are looked up once."""

    def __init__(self, others: Sequence[ArrayFamily] = ()) -> None:
        self.blob: ArrayFamily = BlobFamily()
        self._families: tuple[ArrayFamily, ...] = (*others, NumpyFamily())
        self._by_type: dict[type, ArrayFamily | None] = {bytes: self.blob, bytearray: self.blob}
        self._roles: dict[type, _Role] = {}
        self._inert: set[type] = set()
        """Types of values that are no live objects and hold none."""

    def of(self, value: Any) -> ArrayFamily | None:
        """The family that owns ``value`` as a tensor leaf, or None."""
        kind = type(value)
        try:
            return self._by_type[kind]
        except KeyError:
            found = next((family for family in self._families if family.owns(value)), None)
            self._by_type[kind] = found
            return found

    def beside(self, others: Sequence[ArrayFamily]) -> Families:
        """These families, and ``others`` before them."""
        return Families((*others, *self._families[:-1]))

    def named(self, name: str) -> ArrayFamily | None:
        """The family whose references in the state tree are called ``name``, or None if it is not loaded."""
        if name in ("stored_bytes", "stored_bytearray"):
            return self.blob
        return next((family for family in self._families if family.name == name), None)

    def is_object(self, value: Any) -> bool:
        """Whether ``value`` is a live object that is saved through its state."""
        return isinstance(value, Rng) or is_stateful(value) or any(f.owns_object(value) for f in self._families)

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Register host memory with every family's devices; returns the undo of all."""
        undos: list[Callable[[], None]] = []

        def undo() -> None:
            while undos:
                undos.pop()()

        for family in self._families:
            try:
                undos.append(family.pin(memory))
            except BaseException:
                undo()
                raise
        return undo

    def expand(self, state: Any) -> dict[int, Expansion]:
        """Expand every live object in the plain containers of ``state``; the keys are ``id(object)``."""
        objects: dict[int, tuple[str, Any]] = {}
        self._gather(state, "", 0, objects)
        if not objects:
            return {}
        expansions: dict[int, Expansion] = {}
        rest = objects
        leaves: list[tuple[str, Any]] | None = None
        for family in self._families:
            mine = [pair for pair in rest.values() if family.owns_object(pair[1])]
            if mine:
                if leaves is None:
                    leaves = list(self._tensors(state, "", 0))
                own = [leaf for leaf in leaves if self.of(leaf[1]) is family]
                expansions.update(zip([id(value) for _, value in mine], family.expand(mine, own), strict=True))
                rest = {key: pair for key, pair in rest.items() if key not in expansions}
        for key, (path, value) in rest.items():
            expansions[key] = _expand_generic(path, value)
        return expansions

    def _gather(self, value: Any, path: str, depth: int, objects: dict[int, tuple[str, Any]]) -> None:
        """Collect the live objects in plain containers, also under marks, with the paths where they first stand."""
        role = self._role_of(value)
        if role == "object":
            objects.setdefault(id(value), (path, value))
        elif role == "per_rank":
            self._gather(value.value, path, depth, objects)
        elif role == "container" and depth < _DEPTH_MAX:
            # Most containers hold nothing but tensors and numbers, as their types tell.
            items = value.values() if isinstance(value, dict) else value
            if not self._inert.issuperset(map(type, items)):
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    if type(item) not in self._inert:
                        self._gather(item, f"{path}.{key}" if path else str(key), depth + 1, objects)

    def _tensors(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        """Yield the tensors that stand in the state by themselves, under their dotted names."""
        role = self._role_of(value)
        if role == "tensor":
            yield path, value
        elif role == "per_rank":
            yield from self._tensors(value.value, path, depth)
        elif role == "sharded":
            yield from self._tensors(value.local, path, depth)
        elif role == "container" and depth < _DEPTH_MAX:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from self._tensors(item, f"{path}.{key}" if path else str(key), depth + 1)

    def _role_of(self, value: Any) -> _Role:
        kind = type(value)
        role = self._roles.get(kind)
        if role is None:
            role = self._roles[kind] = self._find_role(value)
            if role in ("tensor", "sharded", "plain"):
                self._inert.add(kind)
        return role

    def _find_role(self, value: Any) -> _Role:
        if isinstance(value, PerRank | Sole):
            return "per_rank"
        if isinstance(value, Sharded | Boxes):
            return "sharded"
        if self.of(value) is not None:
            return "tensor"
        if isinstance(value, _CONTAINERS) and not is_stateful(value):
            return "container"
        return "object" if self.is_object(value) else "plain"


def is_stateful(value: Any) -> bool:
    """Anything with ``state_dict`` and ``load_state_dict`` (instances, not classes)."""
    kind = type(value)
    return not isinstance(value, type) and hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")


def _expand_generic(path: str, value: Any) -> Expansion:
    type_name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Rng):
        return Expansion("rng", type_name, value.state(), live=False, apply=value.restore, check=value.check)
    try:
        state = value.state_dict()
    except Exception as error:
        raise UnsupportedValue(f"{path}: {type_name}.state_dict() failed: {error!r}; nothing was saved") from error
    return Expansion("stateful", type_name, state, live=False, apply=value.load_state_dict)
