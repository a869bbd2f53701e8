"""The part: what one rank wrote, and which replicas it holds. Its durability is the rank's acknowledgement."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from ckptfmt.errors import FormatError
from ckptfmt.format import extents, tables
from ckptfmt.format.manifest import (
    Shared,
    build,
    check_shared,
    read_exact,
    read_shared,
    read_slots,
    to_json,
)
from ckptfmt.format.tables import ClaimTable
from ckptfmt.format.tree_walk import parse_node
from ckptfmt.format.trees import Trees, check_references
from ckptfmt.format.verdict import Count, Positive

PART_BYTES_MAX: Final = 1 << 30


class Part(Shared, kw_only=True):
    """One rank's share of a generation.

    ``tensors`` lists what the rank's boxes and claims belong to; ``tree`` is its view of the common
    state and ``per_rank`` holds the nodes of its own slots. Pack indices count within the part.
    """

    object: Literal["part"] = "part"
    rank: Count
    world_size: Positive
    mesh: dict[str, Count] | None = None
    replica_check: Literal["off"] | msgspec.UnsetType = msgspec.UNSET
    """Unset: the claims have digests, to be compared with those of who wrote the boxes."""
    claims: ClaimTable = msgspec.field(default_factory=ClaimTable)
    tree: Any = None
    per_rank: dict[str, Any] = msgspec.field(default_factory=dict)


def encode_part(part: Part) -> bytes:
    """Return the stored bytes of a part: compact JSON. Refuses (``FormatError``) one that a reader would refuse."""
    validate_part(part)
    stored = to_json(part, f"the part of rank {part.rank}")
    _check_length(stored)
    return stored


def decode_part(stored: bytes) -> Part:
    """Return a part after checking all of it. Errors as of ``manifest.decode_manifest``."""
    _check_length(stored)
    what = "the part"
    part = read_exact(stored, Part) or _read(stored, what)
    validate_part(part)
    return part


def _check_length(stored: bytes) -> None:
    if len(stored) > PART_BYTES_MAX:
        raise FormatError(f"the part has {len(stored)} bytes; at most {PART_BYTES_MAX} are read")


def _read(text: bytes, what: str) -> Part:
    fields = read_shared(text, what, nodes=("tree", "per_rank"))
    if "tree" in fields:
        fields["tree"] = parse_node(bytes(fields["tree"]), f"{what}'s state")
    if "per_rank" in fields:
        fields["per_rank"] = read_slots(fields["per_rank"], f"{what}'s per-rank tree")
    return build(fields, Part, what)


def validate_part(part: Part) -> None:
    """Check a part by itself; how parts fit together is ``merge``'s to check."""
    what = described(part)
    tensor_bytes, names = check_shared(part, what)
    check_own(part, tensor_bytes, what)
    trees = Trees(common=part.tree, per_rank={str(part.rank): part.per_rank})
    check_references(trees, names, what)


def described(part: Part) -> str:
    """How messages call a part."""
    return f"the part of rank {part.rank} of generation {part.key}"


def check_own(part: Part, tensor_bytes: list[int], what: str) -> None:
    """Check what one rank's part can't have in common with those of other ranks: owners, boxes, claims and packs."""
    if part.rank >= part.world_size:
        raise FormatError(f"{what}: there are only {part.world_size} ranks")
    if not {-1, part.rank}.issuperset(part.tensors.rank):
        raise FormatError(f"{what}: it holds a tensor that belongs to another rank")
    if any(pack.rank != part.rank and pack.generation is None for pack in part.packs):
        raise FormatError(f"{what}: it lists a new pack of another rank")
    sizes = tables.check_boxes(part.tensors, part.boxes, tensor_bytes, part.chunk_bytes, what)
    _check_claims(part, tensor_bytes, f"{what}, claims")
    extents.check_extents(part.tensors, part.boxes, sizes.nbytes, part.packs, what)
    if not sizes.whole:
        _check_held(part, what)


def _check_claims(part: Part, tensor_bytes: list[int], what: str) -> None:
    if part.replica_check is msgspec.UNSET:
        tables.check_boxes(part.tensors, part.claims, tensor_bytes, part.chunk_bytes, what)
        return
    if any(part.claims.digests):
        raise FormatError(f"{what}: they have digests, though replicas are not compared")
    tables.check_places(part.tensors, part.claims, what)


def _check_held(part: Part, what: str) -> None:
    """A rank may hold nothing of a tensor that is spread over ranks, but nothing else stands without box or claim."""
    held = {*part.boxes.tensor, *part.claims.tensor}
    if len(held) == len(part.tensors.name):
        return
    for row, kind in enumerate(part.tensors.kind):
        if kind != "sharded" and row not in held:
            raise FormatError(f"{what}: tensor {part.tensors.name[row]!r} has neither a box nor a claim")
