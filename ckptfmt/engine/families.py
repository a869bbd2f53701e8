"""The array families of this process, and how a live state is told apart into leaves, objects and plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckptfmt.engine.numpy_family import BlobFamily, NumpyFamily
from ckptfmt.errors import UnsupportedValue
from ckptfmt.leaves import PerRank, Sharded
from ckptfmt.ports.arrays import ArrayFamily, Expansion
from ckptfmt.rng import Rng

_CONTAINERS = (dict, list, tuple)


class Families:
    """Finds the family of a tensor leaf and expands live objects. Types are looked up once."""

    def __init__(self, others: Sequence[ArrayFamily] = ()) -> None:
        self.blob: ArrayFamily = BlobFamily()
        self._families: tuple[ArrayFamily, ...] = (*others, NumpyFamily())
        self._by_type: dict[type, ArrayFamily | None] = {bytes: self.blob, bytearray: self.blob}

    def of(self, value: Any) -> ArrayFamily | None:
        """The family that owns ``value`` as a tensor leaf, or None."""
        kind = type(value)
        try:
            return self._by_type[kind]
        except KeyError:
            found = next((family for family in self._families if family.owns(value)), None)
            self._by_type[kind] = found
            return found

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
        leaves: list[tuple[str, Any]] = []
        for path, value in self._walk(state, "", 0):
            if self.of(value) is not None:
                leaves.append((path, value))
            elif self.is_object(value):
                objects.setdefault(id(value), (path, value))
        expansions: dict[int, Expansion] = {}
        rest = objects
        for family in self._families:
            mine = [pair for pair in rest.values() if family.owns_object(pair[1])]
            if mine:
                own = [leaf for leaf in leaves if self.of(leaf[1]) is family]
                expansions.update(zip([id(value) for _, value in mine], family.expand(mine, own), strict=True))
                rest = {key: pair for key, pair in rest.items() if key not in expansions}
        for key, (path, value) in rest.items():
            expansions[key] = _expand_generic(path, value)
        return expansions

    def _walk(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        """Yield every value in dicts, lists and tuples (also under PerRank) that is no such container."""
        kind = type(value)
        if kind is PerRank:
            yield from self._walk(value.value, path, depth)
        elif kind is Sharded:
            yield path, value.local
        elif depth < 256 and isinstance(value, _CONTAINERS) and self.of(value) is None and not is_stateful(value):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                yield from self._walk(item, f"{path}.{key}" if path else str(key), depth + 1)
        else:
            yield path, value


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
