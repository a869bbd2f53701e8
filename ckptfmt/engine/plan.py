"""Where every leaf's bytes go: packs, offsets, and the units in which a pack is hashed and written.

A plan depends only on the structure of the state (names, dtypes, shapes, boxes), so it is kept
between saves of the same structure. In the arena a pack lies exactly as it will lie in its file,
header included, so a write needs no copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptfmt.engine.transfer import IO_BYTES
from ckptfmt.format import checksum, pack
from ckptfmt.ports.arrays import LeafSpec

ALIGNMENT = 4096

Signature = tuple[tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], str], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One span to be hashed: ``leaf`` counts in the plan's leaves, ``offset`` in the pack file."""

    leaf: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Unit:
    """A range of a pack file written at once, with the chunks that start in it."""

    start: int
    stop: int
    chunks: tuple[Chunk, ...]
    leaves: frozenset[int]
    """All leaves that have bytes in the range or in the chunks."""


@dataclass(frozen=True)
class PackPlan:
    header: bytes
    header_digest: str
    nbytes: int
    arena_offset: int
    leaves: tuple[int, ...]
    """Leaf indices in file order."""
    offsets: tuple[int, ...]
    """Absolute file offset of each, in the same order."""
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class SavePlan:
    signature: Signature
    packs: tuple[PackPlan, ...]
    arena_bytes: int
    tensor_bytes: int


def signature_of(leaves: Sequence[tuple[str, LeafSpec]]) -> Signature:
    return tuple((name, s.dtype, s.global_shape, s.start, s.size, s.kind) for name, s in leaves)


def make_plan(leaves: Sequence[tuple[str, LeafSpec]], signature: Signature) -> SavePlan:
    """Lay ``leaves`` out in packs. Pure arithmetic: nothing is allocated or written."""
    entries = [
        pack.PackEntry(
            name=name, dtype=s.dtype, size=s.size, start=s.start, global_shape=s.global_shape, nbytes=s.nbytes
        )
        for name, s in leaves
    ]
    order = pack.order(entries)
    groups = pack.split([entries[index] for index in order])
    packs: list[PackPlan] = []
    arena_offset = 0
    for group in groups:
        members = [order[position] for position in group]
        layout = pack.layout_pack([entries[index] for index in members])
        units = _units(members, layout.offsets, [entries[index].nbytes for index in members], layout.nbytes)
        packs.append(
            PackPlan(
                header=layout.header,
                header_digest=layout.header_digest,
                nbytes=layout.nbytes,
                arena_offset=arena_offset,
                leaves=tuple(members),
                offsets=tuple(layout.offsets),
                units=units,
            )
        )
        arena_offset += align_up(layout.nbytes)
    return SavePlan(signature, tuple(packs), arena_offset, sum(entry.nbytes for entry in entries))


def align_up(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def align_down(value: int) -> int:
    return value // ALIGNMENT * ALIGNMENT


def _units(members: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], nbytes: int) -> tuple[Unit, ...]:
    """Cut a pack file at aligned offsets into ranges of about ``IO_BYTES``; the first begins with the header."""
    units: list[Unit] = []
    chunks: list[Chunk] = []
    start = 0
    touched: set[int] = set()
    for leaf, offset, size in zip(members, offsets, sizes, strict=True):
        for inner, length in checksum.chunk_spans(size, checksum.CHUNK_BYTES):
            chunks.append(Chunk(leaf, offset + inner, length))
            touched.add(leaf)
            stop = align_down(offset + inner + length)
            if stop - start >= IO_BYTES:
                units.append(Unit(start, stop, tuple(chunks), frozenset(touched)))
                start, chunks, touched = stop, [], {leaf}
    if start < nbytes or chunks:
        units.append(Unit(start, nbytes, tuple(chunks), frozenset(touched)))
    return tuple(units)
