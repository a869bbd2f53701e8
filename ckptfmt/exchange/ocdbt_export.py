"""A generation as an OCDBT database beside its packs: TensorStore opens it without ckptfmt, from any storage it reads.

The database is a Zarr v3 group: documents lie within its nodes, chunks are ranges of packs. TensorStore checks the
nodes; it knows no digests of ours, so the elements that are read through it are not verified.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ckptfmt.engine.keep.verify import Progress
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.reports import Report
from ckptfmt.errors import BackendError, CkptError, Conflict, NotFound
from ckptfmt.exchange.counting import Count
from ckptfmt.format import layout, ocdbt
from ckptfmt.ports.backend import Backend
from ckptfmt.views.box_bytes import VerifiedBytes
from ckptfmt.views.chunks import Chunk
from ckptfmt.views.references import grid_of_references, references
from ckptfmt.views.zarr_nodes import DOCUMENT, TENSORSTORE, ArrayNode, Nodes, chunk_key

if TYPE_CHECKING:
    from ckptfmt.pending import PendingSave

log: Final = logging.getLogger("ckptfmt")


@dataclass(frozen=True)
class OcdbtExport(Report):
    """What was written. ``manifest`` is the folder of ``manifest.ocdbt``, ``base`` the one that paths in the database
    are relative to; ``objects`` are the keys written, the manifest last. ``copied_nbytes`` are of chunks that are no
    range of a pack. ``as_bytes`` are the arrays whose element type is shown as ``uint8``."""

    report: str
    url: str
    run: str
    generation_id: int
    step: int
    manifest: str
    base: str
    objects: tuple[str, ...]
    arrays: int
    references: int
    copied_nbytes: int
    as_bytes: tuple[str, ...]


def export_ocdbt(opened: Opened, *, progress: Progress | None = None) -> OcdbtExport:
    """Write the database of ``opened`` into the generation's folder, to be removed with it.

    ``Conflict`` if there is one, ``Corrupt`` for damage in what had to be copied. Until the manifest, which comes last,
    is there nobody sees anything, and after an error it is not there. ``progress(done, total)`` gets the bytes that are
    copied, if any are.
    """
    backend, place = opened.site.backend, _Place(opened)
    try:
        backend.head(place.manifest)
    except NotFound:
        pass
    else:
        raise _taken(opened, place)
    nodes = Nodes(opened, known=TENSORSTORE)
    found = _Values(place)
    for name in nodes:
        found.add(nodes[name])
    found.values[DOCUMENT] = nodes.document
    committed = opened.info.committed_at
    database = ocdbt.encode_database(
        found.values.items(),
        nodes_file=place.file_of(place.nodes),
        uuid=bytes.fromhex(opened.info.key),
        committed_ns=0 if committed is None else round(committed.timestamp() * 1e6) * 1000,
    )
    written = _write(opened, place, found, database, Count(progress, found.copied_nbytes))
    return OcdbtExport(
        report="export.ocdbt",
        url=backend.url,
        run=opened.info.run,
        generation_id=opened.info.id,
        step=opened.info.step,
        manifest=_url(backend, opened.folder),
        base=_url(backend, place.base),
        objects=written,
        arrays=len(nodes),
        references=found.references,
        copied_nbytes=found.copied_nbytes,
        as_bytes=tuple(name for name in nodes if nodes[name].as_bytes),
    )


def index_when_committed(pending: PendingSave) -> None:
    """A done-callback of a save: write the database of what it committed. Give it on one rank.

    The save has succeeded before and is not affected: what fails here is logged.
    """
    if pending.row is None:
        return
    try:
        export_ocdbt(pending.result()._opened)
    except CkptError as error:
        log.warning("%s: no OCDBT database was written: %s; `ckptfmt export --ocdbt` makes up for it", pending, error)


class _Place:
    """Keys of the objects, under names that nobody else has taken, and paths as they stand in the database."""

    def __init__(self, opened: Opened) -> None:
        self._own = f"{opened.folder}/" if opened.folder else ""
        token = secrets.token_hex(8)
        self.nodes = self._own + layout.ocdbt_nodes_name(token)
        self.copies = self._own + layout.ocdbt_copies_name(token)
        self.manifest = self._own + ocdbt.MANIFEST
        inside = all(pack.generation is None for pack in opened.manifest.packs)
        self.base = opened.folder if inside else opened.folder.rpartition("/")[0]
        """The generation's folder, so that it can be copied elsewhere; that of the run if packs lie in others, too."""
        self._above = f"{self.base}/" if self.base else ""

    def file_of(self, key: str) -> str:
        return key.removeprefix(self._above)


@dataclass
class _Values:
    """Collects the entries of the database, and what has to be copied."""

    place: _Place
    values: dict[str, ocdbt.Value] = field(default_factory=dict)
    references: int = 0
    copied: list[tuple[int, Chunk]] = field(default_factory=list)
    """Where each will lie, and the chunk."""
    copied_nbytes: int = 0

    def add(self, node: ArrayNode) -> None:
        self.values[f"{node.name}/{DOCUMENT}"] = node.document_of(grid_of_references(node))
        for index, found in references(node):
            if isinstance(found, Chunk):
                value = ocdbt.Range(self.place.file_of(self.place.copies), self.copied_nbytes, found.nbytes)
                self.copied.append((self.copied_nbytes, found))
                self.copied_nbytes += found.nbytes
            else:
                value = ocdbt.Range(self.place.file_of(found.pack), found.offset, found.nbytes)
            self.values[chunk_key(node.name, index)] = value
            self.references += 1


def _write(opened: Opened, place: _Place, found: _Values, database: ocdbt.Database, count: Count) -> tuple[str, ...]:
    """Write all objects; of several writers at a time one has its manifest there, and the others ``Conflict``."""
    backend = opened.site.backend
    written: list[str] = []
    try:
        if found.copied:
            written.append(place.copies)
            _copy(opened, place.copies, found, count)
        written.append(place.nodes)
        backend.create(place.nodes, database.nodes)
    except BaseException:
        _remove(backend, written)
        raise
    try:
        backend.create(place.manifest, database.manifest)
    except Conflict as error:
        _remove(backend, written)
        raise _taken(opened, place) from error
    # After another error it may be there all the same, and then needs the others.
    return (*written, place.manifest)


def _copy(opened: Opened, key: str, found: _Values, count: Count) -> None:
    source = VerifiedBytes(opened)
    writer = opened.site.backend.open_writer(key, found.copied_nbytes)
    try:
        for offset, chunk in found.copied:
            writer.write_at(offset, chunk.read(source, 0, chunk.nbytes))
            count.add(chunk.nbytes)
        writer.finish()
    except BaseException:
        writer.abort()
        raise


def _remove(backend: Backend, keys: list[str]) -> None:
    """Nothing refers to these. What is left goes with the generation."""
    for key in keys:
        with suppress(BackendError):
            backend.delete(key)


def _taken(opened: Opened, place: _Place) -> Conflict:
    where = f"{opened.site.backend.url.rstrip('/')}/{place.manifest}"
    return Conflict(
        f"{opened.name} has an OCDBT database already ({where}), and it is never changed: open that one",
        kind="file_exists",
    )


def _url(backend: Backend, folder: str) -> str:
    root = backend.url.rstrip("/")
    return f"{root}/{folder}/" if folder else f"{root}/"
