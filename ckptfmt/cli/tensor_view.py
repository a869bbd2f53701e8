"""One tensor of a generation: where its bytes lie, and their digests."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfmt.cli import quantities as q
from ckptfmt.cli.output import Page, style
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.reports import Report
from ckptfmt.format.index import StoredBox as IndexBox
from ckptfmt.format.index import TensorEntry

CHUNKS = 12
BOXES = 12


@dataclass(frozen=True)
class ChunkView(Report):
    """``offset`` is absolute in the pack."""

    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True)
class BoxView(Report):
    """One box; ``start`` and ``size`` in elements, ``offset`` absolute in the pack, in bytes."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    pack: str
    offset: int
    nbytes: int
    chunks: tuple[ChunkView, ...]


@dataclass(frozen=True)
class StoredView(Report):
    """One stored copy: the only one, or that of one rank."""

    kind: str
    rank: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    boxes: tuple[BoxView, ...]


@dataclass(frozen=True)
class TensorView(Report):
    """One tensor by a name that it was saved under. Chunk digests are xxh3-128 of the raw little-endian bytes."""

    report: str
    url: str
    run: str
    generation_id: int
    step: int
    name: str
    stored_name: str
    """The name under which its bytes are stored: another one where it is tied."""
    aliases: tuple[str, ...]
    """All other names of the same bytes."""
    digest_algorithm: str
    chunk_bytes: int
    stored: tuple[StoredView, ...]


def tensor_view(opened: Opened, url: str, name: str) -> TensorView:
    """``NotFound`` lists near names."""
    stored_name = opened.index.canonical(name)
    aliases = [alias for alias, target in opened.manifest.aliases.items() if target == stored_name]
    return TensorView(
        report="tensor",
        url=url,
        run=opened.info.run,
        generation_id=opened.info.id,
        step=opened.info.step,
        name=name,
        stored_name=stored_name,
        aliases=tuple(other for other in [stored_name, *aliases] if other != name),
        digest_algorithm=opened.manifest.digest_algorithm,
        chunk_bytes=opened.manifest.chunk_bytes,
        stored=tuple(_stored(opened, entry) for entry in opened.index.entries(name)),
    )


def _stored(opened: Opened, entry: TensorEntry) -> StoredView:
    boxes = tuple(_box(opened, box) for box in entry.boxes)
    return StoredView(entry.kind, entry.rank, entry.dtype, tuple(entry.shape), entry.nbytes, boxes)


def _box(opened: Opened, box: IndexBox) -> BoxView:
    step = opened.manifest.chunk_bytes
    chunks = tuple(
        ChunkView(box.offset + at * step, min(step, box.nbytes - at * step), digest.hex())
        for at, digest in enumerate(box.digests)
    )
    key = opened.pack_key(box.pack.name, box.pack.generation)
    return BoxView(tuple(box.start), tuple(box.size), key, box.offset, box.nbytes, chunks)


def show_tensor(page: Page, view: TensorView) -> None:
    page.line(
        style(f"tensor {view.name}", "bold"), f" of generation #{view.generation_id}, run {view.run}, step {view.step}"
    )
    page.facts([("tied to", ", ".join(view.aliases)), ("digests", _digest_text(view))])
    for stored in view.stored:
        page.blank()
        of = "" if stored.rank < 0 else f" of rank {stored.rank}"
        boxes = "" if len(stored.boxes) == 1 else f" in {len(stored.boxes):,} boxes"
        page.heading(f"{stored.dtype} {q.shape(stored.shape)}, {q.size(stored.nbytes)}, {stored.kind}{of}{boxes}")
        for box in stored.boxes[:BOXES]:
            _show_box(page, box, whole=box.size == stored.shape)
        if len(stored.boxes) > BOXES:
            page.line(style(f"  and {len(stored.boxes) - BOXES} more boxes: --json", "dim"))


def _digest_text(view: TensorView) -> str:
    return f"{view.digest_algorithm} of every {view.chunk_bytes >> 20} MiB"


def _show_box(page: Page, box: BoxView, *, whole: bool) -> None:
    extent = "all of it" if whole else f"box at {q.shape(box.start)} of size {q.shape(box.size)}"
    page.line(f"  {extent}: {box.nbytes:,} bytes at {box.offset:,} in {box.pack}")
    rows = [(f"{chunk.offset:,}", f"{chunk.nbytes:,}", chunk.digest) for chunk in box.chunks[:CHUNKS]]
    if rows:
        page.table((">CHUNK AT", ">BYTES", "DIGEST"), rows, indent=4)
    if len(box.chunks) > CHUNKS:
        page.line(style(f"    and {len(box.chunks) - CHUNKS} more chunks: --json", "dim"))
