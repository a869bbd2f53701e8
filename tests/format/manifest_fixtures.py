"""Small manifests and parts to bend."""

from __future__ import annotations

from typing import Any

import msgspec
import zstandard

from ckptfmt.format import checksum
from ckptfmt.format.index import Index, TensorEntry
from ckptfmt.format.manifest import Manifest, RankRow, Writer, encode_sound, validate
from ckptfmt.format.part import Part
from ckptfmt.format.tables import BoxTable, PackRow, TensorTable
from ckptfmt.format.trees import Trees

KEY = "0123456789abcdef0123456789abcdef"
UUID = "00000000-0000-0000-0000-000000000001"
NOW = "2025-01-02T03:04:05Z"
HEAD = 4096
SHARED: dict[str, Any] = {
    "key": KEY,
    "step": 5,
    "launch": KEY,
    "save_number": 0,
    "created_at": NOW,
    "chunk_bytes": 16,
    "writer": Writer(library="ckptfmt", version="test"),
}


def pack_row(**change: Any) -> PackRow:
    row = {
        "name": "r00000-p000.safetensors",
        "rank": 0,
        "nbytes": HEAD + 100,
        "header_bytes": HEAD,
        "header_digest": KEY,
    }
    return PackRow(**row | change)


def hexes(raw: bytes, chunk: int = 16) -> str:
    return "".join(checksum.hex_digest(raw[a : a + n]) for a, n in checksum.chunk_spans(len(raw), chunk))


def tensors() -> TensorTable:
    """w: 2 x 3 float32 in two boxes; b: scalar float64; e: empty; r: per rank."""
    return TensorTable(
        name=["w", "b", "e", "r"],
        kind=["sharded", "replicated", "replicated", "per_rank"],
        rank=[-1, -1, -1, 0],
        dtype=["float32", "float64", "bfloat16", "uint8"],
        shape=[(2, 3), (), (0, 4), (5,)],
    )


def boxes() -> BoxTable:
    return BoxTable(
        tensor=[0, 0, 1, 2, 3],
        start=[(0, 0), (1, 0), (), (0, 0), (0,)],
        size=[(1, 3), (1, 3), (), (0, 4), (5,)],
        pack=[0, 0, 0, 0, 0],
        offset=[HEAD, HEAD + 12, HEAD + 24, HEAD + 32, HEAD + 32],
        digests=[hexes(b"a" * 12), hexes(b"b" * 12), hexes(b"c" * 8), "", hexes(b"d" * 5)],
    )


def manifest(**change: Any) -> Manifest:
    pairs = [
        ["w", {"tensor": "w"}],
        ["b", {"tensor": ["b", "parameter"]}],
        ["also", {"tensor": "tied"}],
        ["e", {"array": "e"}],
    ]
    trees = Trees(common={"dict": [*pairs, ["mine", {"per_rank": "s"}]]}, per_rank={"0": {"s": {"tensor": "r"}}})
    fields = SHARED | {
        "packs": [pack_row()],
        "tensors": tensors(),
        "boxes": boxes(),
        "aliases": {"tied": "w"},
        "metadata": {"dict": [["lr", 0.1]]},
        "repository": UUID,
        "run": "llama",
        "id": 1,
        "parent": None,
        "ranks": [RankRow(rank=0, mesh={"dp": 0})],
        "trees": trees,
    }
    return Manifest(**fields | change)


def part(rank: int = 0, world_size: int = 1, **change: Any) -> Part:
    return Part(**SHARED | {"rank": rank, "world_size": world_size} | change)


def stored(value: Any) -> bytes:
    """Write without any check, as a broken writer would."""
    return zstandard.compress(value if isinstance(value, bytes) else msgspec.json.encode(value))


def encoded(manifest: Manifest) -> bytes:
    """Write as a saver does; ``FormatError`` for what a reader would refuse."""
    return encode_sound(validate(manifest))


def found(index: Index, name: str, rank: int | None = None) -> TensorEntry:
    return index.entry(index.row(name, rank))


def plain(value: Any) -> dict[str, Any]:
    """As plain JSON, to bend."""
    members: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return members
