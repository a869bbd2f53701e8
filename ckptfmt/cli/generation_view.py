"""One generation in full: identity, history, timings, packs, contents, tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ckptfmt.cli import contents as c
from ckptfmt.cli import quantities as q
from ckptfmt.cli.history import HistoryItem, history_table, items
from ckptfmt.cli.listing import abort_text, marks_text, state_text
from ckptfmt.cli.output import Page, style
from ckptfmt.cli.places import Place
from ckptfmt.cli.resume import problem_of
from ckptfmt.cli.run_view import contents_heading
from ckptfmt.engine import verdicts
from ckptfmt.engine.load.resolve import Wanted, resolve_row
from ckptfmt.engine.opened import Opened, open_row
from ckptfmt.engine.reports import GenerationInfo, Problem, Report
from ckptfmt.errors import BackendError, FormatError, NotFound
from ckptfmt.format.states import State
from ckptfmt.ports.records import GenerationRecord
from ckptfmt.reference import parse_at

TENSORS = 15


@dataclass(frozen=True)
class Timings(Report):
    """Seconds. Unknown ones are None: by proof only storage's own facts are there."""

    stall: float | None
    """Training was blocked; the largest over the ranks."""
    write: float | None
    """Writing and making durable; the largest over the ranks."""
    staged: float | None
    """From the beginning (C1) until every rank had staged; None if one of them has not, or was never told to have."""
    durable: float | None
    """From the beginning (C1) until every rank was durable (C3)."""
    commit: float | None
    """From the beginning (C1) to the commit point (C4)."""
    proof: float | None
    """From the commit point until COMMIT.json was on storage (C5)."""


@dataclass(frozen=True)
class RankView(Report):
    rank: int
    state: str
    nbytes: int | None
    stall_seconds: float | None
    write_seconds: float | None
    retries: int
    error: str | None
    staged_bytes: int | None
    """On the stage of its host; None: it wrote straight to the durable tier, or has not staged yet."""
    staged_seconds: float | None
    replicated_bytes: int | None
    """How much of that the durable tier holds."""


@dataclass(frozen=True)
class PackView(Report):
    """``generation`` is the key of the generation whose folder holds it, None for the own one."""

    name: str
    rank: int
    nbytes: int
    generation: str | None


