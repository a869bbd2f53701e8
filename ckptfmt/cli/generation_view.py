"""One generation in full: identity, history, timings, packs, contents, tensors."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ckptfmt.cli import contents as c
from ckptfmt.cli import quantities as q
from ckptfmt.cli.history import HistoryItem, items
from ckptfmt.cli.places import Place
from ckptfmt.cli.resume import problem_of
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
