"""Building values: read the wanted tensors into fresh memory, verify them, and rebuild the tree around them."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ckptfmt.engine.arena import map_memory
from ckptfmt.engine.assemble import assemble
from ckptfmt.engine.families import Families
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.read import ReadPlan, StoredBox, plan_reads, read_regions, show_regions, verify_shown
from ckptfmt.engine.stored import Stored
from ckptfmt.engine.touch import address_of
from ckptfmt.errors import BackendError, UnsupportedValue
from ckptfmt.format import tree
from ckptfmt.ports.arrays import ArrayFamily, LeafSpec

log = logging.getLogger("ckptfmt")


class Memory:
    """Host bytes of tensors that were read: whole, in C order."""

    def __init__(self, plan: ReadPlan, memory: memoryview) -> None:
        self._memory = memory
        self._base = address_of(memory)
        self._packs: dict[str, tuple[list[int], list[int]]] = {}
        """For each pack the offsets of its regions, and how far from them their bytes lie in memory."""
        for region in plan.regions:
            starts, shifts = self._packs.setdefault(region.pack, ([], []))
            starts.append(region.start)
            shifts.append(region.memory_offset - region.start)

    def bytes_of(self, stored: Stored) -> memoryview:
        """The tensor's bytes; one that is stored in several boxes is put together first."""
        if not stored.nbytes:
            return memoryview(bytearray())
        if len(stored.boxes) == 1:  # nearly always, so without a detour
            box = stored.boxes[0]
            starts, shifts = self._packs[box.pack]
            at = box.offset + shifts[bisect_right(starts, box.offset) - 1]
            return self._memory[at : at + box.nbytes]
        whole = map_memory(stored.nbytes)[: stored.nbytes]
        parts = [(box.start, box.size, self._view(box)) for box in stored.boxes if box.nbytes]
        assemble(whole, stored.shape, stored.dtype, parts)
        return whole

    def address(self, box: StoredBox) -> int:
        """Where the bytes of a box lie, as long as this memory is held."""
        starts, shifts = self._packs[box.pack]
        return self._base + box.offset + shifts[bisect_right(starts, box.offset) - 1]

    def _view(self, box: StoredBox) -> memoryview:
        at = self.address(box) - self._base
        return self._memory[at : at + box.nbytes]


def read_entries(
    opened: Opened,
    entries: Sequence[Stored],
    *,
    verify: bool = True,
    memory: Callable[[int], memoryview] = map_memory,
    progress: Callable[[int], None] | None = None,
) -> Memory:
    """Read ``entries`` whole, each stored tensor once."""
    plan = _plan(entries)
    target = memory(plan.memory_bytes) if plan.memory_bytes else memoryview(bytearray())
    read_regions(opened.site.backend, plan, target, verify=verify, progress=progress)
    return Memory(plan, target)


def show_entries(opened: Opened, entries: Sequence[Stored]) -> Memory | None:
    """``entries``, verified, where the host has their bytes and keeps them: only to be copied from. None: read them."""
    backend = opened.site.backend
    plan = _plan(entries)
    shown = show_regions(backend, plan)
    if shown is None:
        return None
    try:
        verify_shown(plan, shown)
    except BackendError as error:
        log.info("%s: what the page cache held cannot be kept there: %s", opened.name, error)
        return None  # reading it says what is wrong with it
    return Memory(plan, shown.memory)


def _plan(entries: Sequence[Stored]) -> ReadPlan:
    unique = list({(entry.name, entry.rank): entry for entry in entries}.values())
    return plan_reads(chain.from_iterable([entry.boxes for entry in unique]))


def wanted_entries(opened: Opened, nodes: Sequence[tree.Node], rank: int) -> list[Stored]:
    """The stored tensors that ``nodes`` refer to, looking into the rank's slots; each once."""
    found: dict[str, Stored] = {}
    find = opened.stored.find
    todo = list(nodes)
    while todo:
        for tag, name in tree.references(todo.pop()):
            if tag == "per_rank":
                todo.append(opened.slot(tree.per_rank(name), rank))
            else:
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
        self._find = opened.stored.find
        self._families = families
        self._memory = memory
        self._rank = rank
        self._framework = framework
        self._device = device
        self._kinds: dict[tuple[str, tuple[str, ...]], _Kind] = {}

    def value(self, node: tree.Node) -> Any:
        return tree.decode(node, self._leaf)

    def _leaf(self, tag: str, payload: Any) -> Any:
        if tag == "per_rank":
            return self.value(self._opened.slot(tree.per_rank(payload), self._rank))
        name, flags = (payload, ()) if type(payload) is str else tree.split_reference(payload)
        stored = self._find(name, self._rank)
        kind = self._kinds.get((tag, flags))
        if kind is None:
            kind = self._kinds[tag, flags] = self._kind(tag, flags, stored)
        value = kind.built.get(stored.name)
        if value is None:
            value = kind.built[stored.name] = self._build(kind, stored)
        return value

    def _build(self, kind: _Kind, stored: Stored) -> Any:
        host = self._memory.bytes_of(stored)
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
