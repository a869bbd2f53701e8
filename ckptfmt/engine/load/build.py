"""Building values: read the wanted tensors into fresh memory, verify them, and rebuild the tree around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptfmt.engine.arena import map_memory
from ckptfmt.engine.assemble import assemble
from ckptfmt.engine.families import Families
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.read import ReadPlan, box_view, plan_reads, read_regions
from ckptfmt.errors import UnsupportedValue
from ckptfmt.format import tree
from ckptfmt.format.index import TensorEntry
from ckptfmt.ports.arrays import ArrayFamily, LeafSpec

Key = tuple[str, int]
"""Stored name, and rank or -1."""


class Memory:
    """Host bytes of tensors that were read: whole, in C order."""

    def __init__(self, opened: Opened, plan: ReadPlan, memory: memoryview) -> None:
        self._views: dict[tuple[str, int], memoryview] = {}
        self._opened = opened
        for region in plan.regions:
            for box in region.boxes:
                self._views[(box.pack, box.offset)] = box_view(memory, region, box)

    def bytes_of(self, entry: TensorEntry) -> memoryview:
        """The tensor's bytes; one that is stored in several boxes is put together first."""
        if not entry.nbytes:
            return memoryview(bytearray())
        boxes = self._opened.boxes(entry)
        views = [self._views[(box.pack, box.offset)] for box in boxes if box.nbytes]
        if len(boxes) == 1:
            return views[0]
        whole = map_memory(entry.nbytes)[: entry.nbytes]
        parts = [(box.start, box.size, view) for box, view in zip([b for b in boxes if b.nbytes], views, strict=True)]
        assemble(whole, entry.shape, entry.dtype, parts)
        return whole


def read_entries(
    opened: Opened,
    entries: Sequence[TensorEntry],
    *,
    verify: bool = True,
    memory: Callable[[int], memoryview] = map_memory,
    progress: Callable[[int], None] | None = None,
) -> Memory:
    """Read ``entries`` whole, each stored tensor once."""
    unique = list({(entry.name, entry.rank): entry for entry in entries}.values())
    plan = plan_reads(box for entry in unique for box in opened.boxes(entry))
    target = memory(plan.memory_bytes) if plan.memory_bytes else memoryview(bytearray())
    read_regions(opened.site.backend, plan, target, verify=verify, progress=progress)
    return Memory(opened, plan, target)


def wanted_entries(opened: Opened, nodes: Sequence[tree.Node], rank: int) -> list[TensorEntry]:
    """The stored tensors that ``nodes`` refer to, looking into the rank's slots; each once."""
    found: dict[Key, TensorEntry] = {}
    todo = list(nodes)
    while todo:
        for tag, name in tree.references(todo.pop()):
            if tag == "per_rank":
                todo.append(opened.slot(tree.per_rank(name), rank))
            else:
                entry = opened.tensor(name, rank)
                found.setdefault((entry.name, entry.rank), entry)
    return list(found.values())


class Builder:
    """Rebuilds values from nodes. Tied tensors come back as one object."""

    def __init__(
        self,
        opened: Opened,
        families: Families,
        memory: Memory,
        *,
        rank: int,
        framework: str = "saved",
        device: Any | None = None,
    ) -> None:
        self._opened = opened
        self._families = families
        self._memory = memory
        self._rank = rank
        self._framework = framework
        self._device = device
        self._built: dict[tuple[str, int, str, tuple[str, ...]], Any] = {}

    def value(self, node: tree.Node) -> Any:
        return tree.decode(node, self._leaf)

    def _leaf(self, tag: str, payload: Any) -> Any:
        if tag == "per_rank":
            return self.value(self._opened.slot(tree.per_rank(payload), self._rank))
        name, flags = tree.split_reference(payload)
        entry = self._opened.tensor(name, self._rank)
        key = (entry.name, entry.rank, tag, flags)
        if key not in self._built:
            self._built[key] = self.tensor(tag, entry, flags)
        return self._built[key]

    def tensor(self, tag: str, entry: TensorEntry, flags: tuple[str, ...]) -> Any:
        host = self._memory.bytes_of(entry)
        if tag == "stored_bytes":
            return bytes(host)
        if tag == "stored_bytearray":
            return bytearray(host)
        family, flags = self._family(tag, entry, flags)
        size = entry.shape
        spec = LeafSpec(entry.dtype, size, (0,) * len(size), size, entry.nbytes, entry.kind)
        return family.build(spec, host, flags, self._device)

    def _family(self, tag: str, entry: TensorEntry, flags: tuple[str, ...]) -> tuple[ArrayFamily, tuple[str, ...]]:
        name = {"torch": "tensor", "numpy": "array", "saved": tag}[self._framework]
        family = self._families.named(name)
        if family is None and self._framework == "saved":
            # Without torch a saved torch tensor is still good for reading, as an array.
            family, flags = self._families.named("array"), ()
        if family is None:
            raise UnsupportedValue(f"tensor {entry.name!r} was saved as a {tag}, which no loaded library can build")
        return family, flags if name == tag else ()


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
