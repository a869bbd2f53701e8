"""``restore``: fill a live state in place from a committed generation.

Everything is decided from the manifest, then all bytes are read and verified, and only then is anything
copied: if a step fails, live objects are as they were. (With ``atomic=False`` verified bytes go straight
into the live tensors, and an error says which were already changed.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfmt.engine.arena import Arena, map_memory
from ckptfmt.engine.assemble import cut
from ckptfmt.engine.collector import held_back
from ckptfmt.engine.families import Families
from ckptfmt.engine.load.build import Builder, Memory, read_entries, show_entries, wanted_entries
from ckptfmt.engine.load.decisions import Apply, Fill, RestorePlan
from ckptfmt.engine.load.match import Matcher
from ckptfmt.engine.load.names import Rename, Selection, rename_nodes
from ckptfmt.engine.load.nodes import check_depth
from ckptfmt.engine.load.window import fill_through_window
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.patterns import Patterns
from ckptfmt.engine.reports import RestoreReport
from ckptfmt.engine.stored import Stored
from ckptfmt.engine.touch import address_of
from ckptfmt.engine.transfer import copy_memory
from ckptfmt.errors import CkptError, Mismatch
from ckptfmt.ports.arrays import ArrayFamily


@dataclass(frozen=True)
class RestoreOptions:
    strict: bool = True
    cast: bool = False
    keys: Patterns | None = None
    rename: Rename | None = None
    atomic: bool = True
    host_bytes_max: int | None = None
    """Bytes in which an atomic restore may hold what it read; else live tensors are filled through a window, as with
    ``atomic=False``. What is no live tensor, above all what ``load_state_dict`` takes, is held whole in any case."""
    rank: int = 0


def restore_state(
    opened: Opened, into: Any, families: Families, options: RestoreOptions, *, arena: Arena | None = None
) -> RestoreReport:
    """Fill ``into``. ``Mismatch`` lists every difference before anything is read or touched.

    With ``arena`` the bytes land there: aligned, already touched, and needed for the next save anyway.
    """
    began = time.perf_counter()
    with held_back():
        plan = plan_restore(opened, into, families, options)
        nbytes = _execute(opened, plan, families, options, arena)
    return RestoreReport(
        generation_id=opened.info.id,
        run=opened.info.run,
        step=opened.info.step,
        metadata=opened.metadata(),
        nbytes=nbytes,
        seconds=time.perf_counter() - began,
        loaded=tuple(plan.loaded),
        missing=tuple(plan.missing),
        unexpected=tuple(plan.unexpected),
        cast=tuple(plan.cast),
        skipped=tuple(plan.skipped),
    )


def plan_restore(opened: Opened, into: Any, families: Families, options: RestoreOptions) -> RestorePlan:
    """Decide from the manifest what a restore would do. Touches nothing."""
    for tree_of in (opened.common, *opened.slots(options.rank).values()):
        check_depth(tree_of)
    renamed = None
    if options.rename is not None:
        renamed = rename_nodes(opened.common, options.rename, lambda node: opened.slot(node, options.rank))
    matcher = Matcher(
        opened,
        families,
        families.expand(into),
        rank=options.rank,
        cast=options.cast,
        selection=Selection(options.keys),
        renamed=renamed,
    )
    plan = matcher.run(into)
    problems = list(plan.problems)
    if options.strict:
        problems += [f"{path}: not in the checkpoint (missing)" for path in plan.missing]
        problems += [f"{path}: in the checkpoint only (unexpected)" for path in plan.unexpected]
    if problems:
        advice = "; strict=False restores what fits and reports the rest" if not plan.problems else ""
        raise Mismatch(f"{opened.name} does not fit the live state; nothing was changed{advice}:", tuple(problems))
    if not plan.loaded:
        raise Mismatch(
            f"{opened.name}: not one of its values matches the live state; nothing was changed; check names, keys= and "
            "rename=",
            tuple(f"{path}: unexpected" for path in plan.unexpected[:20]),
            kind="nothing_loaded",
        )
    return plan


def _execute(
    opened: Opened, plan: RestorePlan, families: Families, options: RestoreOptions, arena: Arena | None
) -> int:
    nodes = [*(item.node for item in plan.assigns), *(item.node for item in plan.applies)]
    entries = wanted_entries(opened, nodes, options.rank)
    builder = Builder(opened, families, read_entries(opened, entries), rank=options.rank)
    values = [_translated(item, builder.value(item.node)) for item in plan.applies]
    items = [builder.value(item.node) for item in plan.assigns]
    _check(plan, values)
    changed: list[str] = []
    if options.atomic and _fits(plan, entries, options):
        _fill(plan.fills, _verified(opened, plan.fills, arena))
    else:
        try:
            fill_through_window(opened, plan.fills, changed)
        except CkptError as error:
            if changed:
                error.add_note(f"already changed: {', '.join(changed)}")
            raise
    changed = [fill.path for fill in plan.fills]
    _apply(plan, values, items, changed)
    return sum(fill.row.nbytes for fill in plan.fills) + sum(entry.nbytes for entry in entries)


def _fits(plan: RestorePlan, entries: Sequence[Stored], options: RestoreOptions) -> bool:
    """Whether the bytes of all live tensors may lie in host memory at once, beside ``entries``, which do already.

    Every stored tensor counts once: what is not above the limit in all never goes through the window.
    """
    if options.host_bytes_max is None:
        return True
    held = {(row.name, row.rank): row.nbytes for row in (*entries, *(fill.row for fill in plan.fills))}
    return sum(held.values()) <= options.host_bytes_max


def _translated(item: Apply, value: Any) -> Any:
    return value if item.translate is None else item.translate(value)


def _check(plan: RestorePlan, values: Sequence[Any]) -> None:
    """Ask every object whether it will take its state, before anything is touched."""
    problems: list[str] = []
    for item, value in zip(plan.applies, values, strict=True):
        if item.check is not None:
            try:
                item.check(value)
            except Mismatch as error:
                problems += [f"{item.path}: {problem}" for problem in error.problems or (error.message,)]
    if problems:
        raise Mismatch("the saved state does not fit the live objects; nothing was changed:", tuple(problems))


def _verified(opened: Opened, fills: Sequence[Fill], arena: Arena | None) -> Memory:
    """The bytes of all ``fills``, verified: in the arena, or without any memory where they are cached.

    Fresh memory costs more than the bytes that are read into it; an arena that has been touched does not.
    """
    entries = [fill.row for fill in fills]
    if arena is None or arena.touched < sum(row.nbytes for row in entries):
        on_host = all(fill.address is not None or not fill.row.nbytes for fill in fills)
        shown = show_entries(opened, entries) if on_host else None
        if shown is not None:
            return shown
    return read_entries(opened, entries, memory=map_memory if arena is None else _arena_memory(arena))


def _arena_memory(arena: Arena) -> Callable[[int], memoryview]:
    def reserve(nbytes: int) -> memoryview:
        arena.reserve(nbytes)
        return arena.view(0, nbytes)

    return reserve


def _fill(fills: Sequence[Fill], memory: Memory) -> None:
    """Copy verified bytes into the live tensors: dense host memory with our own threads, the rest by its family."""
    moves: list[tuple[int, int, int]] = []
    moved: dict[int, tuple[ArrayFamily, list[Any]]] = {}
    others: dict[int, tuple[ArrayFamily, list[tuple[Any, memoryview]]]] = {}
    cut_out: list[memoryview] = []
    for fill in fills:
        row = fill.row
        if not row.nbytes:
            continue
        address = None if fill.cast else fill.family.host_address(fill.value)
        if address is not None and fill.size == row.shape and len(row.boxes) == 1:
            moves.append((address, memory.address(row.boxes[0]), row.nbytes))
            moved.setdefault(id(fill.family), (fill.family, []))[1].append(fill.value)
            continue
        host = cut(memory.bytes_of(row), row.shape, row.dtype, fill.start, fill.size)
        if fill.cast:
            fill.family.fill_cast(fill.value, row.dtype, host)
        elif address is not None:
            cut_out.append(host)
            moves.append((address, address_of(host), host.nbytes))
            moved.setdefault(id(fill.family), (fill.family, []))[1].append(fill.value)
        else:
            others.setdefault(id(fill.family), (fill.family, []))[1].append((fill.value, host))
    captures = [family.fill(pairs) for family, pairs in others.values()]
    copy_memory(moves)
    for family, values in moved.values():
        family.wrote_to(values)
    for capture in captures:
        capture.wait()


def _apply(plan: RestorePlan, values: Sequence[Any], items: Sequence[Any], changed: list[str]) -> None:
    """Hand objects their states, assign plain values, and set random generators last."""
    order = sorted(zip(plan.applies, values, strict=True), key=lambda pair: pair[0].kind == "rng")
    for item, value in order:
        if item.kind != "rng":
            _call(item.path, item.apply, value, changed)
    for assign, value in zip(plan.assigns, items, strict=True):
        assign.put(value)
        changed.append(assign.path)
    for finish in plan.finish:
        finish()
    for item, value in order:
        if item.kind == "rng":
            _call(item.path, item.apply, value, changed)


def _call(path: str, apply: Callable[[Any], None], value: Any, changed: list[str]) -> None:
    try:
        apply(value)
    except Exception as error:
        note = f"{path or 'the state'}: load_state_dict failed during a restore"
        error.add_note(f"{note}; already changed: {', '.join(changed) or 'nothing'}")
        raise
    changed.append(path)
