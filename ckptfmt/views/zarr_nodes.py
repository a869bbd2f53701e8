"""A generation as a Zarr v3 hierarchy: one flat group, an array for every tensor, each with its document.

Needs no Zarr library. Node names are tensor names, dots verbatim; see README.md for what is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ckptfmt.engine.opened import Opened
from ckptfmt.engine.stored import Stored
from ckptfmt.format.boxes import Box, Extent
from ckptfmt.format.dtypes import dtype
from ckptfmt.views.grid import Grid, Presented, free_grid, present

DOCUMENT: Final = "zarr.json"
CHUNKS: Final = "c"

CORE: Final = frozenset(
    {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
    | {"bool", "float16", "float32", "float64", "complex64", "complex128"}
)
"""Element types that every reader of Zarr v3 knows, by our name and theirs."""
EXTENDED: Final = frozenset(
    {"bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
"""Those with registered names that ``zarr_dtypes`` teaches zarr-python."""
TENSORSTORE: Final = CORE | EXTENDED | {"int2", "int4"}
"""Those that TensorStore knows by itself; it has an element of the smallest ones in a byte, too."""

_ESCAPED: Final = re.compile(r"[%/\\\x00-\x1f\x7f]")
_LIKE_RANK: Final = re.compile(r"@(?=[0-9]+\Z)")


def node_name(tensor: str, rank: int | None = None) -> str:
    """The name of a tensor's node. Where several ranks kept one name, ``@`` and the rank follow it.

    Different tensors have different nodes: what Zarr keeps for itself, and what would read as something else, is
    written as a percent sign and two hex digits, as in a URL.
    """
    name = _ESCAPED.sub(_escape, tensor)
    name = _LIKE_RANK.sub("%40", name)
    if not name.strip(".") or name.startswith("__") or name in (DOCUMENT, CHUNKS):
        name = f"%{ord(name[0]):02X}{name[1:]}" if name else "%"
    return name if rank is None else f"{name}@{rank}"


def chunk_key(node: str, index: Extent) -> str:
    """The key of a chunk in a store: ``name/c/0/1``; ``name/c`` where there are no dimensions."""
    return "/".join((node, CHUNKS, *map(str, index)))


def _escape(found: re.Match[str]) -> str:
    return f"%{ord(found[0]):02X}"


@dataclass(frozen=True)
class ArrayNode:
    """A tensor as a Zarr array. ``shape`` and the grid count elements of ``dtype``, the type that it is shown as:
    the tensor's own, or ``uint8`` with the bytes of an element as one more dimension."""

    name: str
    stored: Stored
    dtype: str
    shape: Extent
    alias: str | None = None
    """The name by which the state knows this tensor too."""

    @property
    def itemsize(self) -> int:
        return dtype(self.dtype).itemsize

    @property
    def as_bytes(self) -> bool:
        return self.dtype != self.stored.dtype

    @property
    def _suffix(self) -> Extent:
        return self.shape[len(self.stored.shape) :]

    @cached_property
    def presented(self) -> Presented | None:
        """Its chunks as ranges of its boxes; None where those form no regular grid."""
        boxes: list[Box] = [(box.start, box.size) for box in self.stored.boxes]
        suffix = self._suffix
        if suffix:
            zeros = (0,) * len(suffix)
            boxes = [(start + zeros, size + suffix) for start, size in boxes]
        return present(self.shape, boxes, self.itemsize)

    @cached_property
    def free_grid(self) -> Grid:
        """A grid of chunks that have to be put together."""
        return free_grid(self.shape, self.itemsize)

    @property
    def shown(self) -> Presented | None:
        """``presented``, where its chunks are of a handy size."""
        presented = self.presented
        return presented if presented is not None and presented.handy else None

    @property
    def grid(self) -> Grid:
        """The grid for readers who can have chunks put together."""
        shown = self.shown
        return self.free_grid if shown is None else shown.grid

    @cached_property
    def document(self) -> bytes:
        return self.document_of(self.grid)

    def document_of(self, grid: Grid) -> bytes:
        """Its ``zarr.json``, with the chunks of ``grid``."""
        facts: dict[str, Any] = {"tensor": self.alias or self.stored.name, "dtype": self.stored.dtype}
        if self.alias is not None:
            facts["same_as"] = self.stored.name
        if self.stored.rank >= 0:
            facts["rank"] = self.stored.rank
        codec: dict[str, Any] = {"name": "bytes"}
        if self.itemsize > 1:
            codec["configuration"] = {"endian": "little"}
        return _json(
            {
                "zarr_format": 3,
                "node_type": "array",
                "shape": self.shape,
                "data_type": self.dtype,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": grid.chunk}},
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
                "fill_value": _fill_value(self.dtype),
                "codecs": [codec],
                # No node has a slash in its name, so no dimension is called like another tensor.
                "dimension_names": [f"{self.name}/{axis}" for axis in range(len(self.shape))],
                "attributes": {"ckptfmt": facts},
            }
        )


def _fill_value(name: str) -> Any:
    """Never seen, since every chunk is there, but a value of the type is asked for."""
    if name == "bool":
        return False
    if name.startswith("complex"):
        return [0.0, 0.0]
    if name == "float8_e8m0fnu":  # it has no zero
        return 1.0
    return 0.0 if "float" in name else 0


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


class Nodes(Mapping[str, ArrayNode]):
    """All arrays of a generation by node name; each is made when asked for.

    Element types that are not in ``known`` are shown as ``uint8``.
    """

    def __init__(self, opened: Opened, known: frozenset[str] = CORE | EXTENDED) -> None:
        self.opened = opened
        self._known = known
        self._made: dict[str, ArrayNode] = {}

    @cached_property
    def _rows(self) -> dict[str, tuple[int, str | None]]:
        """Node name -> row of the manifest's table, and the alias if it stands under one."""
        index, ranks = self.opened.index, self.opened.manifest.tensors.rank
        found: dict[str, tuple[int, str | None]] = {}
        for name in index:
            found.update(_named(name, index.rows(name), ranks, None))
        for alias in self.opened.manifest.aliases:
            found.update(_named(alias, index.rows(alias), ranks, alias))
        return found

    @cached_property
    def document(self) -> bytes:
        """The group's own ``zarr.json``."""
        info = self.opened.info
        facts = {"run": info.run, "id": info.id, "key": info.key, "step": info.step}
        return _json({"zarr_format": 3, "node_type": "group", "attributes": {"ckptfmt": facts}})

    def __getitem__(self, name: str) -> ArrayNode:
        found = self._made.get(name)
        if found is None:
            row, alias = self._rows[name]
            found = self._made[name] = array_node(name, self.opened.stored.at(row), self._known, alias)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows


def array_node(name: str, stored: Stored, known: frozenset[str], alias: str | None = None) -> ArrayNode:
    """The node of a tensor: of its own element type if that is ``known``, else as ``uint8``."""
    if stored.dtype in known:
        return ArrayNode(name, stored, stored.dtype, stored.shape, alias)
    width = dtype(stored.dtype).itemsize
    return ArrayNode(name, stored, "uint8", (*stored.shape, width) if width > 1 else stored.shape, alias)


def _named(
    name: str, rows: list[int], ranks: list[int], alias: str | None
) -> Iterator[tuple[str, tuple[int, str | None]]]:
    several = len(rows) > 1
    for row in rows:
        yield node_name(name, ranks[row] if several else None), (row, alias)
