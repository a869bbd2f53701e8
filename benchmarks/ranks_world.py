"""The ranks of a large job, as far as a commit sees them: their parts with made-up digests, and packs without bytes.

Packs are sparse files of the right length, so that looking for them is real. Nobody reads them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from ckptfmt.__about__ import __version__
from ckptfmt.format import checksum, layout
from ckptfmt.format.boxes import Box
from ckptfmt.format.checksum import HEX_DIGITS
from ckptfmt.format.dtypes import dtype
from ckptfmt.format.manifest import Writer, manifest_digest
from ckptfmt.format.part import Part, encode_part
from ckptfmt.format.tables import BoxTable, ClaimTable, PackRow, TensorTable
from ckptfmt.ports.coordination import PartReport

RUN: Final = "run"
PREFIX: Final = "ranks"
"""Of the keys in the store."""
Layout = Literal["even", "mesh", "tiny"]
TENSOR_PARALLEL: Final = 8
_HIDDEN: Final = 8192
_LAYER: Final = (
    ("attention.wq.weight", (_HIDDEN, _HIDDEN)),
    ("attention.wk.weight", (1024, _HIDDEN)),
    ("attention.wv.weight", (1024, _HIDDEN)),
    ("attention.wo.weight", (_HIDDEN, _HIDDEN)),
    ("feed_forward.w1.weight", (28672, _HIDDEN)),
    ("feed_forward.w2.weight", (_HIDDEN, 28672)),
    ("feed_forward.w3.weight", (28672, _HIDDEN)),
    ("attention_norm.weight", (_HIDDEN,)),
    ("ffn_norm.weight", (_HIDDEN,)),
)
"""A layer of a model of 70 billion parameters."""
_EMBEDDING: Final = ("tok_embeddings.weight", (50257, _HIDDEN))
"""Rows that no world size divides."""
DTYPE: Final = "bfloat16"
OWN_BYTES: Final = 5056
"""torch's CPU generator, which every rank keeps for itself."""
_OWN: Final = "own.torch"
_BLOCK: Final = 4096
_HEADER_BYTES_EACH: Final = 160
"""What one entry takes in a pack's header, about."""


