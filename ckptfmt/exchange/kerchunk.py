"""A generation as a Zarr v3 group of references into its packs: fsspec's reference file system (kerchunk version 1).

Who opens it needs fsspec and zarr, and nothing of ckptfmt. Element types that not every Zarr knows are shown as their
bytes. References carry no digests: what is read through them is not verified.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from ckptfmt.engine.keep.verify import Progress
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.reports import Report
from ckptfmt.engine.roots import root_path
from ckptfmt.errors import Conflict, InvalidInput, NotFound
from ckptfmt.exchange.counting import Count
from ckptfmt.views.box_bytes import VerifiedBytes
from ckptfmt.views.chunks import Chunk
from ckptfmt.views.references import grid_of_references, references
from ckptfmt.views.zarr_nodes import CORE, DOCUMENT, ArrayNode, Nodes, chunk_key

SIDE_SUFFIX: Final = ".bytes"


@dataclass(frozen=True)
class KerchunkExport(Report):
    """What was written. ``side_file`` holds ``copied_nbytes`` of chunks that are no range of a pack; None without any.
    ``as_bytes`` are the arrays whose element type is shown as ``uint8``."""

    report: str
    url: str
    run: str
    generation_id: int
    step: int
    file: str
    arrays: int
    references: int
    side_file: str | None
    copied_nbytes: int
    as_bytes: tuple[str, ...]


def export_kerchunk(
    opened: Opened, target: Path, *, root: str | None = None, progress: Progress | None = None
) -> KerchunkExport:
    """Write the references of ``opened`` to ``target``, and beside it what is no range of a pack.

    ``root`` is how readers reach the repository, if not by its own URL. ``Conflict`` if a file is there already,
    ``NotFound`` without its folder, ``Corrupt`` for damage in what had to be copied. ``progress(done, total)`` gets the
    bytes of the arrays that are done.
    """
    target = target.absolute()
    if target.suffix != ".json":
        raise InvalidInput(f"{target}: readers know references by the ending .json: give such a name")
    side = _SideFile(target.with_name(target.name + SIDE_SUFFIX))
    for path in (target, side.path):
        if os.path.lexists(path):
            raise Conflict(f"{path} is there already: remove it, or give another name")
    nodes = Nodes(opened, known=CORE)
    try:
        refs = _References(opened, root or reader_url(opened.site.backend.url), side)
        count = Count(progress, sum(nodes[name].stored.nbytes for name in nodes))
        for name in nodes:
            refs.add(nodes[name])
            count.add(nodes[name].stored.nbytes)
        refs.documents[DOCUMENT] = nodes.document.decode()
        side.close()
        _write_new(
            target, json.dumps({"version": 1, "refs": refs.documents | refs.ranges}, ensure_ascii=False).encode()
        )
    except BaseException:
        side.discard()
        raise
    return KerchunkExport(
        report="export.kerchunk",
        url=opened.site.backend.url,
        run=opened.info.run,
        generation_id=opened.info.id,
        step=opened.info.step,
        file=str(target),
        arrays=len(nodes),
        references=len(refs.ranges),
        side_file=str(side.path) if side.nbytes else None,
        copied_nbytes=side.nbytes,
        as_bytes=tuple(name for name in nodes if nodes[name].as_bytes),
    )


def reader_url(url: str) -> str:
    """A root's URL as fsspec reads it: paths of its local file system are not escaped."""
    return f"file://{root_path(url)}" if url.startswith("file:") else url.rstrip("/")


class _References:
    """Collects key -> document, and key -> [URL, offset, length]."""

    def __init__(self, opened: Opened, root: str, side: _SideFile) -> None:
        self._root = root.rstrip("/")
        self._side = side
        self._source = VerifiedBytes(opened)
        self.documents: dict[str, Any] = {}
        self.ranges: dict[str, Any] = {}

    def add(self, node: ArrayNode) -> None:
        self.documents[f"{node.name}/{DOCUMENT}"] = node.document_of(grid_of_references(node)).decode()
        for index, found in references(node):
            if isinstance(found, Chunk):
                where = self._side.append(found.read(self._source, 0, found.nbytes))
            else:
                where = [f"{self._root}/{found.pack}", found.offset, found.nbytes]
            self.ranges[chunk_key(node.name, index)] = where


class _SideFile:
    """Chunks one after the other in a new file, made when there is a first one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        self._file: BinaryIO | None = None

    def append(self, data: memoryview) -> list[Any]:
        if self._file is None:
            self._file = _open_new(self.path)
        self._file.write(data)
        found = [f"file://{self.path}", self.nbytes, len(data)]
        self.nbytes += len(data)
        return found

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def discard(self) -> None:
        if self._file is not None:
            self._file.close()
            self.path.unlink(missing_ok=True)


def _open_new(path: Path) -> BinaryIO:
    try:
        return open(path, "xb")
    except FileExistsError as error:
        raise Conflict(f"{path} is there already: remove it, or give another name") from error
    except FileNotFoundError as error:
        raise NotFound(f"{path.parent} is not there: make the folder, or give another one") from error


def _write_new(path: Path, data: bytes) -> None:
    with _open_new(path) as file:
        file.write(data)
