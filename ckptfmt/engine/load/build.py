"""Building values: read the wanted tensors into fresh memory, verify them, and rebuild the tree around them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from ckptfmt.engine.families import Families
from ckptfmt.engine.load.gather import boxes_to_read, bytes_of
from ckptfmt.engine.load.memory import Memory, read_boxes
from ckptfmt.engine.load.ranks import RankView
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.stored import Stored
from ckptfmt.errors import UnsupportedValue
from ckptfmt.format import tree
from ckptfmt.leaves import PerRank
from ckptfmt.ports.arrays import ArrayFamily, LeafSpec

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def read_entries(opened: Opened, entries: Iterable[Stored], *, verify: bool = True) -> Memory:
    """Read ``entries`` whole, each stored tensor once."""
    return read_boxes(opened, boxes_to_read(entries), verify=verify)


def wanted_entries(view: RankView, nodes: Sequence[tree.Node], made: Container[str] = ()) -> list[Stored]:
    """The stored tensors that ``nodes`` refer to, looking into the rank's slots; each once, without those for which a
    tensor was ``made``."""
    found: dict[str, Stored] = {}
    find, rank = view.opened.stored.find, view.rank
    todo = list(nodes)
    while todo:
        for tag, name in tree.references(todo.pop()):
            if tag == "per_rank":
                todo.append(view.slot(tree.per_rank(name)))
            elif name not in made:
                stored = find(name, rank)
                found[stored.name] = stored
    return list(found.values())


@dataclass(frozen=True)
class _Kind:
    """How references of one tag and one set of flags are built, and those that are, by stored name."""

    tag: str
    family: ArrayFamily | None
    """None for byte strings."""
    flags: tuple[str, ...]
    built: dict[str, Any] = field(default_factory=dict)


class Builder:
    """Rebuilds values from nodes. Tied tensors come back as one object.

    What a rank kept for itself comes with its ``PerRank`` mark if ``marks``, else only inside a value of a registered
    type, whose ``decode`` is to get what its ``encode`` gave.
    """

    def __init__(
        self,
        view: RankView,
        families: Families,
        memory: Memory,
        *,
        framework: str = "saved",
        device: Any | None = None,
        marks: bool = False,
    ) -> None:
        self._view = view
        self._find = view.opened.stored.find
        self._rank = view.rank
        self._families = families
        self._memory = memory
        self._framework = framework
        self._device = device
        self._marks = marks
        self._kinds: dict[tuple[str, tuple[str, ...]], _Kind] = {}

    def value(self, node: tree.Node, made: Mapping[str, Any] = _NOTHING) -> Any:
        """The value of ``node``; references by a name in ``made`` become what stands there."""
        return tree.decode(node, self._with(made) if made else self._leaf)

    def _with(self, made: Mapping[str, Any]) -> Callable[[str, Any], Any]:
        def leaf(tag: str, payload: Any) -> Any:
            if tag == "per_rank":
                return self._own(payload, leaf)
            name = payload if type(payload) is str else tree.split_reference(payload)[0]
            return made[name] if name in made else self._leaf(tag, payload)

        return leaf

    def _leaf(self, tag: str, payload: Any) -> Any:
        if tag == "per_rank":
            return self._own(payload, self._leaf)
        name, flags = (payload, ()) if type(payload) is str else tree.split_reference(payload)
        stored = self._find(name, self._rank)
        kind = self._kinds.get((tag, flags))
        if kind is None:
            kind = self._kinds[tag, flags] = self._kind(tag, flags, stored)
        value = kind.built.get(stored.name)
        if value is None:
            value = kind.built[stored.name] = self._build(kind, stored)
        return value

    def _own(self, slot: str, leaf: Callable[[str, Any], Any]) -> Any:
        value = tree.decode(self._view.slot(tree.per_rank(slot)), leaf)
        return PerRank(value) if self._marks or slot in self._view.marked else value

    def _build(self, kind: _Kind, stored: Stored) -> Any:
        host = bytes_of(stored, self._memory)
        if kind.family is None:
            return bytes(host) if kind.tag == "stored_bytes" else bytearray(host)
        size = stored.shape
        spec = LeafSpec(stored.dtype, size, (0,) * len(size), size, stored.nbytes, stored.kind)
        return kind.family.build(spec, host, kind.flags, self._device)

    def _kind(self, tag: str, flags: tuple[str, ...], stored: Stored) -> _Kind:
        if tag in ("stored_bytes", "stored_bytearray"):
            return _Kind(tag, None, ())
        name = {"torch": "tensor", "numpy": "array", "saved": tag}[self._framework]
        family = self._families.named(name)
        if family is None and self._framework == "saved":
            # Without torch a saved torch tensor is still good for reading, as an array.
            family, flags = self._families.named("array"), ()
        if family is None:
            raise UnsupportedValue(f"tensor {stored.name!r} was saved as a {tag}, which no loaded library can build")
        return _Kind(tag, family, flags if name == tag else ())


def mentions_torch(node: tree.Node) -> bool:
    """Whether rebuilding ``node`` needs torch: tensors of its own, or values of its types."""
    todo: list[Any] = [node]
    while todo:
        here = todo.pop()
        if isinstance(here, list):
            todo.extend(here)
        elif isinstance(here, Mapping):
            for tag, payload in here.items():
                if tag == "tensor" or tag.startswith("torch."):
                    return True
                todo.append(payload)
    return False
