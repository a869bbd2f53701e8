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

from ckptfmt.engine.arena import Arena
from ckptfmt.engine.collector import held_back
from ckptfmt.engine.families import Families
from ckptfmt.engine.load.build import Builder, read_entries, wanted_entries
from ckptfmt.engine.load.decisions import Apply, RestorePlan
from ckptfmt.engine.load.filling import Filling
from ckptfmt.engine.load.match import Matcher
from ckptfmt.engine.load.names import Rename, Selection, rename_nodes
from ckptfmt.engine.load.nodes import check_depth
from ckptfmt.engine.load.ranks import RankMap, RankView, view_for_restore
from ckptfmt.engine.load.window import fill_through_window
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.patterns import Patterns
from ckptfmt.engine.reports import RestoreReport
from ckptfmt.errors import CkptError, Mismatch


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
    world_size: int = 1
    """Which rank of today is filled, and how many there are."""
    map: RankMap | None = None
    """Rank of today -> the saved rank whose own values it gets; None: its own, at an equal world size."""
    agree: Callable[[], None] = lambda: None
    """Called once, when all is read and verified that can be before anything live is touched: it may raise."""


def restore_state(
    opened: Opened, into: Any, families: Families, options: RestoreOptions, *, arena: Arena | None = None
) -> RestoreReport:
    """Fill ``into``. ``Mismatch`` lists every difference before anything is read or touched.

    With ``arena`` the bytes land there: aligned, already touched, and needed for the next save anyway.
    """
    began, mark = time.perf_counter(), opened.nearest.log.mark()
    with held_back():
        view = view_for_restore(opened, rank=options.rank, world_size=options.world_size, map=options.map)
        plan = plan_restore(view, into, families, options)
        read = _execute(view, plan, families, options, arena)
    reading = opened.nearest.log.since(mark)
    return RestoreReport(
        generation_id=opened.info.id,
        run=opened.info.run,
        step=opened.info.step,
        metadata=opened.metadata(),
        nbytes=read.nbytes,
        amplification=read.amplification,
        seconds=time.perf_counter() - began,
        loaded=tuple(plan.loaded),
        missing=tuple(plan.missing),
        unexpected=tuple(plan.unexpected),
        cast=tuple(plan.cast),
        skipped=tuple(plan.skipped),
        sources=reading.sources,
        damaged=reading.damaged,
        retries=reading.retries,
    )


def plan_restore(view: RankView, into: Any, families: Families, options: RestoreOptions) -> RestorePlan:
    """Decide from the manifest what a restore would do. Touches nothing."""
    opened = view.opened
    for tree_of in (opened.common, *view.own_trees()):
        check_depth(tree_of)
    renamed = None
    if options.rename is not None:
        renamed = rename_nodes(opened.common, options.rename, view.look)
    matcher = Matcher(
        view,
        families,
        families.expand(into),
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


@dataclass(frozen=True)
class _Read:
    """Bytes that a restore took, and that it read for them."""

    nbytes: int
    read_bytes: int

    @property
    def amplification(self) -> float:
        return self.read_bytes / self.nbytes if self.nbytes else 1.0


def _execute(
    view: RankView, plan: RestorePlan, families: Families, options: RestoreOptions, arena: Arena | None
) -> _Read:
    opened = view.opened
    nodes = [*(item.node for item in plan.assigns), *(item.node for item in plan.applies)]
    entries = wanted_entries(view, nodes, {name for item in plan.applies for name in item.made})
    builder = Builder(view, families, read_entries(opened, entries), marks=True)
    values = [_translated(item, builder.value(item.node, item.made)) for item in plan.applies]
    items = [builder.value(item.node) for item in plan.assigns]
    _check(plan, values)
    builds, fills = Filling(plan.builds), Filling(plan.fills)
    held = read_bytes = sum(entry.nbytes for entry in entries)
    changed: list[str] = []
    if options.atomic and _fits(opened, held + builds.read_bytes + fills.read_bytes, options):
        builds.fill(builds.read(opened))
        memory = fills.read(opened, arena)
        options.agree()
        fills.fill(memory)
        read_bytes += builds.read_bytes + fills.read_bytes
    else:
        read_bytes += fill_through_window(opened, plan.builds, [])
        options.agree()
        try:
            read_bytes += fill_through_window(opened, plan.fills, changed)
        except CkptError as error:
            if changed:
                error.add_note(f"already changed: {', '.join(changed)}")
            raise
    changed = list(dict.fromkeys(fill.path for fill in plan.fills))
    _apply(plan, values, items, changed)
    return _Read(held + builds.nbytes + fills.nbytes, read_bytes)


def _fits(opened: Opened, read_bytes: int, options: RestoreOptions) -> bool:
    """Whether all that is read may lie in host memory at once.

    A generation that is not above the limit in all never goes through the window, also where a tensor of it is wanted
    twice.
    """
    limit = options.host_bytes_max
    return limit is None or read_bytes <= limit or opened.manifest.nbytes <= limit


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