@dataclass(frozen=True)
class World:
    """``ranks`` ranks that hold ``tensors`` tensors together, and a random state each.

    ``even``: every tensor is cut along its first dimension into equal shares, one for each rank (FSDP). ``mesh``:
    ranks/8 x 8, matrices cut by both dimensions, shares uneven, vectors held by 8 ranks each, of which one writes them
    and the others claim them (FSDP x TP).
    """

    ranks: int
    tensors: int
    layout: Layout = "even"

    @cached_property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and global shapes."""
        found: list[tuple[str, tuple[int, ...]]] = [_EMBEDDING] if self.layout == "mesh" else []
        number = 0
        while len(found) < self.tensors:
            found += [(f"model.layers.{number}.{name}", shape) for name, shape in _LAYER]
            number += 1
        if self.layout == "tiny":
            found = [(name, (4 * self.ranks, 8)) for name, _ in found]
        if self.layout == "even":
            found = [(name, (-(-shape[0] // self.ranks) * self.ranks, *shape[1:])) for name, shape in found]
        return found[: self.tensors]

    @property
    def across(self) -> int:
        """Ranks along the mesh's second dimension."""
        return min(TENSOR_PARALLEL, self.ranks) if self.layout == "mesh" else 1

    def share(self, rank: int, shape: tuple[int, ...]) -> Box | None:
        """The box of a tensor that ``rank`` holds, None for an empty one. Shares are cut as torch cuts them."""
        along, across = divmod(rank, self.across)
        first, count = _piece(shape[0], self.ranks // self.across, along)
        if not count:
            return None
        if len(shape) == 1:
            return (first,), (count,)
        second, width = _piece(shape[1], self.across, across)
        return ((first, second), (count, width)) if width else None

    def writes(self, rank: int, number: int, shape: tuple[int, ...]) -> bool:
        """Whether ``rank`` writes its box of tensor ``number``, or another rank that holds the same one does."""
        return len(shape) > 1 or number % self.across == rank % self.across

    def mesh_of(self, rank: int) -> dict[str, int]:
        along, across = divmod(rank, self.across)
        return {"dp": along, "tp": across} if self.layout == "mesh" else {"dp": along}


def _piece(length: int, pieces: int, number: int) -> tuple[int, int]:
    """Where a piece of a dimension begins, and how long it is."""
    each = -(-length // pieces)
    first = min(number * each, length)
    return first, min(each, length - first)


@dataclass(frozen=True)
class Save:
    """Which save the parts are of: the first one of its launch."""

    token: str
    n: int = 0
    step: int = 100
    run_key: str = layout.run_key(RUN)

    @property
    def key(self) -> str:
        return layout.generation_key(self.token, self.run_key, self.n)

    @property
    def folder(self) -> str:
        return layout.generation_folder(self.run_key, self.key)


def write_ranks(world: World, save: Save, root: Path) -> Iterator[PartReport]:
    """Write the packs and parts of all ranks into the generation's folder; yield what each of them reports."""
    folder = root / save.folder
    tree = _tree(world)
    for rank in range(world.ranks):
        part = _part(world, save, rank, tree)
        for pack in part.packs:
            with (folder / pack.name).open("xb") as file:
                os.truncate(file.fileno(), pack.nbytes)
        stored = encode_part(part)
        name = layout.part_name(rank)
        (folder / name).write_bytes(stored)
        nbytes = sum(pack.nbytes for pack in part.packs)
        yield PartReport(rank, name, manifest_digest(stored), nbytes, 0.1, 1.0, 0)


def _tree(world: World) -> Any:
    """What every rank saw, its own random state aside."""
    model = [[name, {"tensor": name}] for name, _ in world.shapes]
    return {"dict": [["model", {"dict": model}], ["step", 7], ["own", {"per_rank": "own"}]]}


def _part(world: World, save: Save, rank: int, tree: Any) -> Part:
    shapes = world.shapes
    boxes, claims = BoxTable(), ClaimTable()
    end = header = -(-(len(shapes) + 1) * _HEADER_BYTES_EACH // _BLOCK) * _BLOCK
    digits = random.Random(f"{save.key}/{rank}")
    for row, (name, shape) in enumerate(shapes):
        box = world.share(rank, shape)
        if box is None:
            continue
        nbytes = _bytes_of(box)
        chunks = -(-nbytes // checksum.CHUNK_BYTES)
        source = digits if len(shape) > 1 else random.Random(f"{name}/{box[0]}")
        table: BoxTable | ClaimTable = boxes if world.writes(rank, row, shape) else claims
        table.tensor.append(row)
        table.start.append(box[0])
        table.size.append(box[1])
        table.digests.append(_hex(source, chunks))
        if isinstance(table, BoxTable):
            table.pack.append(0)
            table.offset.append(end)
            end += nbytes
    boxes.tensor.append(len(shapes))
    boxes.start.append((0,))
    boxes.size.append((OWN_BYTES,))
    boxes.digests.append(_hex(digits, 1))
    boxes.pack.append(0)
    boxes.offset.append(end)
    pack = PackRow(
        name=layout.pack_name(rank, 0),
        rank=rank,
        nbytes=end + OWN_BYTES,
        header_bytes=header,
        header_digest=_hex(digits, 1),
    )
    return Part(
        key=save.key,
        step=save.step,
        launch=layout.launch_digest(save.token),
        save_number=save.n,
        created_at="2026-01-01T00:00:00Z",
        writer=Writer(library="ckptfmt", version=__version__),
        packs=[pack],
        tensors=_tensors(world, rank),
        boxes=boxes,
        metadata={"dict": [["loss", 2.5]]},
        rank=rank,
        world_size=world.ranks,
        mesh=world.mesh_of(rank),
        claims=claims,
        tree=tree,
        per_rank={"own": {"dict": [["torch", {"tensor": _OWN}], ["position", rank]]}},
    )


def _tensors(world: World, rank: int) -> TensorTable:
    shapes = world.shapes
    return TensorTable(
        name=[*(name for name, _ in shapes), _OWN],
        kind=[*("sharded" for _ in shapes), "per_rank"],
        rank=[*(-1 for _ in shapes), rank],
        dtype=[*(DTYPE for _ in shapes), "uint8"],
        shape=[*(shape for _, shape in shapes), (OWN_BYTES,)],
    )


def _bytes_of(box: Box) -> int:
    count = 1
    for length in box[1]:
        count *= length
    return count * dtype(DTYPE).itemsize


def _hex(source: random.Random, chunks: int) -> str:
    return source.randbytes(chunks * HEX_DIGITS // 2).hex()