@dataclass(frozen=True)
class TensorLine(Report):
    """``rank`` is -1 unless ``kind`` is ``per_rank``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kind: str
    rank: int
    boxes: int


@dataclass(frozen=True)
class GenerationView(Report):
    """One generation. What only a committed one has is None or empty for the others."""

    report: str
    url: str
    read_by: str
    generation: GenerationInfo
    parent_id: int | None
    frozen_at: str | None
    """When the snapshot was taken (RFC 3339 UTC)."""
    library: str | None
    """Library and version that wrote it."""
    manifest: str | None
    manifest_nbytes: int | None
    timings: Timings
    ranks: tuple[RankView, ...]
    history: tuple[HistoryItem, ...]
    packs: tuple[PackView, ...]
    metadata: Any
    contents: c.Contents | None
    tensors: tuple[TensorLine, ...]
    """The largest first; all of them with ``--tensors``."""
    tensors_left_out: int
    problem: Problem | None
    """Why it cannot be read, if it is committed and cannot."""


def generation_view(place: Place, *, every: bool) -> GenerationView:
    """The generation that the URL names: with a catalog in any state, by proof a committed one."""
    if place.site.catalog is None:
        return _view(place, place.open(), None, None, every=every)
    row = _row(place)
    opened, problem = _try_open(place, row)
    return _view(place, opened, row, problem, every=every)


def _row(place: Place) -> GenerationRecord:
    wanted = parse_at(place.reference.at)
    catalog, run = place.site.sql(), place.reference.run
    if wanted.id is not None:
        row = catalog.generation(wanted.id)
        if row is not None and row.run == run:
            return row
    return resolve_row(catalog, place.url, run, Wanted(wanted.id, wanted.step, wanted.tag))


def _try_open(place: Place, row: GenerationRecord) -> tuple[Opened | None, Problem | None]:
    if row.state is not State.COMMITTED:
        return None, None
    try:
        return open_row(place.site, row), None
    except (FormatError, NotFound, BackendError) as error:
        return None, problem_of(error)


def _view(
    place: Place, opened: Opened | None, row: GenerationRecord | None, problem: Problem | None, *, every: bool
) -> GenerationView:
    if row is not None:
        info, folder = GenerationInfo.of(row), verdicts.folder_of(row)
    elif opened is not None:
        info, folder = opened.info, opened.folder
    else:
        raise AssertionError("neither a row nor an opened generation")
    manifest = None if opened is None else opened.manifest
    tensors = () if opened is None else _tensors(opened)
    shown = tensors if every else tensors[:TENSORS]
    root = place.site.backend.url.rstrip("/")
    return GenerationView(
        report="generation",
        url=f"{root}/{folder}" if folder else root,
        read_by=place.read_by,
        generation=info,
        parent_id=_parent_id(place, info),
        frozen_at=None if manifest is None else manifest.created_at,
        library=None if manifest is None else f"{manifest.writer.library} {manifest.writer.version}",
        manifest=None if row is None else row.manifest_name,
        manifest_nbytes=None if row is None else row.manifest_bytes,
        timings=_timings(place, info),
        ranks=_ranks(place, info),
        history=_history(place, info),
        packs=()
        if manifest is None
        else tuple(PackView(p.name, p.rank, p.nbytes, p.generation) for p in manifest.packs),
        metadata=None if opened is None else c.json_value(opened.metadata()),
        contents=None if opened is None else c.contents_of(opened),
        tensors=shown,
        tensors_left_out=len(tensors) - len(shown),
        problem=problem,
    )


def _parent_id(place: Place, info: GenerationInfo) -> int | None:
    if info.parent_key is None or place.site.catalog is None:
        return None
    parent = place.site.catalog.generation_by_key(info.parent_key)
    return None if parent is None else parent.id


def _ranks(place: Place, info: GenerationInfo) -> tuple[RankView, ...]:
    if place.site.catalog is None:
        return ()
    return tuple(
        RankView(
            rank=r.rank,
            state=r.state,
            nbytes=r.nbytes,
            stall_seconds=r.stall_seconds,
            write_seconds=r.write_seconds,
            retries=r.retries,
            error=r.error,
            staged_bytes=r.staged_bytes,
            staged_seconds=r.staged_seconds,
            replicated_bytes=r.replicated_bytes,
        )
        for r in place.site.catalog.ranks(info.id)
    )


def _staged_at(place: Place, info: GenerationInfo) -> datetime | None:
    """When the last rank had staged."""
    times = [] if place.site.catalog is None else [rank.staged_at for rank in place.site.catalog.ranks(info.id)]
    known = [moment for moment in times if moment is not None]
    return max(known) if known and len(known) == len(times) else None


def _history(place: Place, info: GenerationInfo) -> tuple[HistoryItem, ...]:
    return () if place.site.catalog is None else items(place.site.catalog.events(generation_id=info.id))


def _timings(place: Place, info: GenerationInfo) -> Timings:
    if place.site.catalog is None:
        return Timings(None, None, None, None, None, None)
    writes = [rank.write_seconds for rank in _ranks(place, info) if rank.write_seconds is not None]
    return Timings(
        stall=info.stall_seconds,
        write=max(writes, default=None),
        durable=q.between(info.created_at, info.durable_at),
        staged=q.between(info.created_at, _staged_at(place, info)),
        commit=q.between(info.created_at, info.committed_at),
        proof=q.between(info.committed_at, info.proven_at),
    )


def _tensors(opened: Opened) -> tuple[TensorLine, ...]:
    """All tensors, the largest first."""
    table, boxes = opened.manifest.tensors, [0] * len(opened.manifest.tensors.name)
    for row in opened.manifest.boxes.tensor:
        boxes[row] += 1
    sizes = opened.index.tensor_bytes
    columns = zip(table.name, table.dtype, table.shape, sizes, table.kind, table.rank, boxes, strict=True)
    lines = [
        TensorLine(name, dtype, tuple(shape), nbytes, held, rank, parts)
        for name, dtype, shape, nbytes, held, rank, parts in columns
    ]
    return tuple(sorted(lines, key=lambda line: -line.nbytes))


# -- pages ------------------------------------------------------------------------------------------
def show_generation(page: Page, view: GenerationView, now: datetime) -> None:
    info = view.generation
    marks = marks_text(info)
    page.line(
        style(f"generation #{info.id} of run {info.run}, step {info.step}", "bold"),
        " is ",
        state_text(info),
        f" ({marks})" if marks else "",
    )
    page.facts(_facts(page, view, now))
    if view.ranks and (len(view.ranks) > 1 or info.state != "committed"):
        _show_ranks(page, view.ranks)
    if view.history:
        page.blank()
        page.heading("History")
        history_table(page, view.history, generations=False)
    if view.packs:
        page.blank()
        page.heading("Packs")
        rows = [(pack.name, str(pack.rank), q.size(pack.nbytes), pack.generation or "") for pack in view.packs]
        page.table(("NAME", ">RANK", ">SIZE", ""), rows, indent=2)
    if view.contents is not None:
        page.blank()
        contents_heading(page, "State", view.contents)
        c.show_contents(page, view.contents)
    if view.tensors:
        page.blank()
        page.heading("Tensors" if not view.tensors_left_out else "Largest tensors")
        show_tensors(page, view.tensors)
        if view.tensors_left_out:
            page.line(style(f"  and {q.count(view.tensors_left_out, 'more tensor')}: --tensors", "dim"))


def _facts(page: Page, view: GenerationView, now: datetime) -> list[tuple[str, str]]:
    info, times = view.generation, view.timings
    parent = info.parent_key or "none: a first one"
    if view.parent_id is not None:
        parent = f"#{view.parent_id} ({parent})"
    timed = [
        f"{name} {q.duration(seconds)}"
        for name, seconds in (
            ("stall", times.stall),
            ("write", times.write),
            ("staged after", times.staged),
            ("durable after", times.durable),
            ("committed after", times.commit),
            ("proven after", times.proof),
        )
        if seconds is not None
    ]
    when = "" if info.committed_at is None else f"{q.moment(info.committed_at)} ({q.age(info.committed_at, now)})"
    began = "" if info.created_at is None else f"{q.moment(info.created_at)} ({q.age(info.created_at, now)})"
    problem = "" if view.problem is None else page.paragraph(f"it cannot be read: {view.problem.message}", "red")
    metadata = "" if view.metadata in (None, {}) else c.cut(str(view.metadata), 400)
    return [
        ("aborted", page.paragraph(abort_text(info), "red")),
        ("quarantined", page.paragraph(info.quarantine_reason or "", "red")),
        ("key", info.key),
        ("folder", view.url),
        ("parent", parent if info.state == "committed" else ""),
        ("began", began if not when else ""),
        ("committed", f"{when}, commit {info.commit_seq} of the run" if when else ""),
        ("tags", ", ".join(info.tags)),
        ("ranks", "" if info.world_size is None else str(info.world_size)),
        ("written by", view.library or ""),
        ("timings", ", ".join(timed)),
        ("metadata", metadata),
        ("PROBLEM", problem),
    ]


def _show_ranks(page: Page, ranks: Sequence[RankView]) -> None:
    page.blank()
    page.heading("Ranks")
    staged = any(rank.staged_bytes for rank in ranks)
    rows = [
        (
            str(rank.rank),
            rank.state,
            q.size(rank.nbytes),
            q.duration(rank.stall_seconds),
            q.duration(rank.write_seconds),
            q.rate(rank.nbytes, rank.write_seconds),
            *([q.duration(rank.staged_seconds), _copied(rank)] if staged else []),
            rank.error or "",
        )
        for rank in ranks
    ]
    stage = (">STAGED IN", ">COPIED") if staged else ()
    page.table((">RANK", "STATE", ">SIZE", ">STALL", ">WRITE", ">RATE", *stage, ""), rows, indent=2)


def _copied(rank: RankView) -> str:
    """How much of what is staged the durable tier holds."""
    if not rank.staged_bytes:
        return q.ABSENT
    return f"{100 * (rank.replicated_bytes or 0) // rank.staged_bytes} %"


def show_tensors(page: Page, tensors: Sequence[TensorLine]) -> None:
    rows = [
        (
            tensor.name,
            tensor.dtype,
            q.shape(tensor.shape),
            q.size(tensor.nbytes),
            _held(tensor),
        )
        for tensor in tensors
    ]
    page.table(("NAME", "DTYPE", "SHAPE", ">SIZE", ""), rows, indent=2)


def _held(tensor: TensorLine) -> str:
    """By which ranks, unless all of them hold it alike."""
    if tensor.rank >= 0:
        return f"rank {tensor.rank}"
    boxes = "" if tensor.boxes == 1 else f", {q.count(tensor.boxes, 'box', 'boxes')}"
    return "" if tensor.kind == "replicated" and not boxes else f"{tensor.kind}{boxes}"
